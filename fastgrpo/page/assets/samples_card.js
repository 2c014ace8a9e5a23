"use strict";
// A group of a step: the prompt, and a card for each of its completions.
window.fastgrpoSamples = window.fastgrpoSamples || {};
((samples, { element }) => {
  const { plain, marked, write, cutAt, number, describe } = samples;
  const FIRST = 1500; // characters of a text that a card shows at first: 64 cards of 4,000 tokens are there at once
  const MORE = 50000; // characters that a press on the button adds

  /**
   * Show the start of a text, and a button for more while there is more. Each part is a box of its own, so that a part
   * outside of the window costs nothing: a text may have a million characters.
   * @param parent gets the button
   * @param box gets the parts
   * @param text the whole text
   * @param limit how many characters are shown at first
   * @param append (part, from, to) writes a part
   */
  function growing(parent, box, text, limit, append) {
    const row = element("p", { class: "more" });
    let shown = 0;
    const grow = (upTo) => {
      const part = element("div", { class: shown ? "part later" : "part" });
      const next = cutAt(text, upTo);
      append(part, shown, next);
      box.append(part);
      shown = next;
      const left = text.length - shown;
      const told = text.length.toLocaleString("en");
      if (left <= 0) return row.remove();
      const what = left <= MORE ? `Show all ${told} characters` : `Show ${MORE.toLocaleString("en")} more of ${told} characters`;
      row.replaceChildren(element("button", { type: "button", onclick: () => {
        grow(shown + MORE);
        // The button that was pressed is gone; the keyboard's user goes on here.
        (row.isConnected ? row.firstChild : box).focus({ preventScroll: true });
      } }, what));
    };
    parent.append(row);
    grow(limit);
  }

  /** How many characters to show so that the hits of a search are seen. */
  function reach(hits) {
    return hits.length ? Math.max(FIRST, hits[Math.min(hits.length, 20) - 1][1] + 200) : FIRST;
  }

  /** The prompt: a text, or messages with their roles. */
  function prompt(value, find) {
    const box = element("div", { class: "prompt" });
    const turns = Array.isArray(value) ? value : [{ role: null, content: value }];
    for (const { role, content } of turns) {
      const hits = find(content);
      const text = element("div", { class: "text", dir: "auto", tabindex: "-1" });
      const turn = element("div", { class: "turn" });
      if (role !== null) {
        const label = element("h4", { class: "role" });
        plain(label, role);
        turn.append(label);
      }
      turn.append(text);
      box.append(turn);
      growing(turn, text, content, reach(hits), (part, from, to) => marked(part, content, from, to, hits));
    }
    return box;
  }

  /** The rewards of a completion in one number: their sum with the run's weights. */
  function total(completion, weights) {
    const values = Object.values(completion.rewards);
    if (!values.length || values.every((value) => value === null)) return null;
    return values.reduce((sum, value, i) => sum + (value || 0) * (weights && weights.length === values.length ? weights[i] : 1), 0);
  }

  /** The advantage, told by a sign, an arrow and a colour. */
  function advantage(value) {
    const side = value > 0 ? "up" : value < 0 ? "down" : "even";
    const mark = { up: "▲ +", down: "▼ ", even: "" }[side];
    return element("span", { class: `advantage ${side}` }, `${mark}${number(value)}`);
  }

  function fact(name, value) {
    const [term, told] = [element("dt"), element("dd")];
    plain(term, name);
    if (value instanceof Node) told.append(value);
    else plain(told, value);
    return element("div", {}, term, told);
  }

  function facts(completion, weights) {
    const list = element("dl", { class: "facts" });
    const rewards = Object.entries(completion.rewards);
    if (rewards.length !== 1) list.append(fact("reward", number(total(completion, weights))));
    for (const [name, value] of rewards) list.append(fact(rewards.length === 1 ? `reward ${name}` : name, number(value)));
    list.append(
      fact("advantage", advantage(completion.advantage)), fact("ended by", completion.finish_reason || "unknown"),
      fact("tokens", number(completion.tokens)),
      fact("clipped", completion.clipped === null ? "unknown" : `${number(100 * completion.clipped, 1)} %`));
    return list;
  }

  function extras(values) {
    const entries = Object.entries(values);
    if (!entries.length) return null;
    const list = element("dl", { class: "facts" });
    for (const [name, value] of entries) list.append(fact(name, value === null ? "none" : String(value)));
    return element("details", {}, element("summary", {}, `${entries.length} more ${entries.length === 1 ? "column" : "columns"}`), list);
  }

  function copyButton(completion, order) {
    if (!navigator.clipboard) return null;
    const copy = async ({ currentTarget: button }) => {
      await navigator.clipboard.writeText(completion.text).then(() => "Copied", () => "Not allowed")
        .then((told) => { button.textContent = told; });
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    };
    return element("button", { type: "button", class: "copy", "aria-label": `Copy completion ${order}`, onclick: copy }, "Copy");
  }

  /**
   * The card of a completion.
   * @param completion of the payload
   * @param order its place in the group, from 1
   * @param by what colours its tokens
   * @param find gives the hits of the search in a text
   * @param weights of the run's reward functions, or null
   */
  function card(completion, order, by, find, weights) {
    const coloured = by && samples.has(completion, by);
    const text = element("div", {
      class: "text", dir: "auto", tabindex: "0", role: "group", "data-order": order - 1,
      "aria-label": `Text of completion ${order}`,
    });
    const made = element("article", { class: "completion", "data-order": order - 1 },
      element("header", {}, element("h4", {}, `Completion ${order}`), copyButton(completion, order)),
      facts(completion, weights), text);
    if (!completion.text) made.append(element("p", { class: "note" }, "The completion has no text."));
    if (by && !coloured) made.append(element("p", { class: "note" }, "Its tokens have no numbers of this kind."));
    const hits = find(completion.text);
    growing(made, text, completion.text, reach(hits), (part, from, to) => write(part, completion, by, hits, from, to));
    const more = extras(completion.extras || {});
    if (more) made.append(more);
    return made;
  }

  /** Show what is known of a token beside it: under the pointer, and for Shift and the arrow keys in a text. */
  function tips(root, completionOf) {
    const tip = element("div", { class: "tip", role: "status", hidden: true });
    let at = null;
    const hide = () => {
      tip.hidden = true;
      if (at) at.classList.remove("current");
      at = null;
    };
    const show = (token) => {
      hide();
      at = token;
      at.classList.add("current");
      tip.textContent = describe(completionOf(Number(token.closest(".text").dataset.order)), Number(token.dataset.token));
      tip.hidden = false;
      const place = token.getClientRects()[0] || token.getBoundingClientRect();
      tip.style.left = `${Math.max(4, Math.min(place.left, document.documentElement.clientWidth - tip.offsetWidth - 8))}px`;
      tip.style.top = `${place.top > tip.offsetHeight + 8 ? place.top - tip.offsetHeight - 4 : place.bottom + 4}px`;
    };
    root.addEventListener("pointerover", (event) => {
      const token = event.target.closest(".token");
      if (token) show(token);
      else hide();
    });
    root.addEventListener("pointerleave", hide);
    root.addEventListener("focusout", hide);
    window.addEventListener("scroll", () => { if (at && !at.closest(".text").matches(":focus")) hide(); }, { passive: true });
    root.addEventListener("keydown", (event) => {
      const text = event.target.closest(".text[data-order]");
      if (event.key === "Escape") hide();
      if (!text || !event.shiftKey || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const tokens = Array.from(text.querySelectorAll(".token"));
      if (!tokens.length) return;
      event.preventDefault();
      event.stopPropagation();
      const before = at && text.contains(at) ? tokens.indexOf(at) : event.key === "ArrowRight" ? -1 : tokens.length;
      const next = tokens[Math.min(tokens.length - 1, Math.max(0, before + (event.key === "ArrowRight" ? 1 : -1)))];
      next.scrollIntoView({ block: "nearest" });
      show(next);
    });
    return tip;
  }

  Object.assign(samples, { prompt, card, total, tips });
})(window.fastgrpoSamples, window.fastgrpoPage);
