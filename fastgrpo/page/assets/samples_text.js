"use strict";
// Writes the text of a completion: tokens with their colours, hits of a search, and visible escapes for characters that
// a reader could not see or that would reorder what is beside them. Data reaches the page in text nodes alone.
window.fastgrpoSamples = window.fastgrpoSamples || {};
((samples, { element }) => {
  // Control characters but tab and newline, soft hyphens, zero-width and bidirectional controls, tags, lone surrogates.
  const HIDDEN = new RegExp(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u00ad\\u061c\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff" +
      "\\ud800-\\udfff\\u{e0000}-\\u{e007f}]+", "gu");
  // How the values fall into classes. A class has its colour in samples.css.
  const SCALES = {
    logps: {
      limits: [-0.1054, -0.6931, -1.6094, -2.9957, -4.6052],
      labels: ["probability over 90 % (log-prob over −0.11)", "50 to 90 %", "20 to 50 %", "5 to 20 %", "1 to 5 %",
        "under 1 % (log-prob under −4.6)"],
      classOf: (value) => `p${SCALES.logps.limits.filter((limit) => value < limit).length}`,
      classes: ["p0", "p1", "p2", "p3", "p4", "p5"],
    },
    ratios: {
      limits: [0.8, 0.95, 1.05, 1.2],
      labels: ["under 0.8", "0.8 to 0.95", "0.95 to 1.05", "1.05 to 1.2", "over 1.2"],
      classOf: (value) => `r${SCALES.ratios.limits.filter((limit) => value > limit).length}`,
      classes: ["r0", "r1", "r2", "r3", "r4"],
    },
    clipped: { limits: [], labels: ["not clipped", "clipped by the last update"], classes: ["c0", "c1"] },
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

  /**
   * Append a part of a completion's text.
   * @param parent where to
   * @param completion of the payload
   * @param by what colours its tokens: "", "logps", "ratios" or "clipped"
   * @param hits of the search, as [start, end)
   * @param from where the part begins, in units of the text
   * @param to where it ends
   */
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

  Object.assign(samples, { SCALES, plain, marked, write, cutAt, has, number, describe });
})(window.fastgrpoSamples, window.fastgrpoPage);
