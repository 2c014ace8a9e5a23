// The sample browser: one group of one step at a time, with a search in all texts of the run.

// Control characters but tab and newline, soft hyphens, zero-width and bidirectional controls, tags, lone surrogates.
const HIDDEN = new RegExp(
  "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u00ad\\u061c\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff" +
    "\\ud800-\\udfff\\u{e0000}-\\u{e007f}]+", "gu");
// Classes of the values of tokens. Their colors are in style.css.
const SCALES = {
  logps: { name: "log-prob", prefix: "p", limits: [-0.1054, -0.6931, -1.6094, -2.9957, -4.6052], sign: -1,
    labels: ["probability over 90 %", "50 to 90 %", "20 to 50 %", "5 to 20 %", "1 to 5 %", "under 1 %"] },
  ratios: { name: "ratio", prefix: "r", limits: [0.8, 0.95, 1.05, 1.2], sign: 1,
    labels: ["under 0.8", "0.8 to 0.95", "0.95 to 1.05", "1.05 to 1.2", "over 1.2"] },
  clipped: { name: "clipped or not", prefix: "c", limits: [0.5], sign: 1,
    labels: ["not clipped", "clipped by the last update"] },
};
const FIRST = 1500; // characters of a text that are shown at first
const LISTED = 100; // hits in the list: more are counted and not shown
const MARKED = 1000; // hits marked in one text
const APPENDED = "tool result or environment text, not written by the model";

function escaped(hidden) {
  const name = (code) => code > 0xffff ? `\\u{${code.toString(16)}}` : code > 0xff
    ? `\\u${code.toString(16).padStart(4, "0")}` : `\\x${code.toString(16).padStart(2, "0")}`;
  return Array.from(hidden, (character) => name(character.codePointAt(0))).join("");
}

/** Append a text, with escapes for characters that cannot be seen. */
function plain(parent, text) {
  let done = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > done) parent.append(text.slice(done, match.index));
    parent.append(element("span", { class: "escape" }, escaped(match[0])));
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

/** The numbers of a completion's tokens to color them by; null where it has none. */
function valuesOf(completion, by) {
  if (!by || !completion.token_ends) return null;
  if (by !== "clipped") return completion[by];
  return completion.clipped_tokens && completion.token_ends.map((_, index) => Number(completion.clipped_tokens.includes(index)));
}

/** A number with at most `digits` decimals and a minus sign. */
function number(value, digits = 3) {
  if (value === null || value === undefined) return "none";
  const size = Math.abs(value);
  const text = size >= 1e6 || (size > 0 && size < 10 ** -digits) ? size.toPrecision(3) : String(Number(size.toFixed(digits)));
  return (value < 0 && Number(text) !== 0 ? "−" : "") + text;
}

/** Describe a token in one line. */
function describe(completion, index, clipped) {
  const told = [`token ${index + 1} of ${completion.token_ends.length}`];
  if (completion.logps) {
    const logp = completion.logps[index];
    told.push(`log-prob ${number(logp, 4)} (p ${number(100 * Math.exp(logp), 2)} %)`);
  }
  if (completion.ratios) told.push(`ratio ${number(completion.ratios[index], 4)}`);
  if (clipped) told.push("clipped");
  return told.join(" · ");
}

/** Append the first `limit` characters of a completion: tokens colored, answers of tools greyed, hits marked. */
function write(parent, completion, by, hits, limit) {
  const { text, turn_ends: turns = [0] } = completion, values = valuesOf(completion, by);
  const ends = values ? unitEnds(text, completion.token_ends) : [], clipped = new Set(completion.clipped_tokens || []);
  const { prefix, limits, sign } = SCALES[by] || {}, isOver = (at) => at > limit || (at === limit && limit < text.length);
  let start = 0, index = 0;
  for (const [turn, given] of unitEnds(text, turns).entries()) {
    if (isOver(start)) break;
    const isLast = turn === turns.length - 1, stop = Math.min(isLast ? text.length : given, limit);
    if (turn % 2) {
      const answer = element("span", { class: "answer", title: APPENDED });
      marked(answer, text, start, stop, hits);
      parent.append(answer);
      start = stop;
      continue;
    }
    for (; index < ends.length && (isLast || ends[index] <= given) && !isOver(start); index++) {
      const end = Math.min(Math.max(ends[index], start), text.length);
      const level = limits.filter((one) => sign * values[index] > sign * one).length;
      const token = element("span", { class: `token ${prefix}${level}`, title: describe(completion, index, clipped.has(index)) });
      if (by !== "logps" && clipped.has(index)) token.classList.add("clip");
      if (end === start) token.classList.add("empty");
      if (text.slice(start, end).includes("\n")) token.classList.add("newline");
      marked(token, text, start, Math.min(end, limit), hits);
      parent.append(token);
      start = end;
    }
    if (start < stop) marked(parent, text, start, stop, hits);
    start = Math.max(start, stop);
  }
}

/** The place, or the next one if this one is within a surrogate pair. */
const whole = (text, at) => at + /[\udc00-\udfff]/.test(text[at]);

/** Show the start of a text, up to the first hits, and a button for the whole text. */
function shown(parent, text, hits, append) {
  const box = element("div", { class: "text", dir: "auto", tabindex: "0", role: "group", "aria-label": "Text" });
  const enough = hits.length ? Math.max(FIRST, hits[Math.min(hits.length, 20) - 1][1] + 200) : FIRST;
  const limit = whole(text, Math.min(text.length, enough));
  append(box, limit);
  parent.append(box);
  if (limit === text.length) return;
  const button = element("button", { type: "button", onclick: () => {
    box.replaceChildren();
    append(box, text.length);
    button.remove();
    box.focus({ preventScroll: true });
  } }, `Show all ${text.length.toLocaleString("en")} characters`);
  parent.append(button);
}

/** The messages of a prompt; a text is one without a role. */
function turnsOf({ prompt }) {
  return Array.isArray(prompt) ? prompt : [{ role: "", content: prompt }];
}

/** The rewards of a completion in one number: their sum with the run's weights. */
function total(completion, weights) {
  const values = Object.values(completion.rewards);
  if (!values.some((value) => value !== null)) return null;
  return values.reduce((sum, value, i) => sum + (value || 0) * (weights[i] ?? 1), 0);
}

/** Append the messages of a prompt, or of a completion's own prompt. */
function writePrompt(parent, given, find) {
  for (const { role, content } of turnsOf(given)) {
    const hits = find(content), label = element("p", { class: "role" });
    plain(label, role);
    if (role) parent.append(label);
    shown(parent, content, hits, (box, limit) => marked(box, content, 0, limit, hits));
  }
}

/** The table of a completion's calls. */
function callsOf({ calls }) {
  const cell = (text, look = null) => {
    const made = element("td", { class: look });
    plain(made, text);
    return made;
  };
  const titles = ["turn", "call", "answer", "ms"].map((title) => element("th", { scope: "col" }, title));
  return element("div", { class: "scroll" }, element("table", { class: "calls" },
    element("thead", {}, element("tr", {}, ...titles)),
    element("tbody", {}, ...calls.map((call) => element("tr", {}, cell(number(call.turn)),
      cell(`${call.name} ${call.arguments}`), cell(call.answer, call.failed ? "down" : null), cell(number(call.latency_s === null ? null : Math.round(1000 * call.latency_s))))))));
}

/** The card of a completion, whose place in the group is `order`. */
function card(completion, order, by, find, weights) {
  const list = element("dl", { class: "facts" });
  const fact = (name, value, look = null) => {
    const [term, told] = [element("dt"), element("dd", { class: look })];
    plain(term, name);
    plain(told, value);
    list.append(element("div", {}, term, told));
  };
  const rewards = Object.entries(completion.rewards), { advantage } = completion;
  if (rewards.length !== 1) fact("reward", number(total(completion, weights)));
  for (const [name, value] of rewards) fact(rewards.length === 1 ? `reward ${name}` : name, number(value));
  fact("advantage", `${advantage > 0 ? "+" : ""}${number(advantage)}`, advantage > 0 ? "up" : advantage < 0 ? "down" : null);
  fact("ended by", completion.finish_reason || "unknown");
  if (completion.calls) fact("turns", number((completion.turn_ends.length + 1) >> 1));
  fact(completion.calls ? "generated tokens" : "tokens", number(completion.tokens));
  fact("tokens clipped in the update",
    completion.clipped === null ? "unknown" : `${number(100 * completion.clipped, 1)} %`);
  for (const [name, value] of Object.entries(completion.extras || {})) fact(name, value === null ? "none" : String(value));
  const made = element("article", { class: "completion", "data-order": order },
    element("h4", {}, `Completion ${order + 1}`), list);
  if (completion.prompt) {
    writePrompt(made, completion, find);
    made.append(element("p", { class: "role" }, "completion"));
  }
  const hits = find(completion.text);
  shown(made, completion.text, hits, (box, limit) => write(box, completion, by, hits, limit));
  if (completion.calls && completion.calls.length) made.append(callsOf(completion));
  if (by && !valuesOf(completion, by)) made.append(element("p", { class: "note" },
    "No per-token values of this kind were logged for this completion."));
  return made;
}

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

/** The index of the step that is nearest to a number. */
function nearest(steps, wanted) {
  const away = steps.map(({ step }) => Math.abs(step - wanted));
  return Math.max(0, away.indexOf(Math.min(...away)));
}

class Browser {
  constructor(section, runs) {
    this.runs = runs;
    this.find = finder("");
    const select = (act) => element("select", { onchange: act });
    this.runChoice = select(() => this.setRun());
    this.stepChoice = select(() => this.show());
    this.groupChoice = select(() => this.show());
    this.color = select(() => this.show());
    this.sort = select(() => this.show());
    this.lowest = element("input", { type: "checkbox", onchange: () => this.show() });
    this.beside = element("input", { type: "checkbox", onchange: () => this.show() });
    this.search = element("input", { type: "search", autocomplete: "off", onchange: () => this.setSearch() });
    const around = (name, choice) => ["◀", "▶"].map((sign, i) => element("button", { type: "button",
      "aria-label": `${i ? "Next" : "Previous"} ${name}`, onclick: () => this.move(choice, 2 * i - 1) }, sign));
    const labelled = (name, control, id, ...more) => {
      control.id = `samples-${id}`;
      return element("div", { class: "control" }, element("label", { for: control.id }, name), element("div", { class: "row" }, control, ...more));
    };
    this.note = element("p", { class: "note" });
    const run = labelled("Run", this.runChoice, "run");
    run.hidden = runs.length === 1;
    this.controls = element("div", { class: "panel" }, labelled("Step", this.stepChoice, "step", ...around("step", this.stepChoice)),
      labelled("Group", this.groupChoice, "group", ...around("group", this.groupChoice)),
      labelled("Tokens colored by", this.color, "color"),
      labelled("Sorted by", this.sort, "sort", element("label", {}, this.lowest, " lowest first")),
      labelled("Same prompt in the first and last steps of all runs", this.beside, "beside"),
      labelled("Search in all texts of the run", this.search, "search"));
    this.told = element("p", { class: "note told", role: "status" });
    this.hits = element("ol", { class: "hits", "aria-label": "Matching texts" });
    this.where = element("p", { class: "where", role: "status" });
    this.prompt = element("div", { class: "prompt" });
    this.legend = element("div", { class: "legend" });
    this.cards = element("div", { class: "completions" });
    this.shown = element("div", {}, element("h3", {}, "Prompt"), this.prompt, element("h3", {}, "Completions"), this.legend, this.cards);
    section.append(this.note, run, this.controls, this.told, this.hits, this.where, this.shown);
    this.fill(this.runChoice, runs.map((one, i) => [i, one.name]));
    this.setRun();
  }

  get run() { return this.runs[this.runChoice.value]; }
  get steps() { return this.run.samples.steps; }
  get groups() { return this.steps[this.stepChoice.value].groups; }

  /** Offer options of [value, name], and keep the previous choice, or choose the first. */
  fill(choice, options) {
    const before = choice.value;
    choice.replaceChildren(...options.map(([value, name]) => element("option", { value }, name)));
    choice.value = options.some(([value]) => String(value) === before) ? before : options[0][0];
  }

  /** Show the chosen run, at about the same step as the run before. */
  setRun() {
    const step = this.step ?? 0, completions = this.steps.flatMap(({ groups }) => groups.flatMap((group) => group.completions));
    this.note.textContent = this.run.samples.note;
    for (const part of [this.controls, this.told, this.hits, this.shown]) part.hidden = !this.steps.length;
    this.where.textContent = this.steps.length ? "" : "There are no samples to show.";
    if (!this.steps.length) return;
    this.weights = this.run.weights;
    this.fill(this.stepChoice, this.steps.map((one, i) => [i, one.step]));
    this.stepChoice.value = nearest(this.steps, step);
    this.fill(this.color, [["", "nothing"], ...Object.entries(SCALES).filter(([by]) =>
      completions.some((one) => valuesOf(one, by))).map(([by, { name }]) => [by, name])]);
    const names = Array.from(new Set(completions.flatMap(({ rewards }) => Object.keys(rewards))));
    this.fill(this.sort, [["order", "in order of generation"], ["reward", "reward"], ["advantage", "advantage"],
      ["tokens", "length"], ...(names.length > 1 ? names.map((name) => [`reward:${name}`, `reward ${name}`]) : [])]);
    this.setSearch();
  }

  /** List the texts that hold the search. */
  setSearch() {
    const found = [];
    this.find = finder(this.search.value);
    this.steps.forEach(({ step, groups }, stepIndex) => groups.forEach((group, groupIndex) => {
      const prompts = (given, order) => turnsOf(given).map(({ content }) => [order, content]);
      const texts = [...prompts(group, null), ...group.completions.flatMap((completion, order) =>
        [...(completion.prompt ? prompts(completion, order) : []), [order, completion.text]])];
      for (const [order, text] of texts) {
        const [hit] = this.find(text);
        if (hit) found.push({ step, stepIndex, groupIndex, order, text, hit });
      }
    }));
    this.hits.replaceChildren(...found.slice(0, LISTED).map((one) => this.hitLine(one)));
    this.hits.hidden = !found.length;
    const matches = found.length === 1 ? "1 text matches." : `${found.length.toLocaleString("en")} texts match.`;
    const more = found.length > LISTED ? ` The first ${LISTED} are listed.` : "";
    this.told.textContent = this.search.value && matches + more;
    this.show();
  }

  /** A line of the list: a press shows the text. */
  hitLine({ step, stepIndex, groupIndex, order, text, hit: [from, to] }) {
    const around = element("span", { class: "text", dir: "auto" });
    const [start, end] = [Math.max(0, from - 40), Math.min(text.length, to + 60)];
    marked(around, text, whole(text, start), whole(text, end), [[from, to]]);
    return element("li", {}, element("button", { type: "button", onclick: () => {
      this.stepChoice.value = stepIndex;
      this.beside.checked = false;
      this.show(groupIndex);
      const target = order === null ? this.prompt : this.cards.querySelector(`[data-order="${order}"]`);
      target.scrollIntoView({ block: "center" });
      target.querySelector(".text").focus({ preventScroll: true });
    } }, `Step ${step}, group ${groupIndex + 1}, ${order === null ? "prompt" : `completion ${order + 1}`}: `, around));
  }

  /** Show a group of the chosen step. */
  show(groupIndex = Number(this.groupChoice.value)) {
    const { groups, color: { value: by } } = this;
    this.step = this.steps[this.stepChoice.value].step;
    this.fill(this.groupChoice, groups.map((_, i) => [i, `${i + 1} of ${groups.length}`]));
    this.groupChoice.value = Math.min(groupIndex, groups.length - 1);
    const group = groups[this.groupChoice.value], count = group.completions.length;
    this.where.textContent = `Step ${this.step}, group ${Number(this.groupChoice.value) + 1} of ${groups.length}: ` +
      `${count} ${count === 1 ? "completion" : "completions"}`;
    this.prompt.replaceChildren();
    writePrompt(this.prompt, group, this.find);
    const cards = ({ completions }, weights) => this.sorted(completions, weights).map(([completion, order]) =>
      card(completion, order, by, this.find, weights));
    this.cards.replaceChildren(...(this.beside.checked ? this.sameAs(group).map(({ title, other, weights }) =>
      element("div", { class: "column" }, element("h4", {}, title), ...cards(other, weights))) : cards(group, this.weights)));
    const { labels = [], prefix } = SCALES[by] || {};
    this.legend.replaceChildren(...labels.map((label, i) => element("span", { class: `token ${prefix}${i}` }, label)));
    if (group.completions.some(({ calls }) => calls))
      this.legend.append(element("span", { class: "token answer" }, APPENDED));
    if (by === "ratios") this.legend.append(element("span", { class: "token clip" }, "clipped"));
  }

  /** Find the groups with the prompt of `group`: it, and the first and last of each run. */
  sameAs(group) {
    const prompt = JSON.stringify(group.prompt);
    return this.runs.flatMap(({ name, weights, samples }) => samples.steps.flatMap(({ step, groups }) =>
      groups.filter((other) => JSON.stringify(other.prompt) === prompt).map((other) => ({ title: `${name}, step ${step}`, other, weights })))
      .filter(({ other }, i, all) => i === 0 || i === all.length - 1 || other === group));
  }

  /** The completions in the chosen order, each with its place in the group. */
  sorted(completions, weights) {
    const by = this.sort.value, sign = this.lowest.checked ? 1 : -1;
    const value = (one) => (by === "reward" ? total(one, weights) : by.startsWith("reward:") ? one.rewards[by.slice(7)]
      : one[by]) ?? sign * Infinity;
    const all = completions.map((completion, order) => [completion, order]);
    return by === "order" ? all : all.sort(([a, i], [b, j]) => Math.sign(value(a) - value(b)) * sign || i - j);
  }

  /** Go to another step or group, if there is one. */
  move(choice, by) {
    const next = Number(choice.value) + by;
    if (next < 0 || next >= choice.options.length) return;
    choice.value = next;
    this.show();
  }
}

function showSamples({ runs }) {
  new Browser(document.getElementById("samples"), runs);
}

const payload = JSON.parse(document.getElementById("payload").textContent);
document.title = `${payload.title} · fastgrpo report`;
for (const show of [showHeadline, showCharts, showWarnings, showSamples, showSettings, showHead]) show(payload);
window.fastgrpo = { element, smoothed }; // for tests
