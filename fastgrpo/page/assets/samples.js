// The sample browser: one group of one step at a time. The address of the page holds the place of the reader.

// The text of a completion: tokens with their colours, hits of a search, and escapes of invisible characters.

// Control characters but tab and newline, soft hyphens, zero-width and bidirectional controls, tags, lone surrogates.
const HIDDEN = new RegExp(
  "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u00ad\\u061c\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff" +
    "\\ud800-\\udfff\\u{e0000}-\\u{e007f}]+", "gu");
// How the values fall into classes, whose colours are in style.css.
const SCALES = {
  logps: {
    labels: ["probability over 90 % (log-prob over −0.11)", "50 to 90 %", "20 to 50 %", "5 to 20 %", "1 to 5 %",
      "under 1 % (log-prob under −4.6)"],
    classOf: (value) => `p${[-0.1054, -0.6931, -1.6094, -2.9957, -4.6052].filter((limit) => value < limit).length}`,
    classes: ["p0", "p1", "p2", "p3", "p4", "p5"],
  },
  ratios: {
    labels: ["under 0.8", "0.8 to 0.95", "0.95 to 1.05", "1.05 to 1.2", "over 1.2"],
    classOf: (value) => `r${[0.8, 0.95, 1.05, 1.2].filter((limit) => value > limit).length}`,
    classes: ["r0", "r1", "r2", "r3", "r4"],
  },
  clipped: { labels: ["not clipped", "clipped by the last update"], classes: ["c0", "c1"] },
};

function escaped(hidden) {
  const name = (code) => code > 0xffff ? `\\u{${code.toString(16)}}` : code > 0xff
    ? `\\u${code.toString(16).padStart(4, "0")}` : `\\x${code.toString(16).padStart(2, "0")}`;
  return Array.from(hidden, (character) => name(character.codePointAt(0))).join("");
}

/** Append a text, with escapes for what cannot be seen. */
function plain(parent, text) {
  let done = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > done) parent.append(text.slice(done, match.index));
    const title = "a character that cannot be seen, as its escape";
    parent.append(element("span", { class: "escape", title }, escaped(match[0])));
    done = match.index + match[0].length;
  }
  if (done < text.length) parent.append(text.slice(done));
}

/** Append text[start, end), with the hits of a search marked. Hits are [start, end) in order. */
function marked(parent, text, start, end, hits) {
  let at = start;
  for (const [from, to] of hits) {
    if (to <= at) continue;
    if (from >= end) break;
    if (from > at) plain(parent, text.slice(at, from));
    const mark = element("mark");
    plain(mark, text.slice(Math.max(at, from), Math.min(to, end)));
    parent.append(mark);
    at = Math.min(to, end);
  }
  if (at < end) plain(parent, text.slice(at, end));
}

/** The tokens' ends in the units of a string of JavaScript. A run counts characters, which may take two units. */
function unitEnds(text, ends) {
  if (!/[\ud800-\udfff]/.test(text)) return ends;
  let units = 0, characters = 0;
  return ends.map((end) => {
    for (; characters < end && units < text.length; characters++) units += text.codePointAt(units) > 0xffff ? 2 : 1;
    return units;
  });
}

/** The class of a token, which names its colour; "" where there is nothing to colour. */
function classOfToken(completion, index, by, clipped) {
  const value = by === "clipped" ? null : completion[by][index];
  const scale = by === "clipped" ? `c${Number(clipped.has(index))}` : value === null ? "" : SCALES[by].classOf(value);
  return `token ${scale}${by !== "logps" && clipped.has(index) ? " clip" : ""}`;
}

/** Whether the tokens of a completion can be coloured by `by`. */
function has(completion, by) {
  return Boolean(completion.token_ends && completion[by === "clipped" ? "clipped_tokens" : by]);
}

/** Append text[from, to) of a completion, with tokens coloured by "", "logps", "ratios" or "clipped", and hits marked. */
function write(parent, completion, by, hits, from, to) {
  const text = completion.text;
  if (!by || !has(completion, by)) return marked(parent, text, from, to, hits);
  const ends = unitEnds(text, completion.token_ends);
  const clipped = new Set(completion.clipped_tokens || []);
  let last = 0;
  ends.forEach((given, index) => {
    const start = last, end = Math.min(Math.max(given, start), text.length);
    last = end;
    // A token belongs to each part that holds some of it. One without text belongs to the part that begins with it.
    const inside = start < end ? start < to && end > from : start >= from && (start < to || to === text.length);
    if (!inside) return;
    const token = element("span", { class: classOfToken(completion, index, by, clipped), "data-token": index });
    if (end === start) token.classList.add("empty");
    if (text.slice(start, end).includes("\n")) token.classList.add("newline");
    const near = hits.length ? hits.filter((hit) => hit[1] > start && hit[0] < end) : hits;
    marked(token, text, Math.max(start, from), Math.min(end, to), near);
    parent.append(token);
  });
  if (last < to) marked(parent, text, Math.max(last, from), to, hits);
}

/** Where a text may be cut near `limit` without halving a character. */
function cutAt(text, limit) {
  if (limit >= text.length) return text.length;
  const unit = text.charCodeAt(limit - 1);
  return unit >= 0xd800 && unit < 0xdc00 ? limit + 1 : limit;
}

/** A number as people read it: at most `digits` decimals, and a minus sign. */
function number(value, digits = 3) {
  if (value === null || value === undefined) return "none";
  const size = Math.abs(value);
  const text = size >= 1e6 || (size > 0 && size < 10 ** -digits) ? size.toPrecision(3) : String(Number(size.toFixed(digits)));
  return (value < 0 && Number(text) !== 0 ? "−" : "") + text;
}

/** What is known of a token, as one line. */
function describe(completion, index) {
  const ends = unitEnds(completion.text, completion.token_ends);
  const start = index ? ends[index - 1] : 0;
  const shown = JSON.stringify(completion.text.slice(start, ends[index]).slice(0, 40)).replace(HIDDEN, escaped);
  const told = [`token ${index + 1} of ${ends.length}`];
  told.push(ends[index] === start ? "shows no text" : shown);
  if (completion.logps) {
    const logp = completion.logps[index];
    told.push(`log-prob ${number(logp, 4)} (p ${number(100 * Math.exp(logp), 2)} %)`);
  }
  if (completion.ratios) told.push(`ratio ${number(completion.ratios[index], 4)}`);
  if ((completion.clipped_tokens || []).includes(index)) told.push("clipped");
  return told.join(" · ");
}

// A group of a step: the prompt, and a card for each of its completions.

const FIRST = 1500; // characters of a text that a card shows at first: 64 cards of 4,000 tokens are there at once
const MORE = 50000; // characters that a press on the button adds

/**
 * Show the first `limit` characters of a text, and a button for more; append(part, from, to) writes a part. Each part is
 * a box of its own, so that a part outside of the window costs nothing: a text may have a million characters.
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
    button.textContent = await navigator.clipboard.writeText(completion.text).then(() => "Copied", () => "Not allowed");
  };
  return element("button", { type: "button", class: "copy", "aria-label": `Copy completion ${order}`, onclick: copy }, "Copy");
}

/** The card of a completion, whose place in the group is `order`, from 1. */
function card(completion, order, by, find, weights) {
  const coloured = by && has(completion, by);
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
    if (token) show(token); else hide();
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

// The search in all texts of a run that are in the page.

const LISTED = 100; // hits in the list: more are counted and not shown
const MARKED = 1000; // hits marked in one text

/** Make a function that finds a text's hits, as [start, end). Case does not matter. */
function finder(query) {
  if (!query) return () => [];
  const pattern = new RegExp(query.replace(/[.*+?^${}()|[\]\\\/]/g, "\\$&"), "giu");
  return (text) => {
    const hits = [];
    for (const match of text.matchAll(pattern)) {
      hits.push([match.index, match.index + match[0].length]);
      if (hits.length === MARKED) break;
    }
    return hits;
  };
}

/** The texts of a group: the prompt's, and the completions', by who wrote them. */
function* texts(group) {
  const turns = Array.isArray(group.prompt) ? group.prompt : [{ role: null, content: group.prompt }];
  for (const turn of turns) yield { order: null, text: turn.content };
  for (const [order, completion] of group.completions.entries()) yield { order, text: completion.text };
}

/** Find the texts of a run with a hit. Returns the first ones and how many there are. */
function search(run, query, total) {
  const find = finder(query);
  const found = [];
  let count = 0;
  run.samples.steps.forEach((step, stepIndex) => step.groups.forEach((group, groupIndex) => {
    for (const { order, text } of texts(group)) {
      const [hit] = find(text);
      if (!hit) continue;
      count++;
      if (found.length < LISTED) found.push({ stepIndex, groupIndex, order, text, hit, step, total: order === null ? null : total(group.completions[order]) });
    }
  }));
  return { found, count };
}

/** A line of the list: where the hit is, and what stands around it. A press jumps to it. */
function line(hit, jump) {
  const where = hit.order === null ? "prompt" : `completion ${hit.order + 1}, reward ${number(hit.total)}`;
  const button = element("button", { type: "button", onclick: () => jump(hit) },
    element("b", {}, `Step ${hit.step.step}, group ${hit.groupIndex + 1}, ${where}`), element("br"));
  const [from, to] = hit.hit;
  const around = element("span", { class: "around", dir: "auto" });
  const start = Math.max(0, from - 40), end = Math.min(hit.text.length, to + 60);
  if (start) around.append("… ");
  marked(around, hit.text, start, end, [hit.hit]);
  if (end < hit.text.length) around.append(" …");
  button.append(around);
  return element("li", {}, button);
}

/** Write the list of hits. Returns the sentence that says how many there are. */
function list(parent, run, query, total, jump) {
  parent.replaceChildren();
  if (!query) return "";
  const { found, count } = search(run, query, total);
  if (!count) return "No text in this page holds this.";
  parent.append(...found.map((hit) => line(hit, jump)));
  const said = count === 1 ? "1 text holds this." : `${count.toLocaleString("en")} texts hold this.`;
  return count > found.length ? `${said} The first ${LISTED} are listed.` : said;
}

// The controls: what is shown, how, and the search.

const PAUSE = 200; // milliseconds after the last key before a search begins
const KEYS = [
  [["←", "→"], "another step"], [["↑", "↓"], "another group"], [["Shift ←", "Shift →"], "from token to token in a text"],
];

function labelled(name, control, id, ...more) {
  control.id = id;
  return element("div", { class: "control" }, element("label", { for: id }, name), element("div", { class: "row" }, control, ...more));
}

function button(name, label, press) {
  return element("button", { type: "button", "aria-label": label, title: label, onclick: press }, name);
}

function makeStepping(browser) {
  const { place } = browser;
  browser.runChoice = element("select", { onchange: () => {
    const step = browser.steps.length ? browser.steps[place.step].step : 0;
    place.run = Number(browser.runChoice.value);
    place.step = browser.steps.length ? nearest(browser.steps, step) : 0;
    browser.showRun();
  } }, ...browser.runs.map((run, i) => element("option", { value: i }, run.name)));
  const choice = labelled("Run", browser.runChoice, "samples-run");
  choice.hidden = browser.runs.length === 1;
  browser.slider = element("input", { type: "range", min: 0, "aria-label": "Step, by the slider", oninput: () => {
    place.step = Number(browser.slider.value);
    browser.show();
  } });
  browser.number = element("input", { type: "number", onchange: () => {
    place.step = nearest(browser.steps, Number(browser.number.value));
    browser.show();
  } });
  browser.groupChoice = element("select", { onchange: () => {
    place.group = Number(browser.groupChoice.value);
    browser.show();
  } });
  const around = (name, previous, next) => [
    button(previous, `Previous ${name}`, () => browser.move(name, -1)), button(next, `Next ${name}`, () => browser.move(name, 1)),
  ];
  const [back, on] = around("step", "◀", "▶"), [up, down] = around("group", "▲", "▼");
  const step = labelled("Step", browser.number, "samples-step", back, browser.slider, on);
  step.classList.add("wide");
  browser.stepping = element("div", { class: "controls" }, step, labelled("Group", browser.groupChoice, "samples-group", up, down));
  return choice;
}

function makeLooks(browser, colours) {
  const { place } = browser;
  browser.colour = element("select", { "aria-describedby": "samples-why", onchange: () => {
    place.by = browser.colour.value;
    browser.show();
  } }, ...Object.entries(colours).map(([value, name]) => element("option", { value }, name)));
  browser.sort = element("select", { onchange: () => {
    place.sort = browser.sort.value;
    browser.show();
  } });
  browser.lowest = element("button", { type: "button", "aria-pressed": "false", onclick: () => {
    place.lowest = place.lowest ? "" : "1";
    browser.show();
  } }, "Lowest first");
  let waiting = 0;
  browser.search = element("input", { type: "search", autocomplete: "off", spellcheck: "false", oninput: () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      place.find = browser.search.value;
      browser.showHits();
      browser.show();
    }, PAUSE);
  } });
  browser.why = element("p", { class: "note", id: "samples-why" });
  browser.told = element("p", { class: "told", role: "status" });
  browser.hits = element("ol", { class: "hits", hidden: true, "aria-label": "Texts that hold what you search" });
  browser.looks = element("div", {}, element("div", { class: "controls" },
    labelled("Tokens coloured by", browser.colour, "samples-colour"),
    labelled("Sorted by", browser.sort, "samples-sort", browser.lowest),
    labelled("Search in all texts of the run", browser.search, "samples-search")), browser.why, browser.told, browser.hits);
}

/** Make the controls as parts of the browser, and the panel that holds them. */
function controls(browser, colours) {
  const choice = makeStepping(browser);
  makeLooks(browser, colours);
  const help = element("p", { class: "note shortcuts" }, "Keys in this section: ");
  KEYS.forEach(([keys, does], i) => {
    keys.forEach((key) => help.append(element("kbd", {}, key), " "));
    help.append(does + (i < KEYS.length - 1 ? ", " : "."));
  });
  browser.stepping.prepend(choice);
  browser.panel = element("div", { class: "panel" }, browser.stepping, browser.looks, help);
}

// The browser.

const PLACE = "#samples?"; // how the address begins that holds the place
const COLOURS = { "": "nothing", logps: "log-prob", ratios: "ratio", clipped: "clipped or not" };
const MISSING = {
  logps: "samples.jsonl has no log-probs of tokens, or they did not fit into this page.",
  ratios: "There are no ratios: every ratio is 1 where a step makes one update.",
  clipped: "No update can clip where every ratio is 1.",
};

/** The weights of the reward functions, from the settings that the page shows. */
function weightsOf(run) {
  try {
    const weights = JSON.parse((run.settings || {}).reward_weights);
    return Array.isArray(weights) && weights.every(Number.isFinite) ? weights : null;
  } catch {
    return null;
  }
}

function rewardNames(run) {
  const names = new Set();
  for (const step of run.samples.steps) for (const group of step.groups)
    for (const completion of group.completions) Object.keys(completion.rewards).forEach((name) => names.add(name));
  return Array.from(names);
}

function someHas(run, by) {
  return run.samples.steps.some((step) => step.groups.some((group) =>
    group.completions.some((completion) => has(completion, by))));
}

/** The index of the step that is nearest to a number. */
function nearest(steps, wanted) {
  let best = 0;
  steps.forEach(({ step }, index) => { if (Math.abs(step - wanted) < Math.abs(steps[best].step - wanted)) best = index; });
  return best;
}

class Browser {
  constructor(section, runs) {
    this.section = section;
    this.runs = runs;
    this.place = { run: 0, step: 0, group: 0, by: "", sort: "order", lowest: "", find: "" };
    this.build();
    this.restore();
    this.showRun();
    this.started = true;
  }

  get run() { return this.runs[this.place.run]; }
  get steps() { return this.run.samples.steps; }
  get groups() { return this.steps.length ? this.steps[this.place.step].groups : []; }
  get group() { return this.groups[this.place.group]; }

  /** Take the place from the address. A step is named by its number, as a run that goes on has more of them. */
  restore() {
    if (!location.hash.startsWith(PLACE)) return;
    const given = new URLSearchParams(location.hash.slice(PLACE.length));
    const index = (name, count) => Math.min(Math.max(0, Math.trunc(Number(given.get(name))) || 0), Math.max(0, count - 1));
    this.place.run = index("run", this.runs.length);
    this.place.step = given.has("step") ? nearest(this.steps, Number(given.get("step"))) : 0;
    this.place.group = index("group", this.groups.length);
    for (const name of ["by", "sort", "lowest", "find"]) this.place[name] = given.get(name) || this.place[name];
  }

  /** Keep the place in the address, once the reader has chosen one. */
  keep() {
    if (!this.started) return;
    const kept = { ...this.place, step: this.steps.length ? this.steps[this.place.step].step : 0 };
    const written = new URLSearchParams(Object.entries(kept).filter(([, value]) => value !== ""));
    history.replaceState(null, "", PLACE + written);
  }

  build() {
    controls(this, COLOURS);
    this.where = element("p", { class: "where", role: "status" });
    this.note = element("p", { class: "note" });
    this.legend = element("div", { class: "legend" });
    this.prompt = element("div");
    this.cards = element("div", { class: "completions" });
    this.shown = element("div", { class: "shown" }, element("h3", {}, "Prompt"), this.prompt,
      element("h3", {}, "Completions"), this.legend, this.cards);
    this.shown.append(tips(this.cards, (order) => this.group.completions[order]));
    this.section.append(this.note, this.panel, this.where, this.shown);
    this.section.addEventListener("keydown", (event) => this.key(event));
  }

  /** Show another run: its note, its steps, what its tokens and rewards allow. */
  showRun() {
    this.weights = weightsOf(this.run);
    this.note.textContent = this.run.samples.note;
    const empty = !this.steps.length;
    this.shown.hidden = this.stepping.hidden = this.looks.hidden = empty;
    this.where.textContent = empty ? "There are no samples to show." : "";
    if (empty) return;
    this.setColours();
    const names = rewardNames(this.run);
    const sorts = [["order", "as drawn"], ["reward", names.length > 1 ? "reward in all" : "reward"],
      ...(names.length > 1 ? names.map((name) => [`reward:${name}`, `reward ${name}`]) : []),
      ["advantage", "advantage"], ["tokens", "length"]];
    this.sort.replaceChildren(...sorts.map(([value, name]) => element("option", { value }, name)));
    if (!sorts.some(([value]) => value === this.place.sort)) this.place.sort = "order";
    this.sort.value = this.place.sort;
    this.slider.max = this.steps.length - 1;
    this.number.min = this.steps[0].step;
    this.number.max = this.steps[this.steps.length - 1].step;
    this.search.value = this.place.find;
    this.showHits();
    this.show();
  }

  /** Offer the colours that the run's tokens have numbers for, and say why the others are not offered. */
  setColours() {
    const missing = [];
    for (const option of this.colour.options) {
      option.disabled = option.value !== "" && !someHas(this.run, option.value);
      if (option.disabled) missing.push(MISSING[option.value]);
    }
    const wanted = Array.from(this.colour.options).find((option) => option.value === this.place.by && !option.disabled);
    this.colour.value = this.place.by = wanted ? wanted.value : "";
    this.why.textContent = missing.join(" ");
  }

  showHits() {
    this.find = finder(this.place.find);
    const jump = (hit) => {
      Object.assign(this.place, { step: hit.stepIndex, group: hit.groupIndex });
      this.show();
      const target = hit.order === null ? this.prompt : this.cards.querySelector(`.text[data-order="${hit.order}"]`);
      target.scrollIntoView({ block: "center" });
      if (hit.order !== null) target.focus({ preventScroll: true });
    };
    this.told.textContent = list(this.hits, this.run, this.place.find, (completion) => total(completion, this.weights), jump);
    this.hits.hidden = !this.hits.children.length;
  }

  /** Show the group of the place, and let the controls say it. */
  show() {
    const { place, groups } = this;
    place.group = Math.min(place.group, groups.length - 1);
    const step = this.steps[place.step];
    this.slider.value = place.step;
    this.slider.setAttribute("aria-valuetext", `step ${step.step}`);
    this.number.value = step.step;
    this.groupChoice.replaceChildren(...groups.map((group, i) => element("option", { value: i }, `${i + 1} of ${groups.length}`)));
    this.groupChoice.value = place.group;
    this.lowest.setAttribute("aria-pressed", String(Boolean(place.lowest)));
    this.lowest.disabled = place.sort === "order";
    this.showGroup(step);
    this.keep();
  }

  showGroup(step) {
    const { place, group, groups } = this;
    const rewards = group.completions.map((completion) => total(completion, this.weights)).filter((value) => value !== null);
    const mean = rewards.length ? `, mean reward ${number(rewards.reduce((a, b) => a + b, 0) / rewards.length)}` : "";
    const count = group.completions.length;
    this.where.textContent = `Step ${step.step}, group ${place.group + 1} of ${groups.length}: ` +
      `${count} ${count === 1 ? "completion" : "completions"}${mean}`;
    this.prompt.replaceChildren(prompt(group.prompt, this.find));
    this.cards.replaceChildren(...this.sorted(group.completions).map(({ completion, order }) =>
      card(completion, order + 1, place.by, this.find, this.weights)));
    const scale = SCALES[place.by];
    this.legend.replaceChildren(...(scale ? scale.labels.map((label, i) =>
      element("span", { class: `token ${scale.classes[i]}` }, label)) : []));
    if (place.by === "ratios") this.legend.append(element("span", { class: "token clip" }, "clipped"));
  }

  /** The completions in the order that the reader chose, each with its place in the group. */
  sorted(completions) {
    const { sort, lowest } = this.place;
    const all = completions.map((completion, order) => ({ completion, order }));
    if (sort === "order") return all;
    const value = ({ completion }) => {
      const found = sort === "reward" ? total(completion, this.weights)
        : sort.startsWith("reward:") ? completion.rewards[sort.slice(7)] : completion[sort];
      return found === null || found === undefined ? (lowest ? Infinity : -Infinity) : found;
    };
    const by = (a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (lowest ? 1 : -1) || a.order - b.order;
    return all.sort(by);
  }

  /** Go to another step or group, as far as there are some. Returns whether that was possible. */
  move(name, by) {
    const next = this.place[name] + by;
    if (next < 0 || next >= this[`${name}s`].length) return false;
    this.place[name] = next;
    this.show();
    return true;
  }

  key(event) {
    const typing = event.target.closest("input, select, textarea");
    if (typing || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey || !this.steps.length) return;
    const moves = { ArrowLeft: ["step", -1], ArrowRight: ["step", 1], ArrowUp: ["group", -1], ArrowDown: ["group", 1] };
    const move = moves[event.key];
    if (!move || (move[0] === "group" && this.groups.length === 1)) return;
    event.preventDefault();
    // The cards are made anew: what had the focus may be gone, and the keys shall go on to work.
    const focused = document.activeElement;
    this.move(...move);
    if (!focused.isConnected) this.section.focus({ preventScroll: true });
  }
}

function showSamples(payload) {
  const section = document.getElementById("samples");
  if (!payload.runs.length) return section.append(element("p", {}, "There are no runs to show."));
  const browser = new Browser(section, payload.runs);
  window.addEventListener("hashchange", () => {
    if (!location.hash.startsWith(PLACE)) return;
    browser.restore();
    browser.runChoice.value = browser.place.run;
    browser.showRun();
  });
}

const payload = JSON.parse(document.getElementById("payload").textContent);
document.title = `${payload.title} · fastgrpo report`;
for (const show of [showHeadline, showCharts, showWarnings, showSamples, showSettings, showHead]) show(payload);
window.fastgrpo = { element, smoothed }; // for tests
