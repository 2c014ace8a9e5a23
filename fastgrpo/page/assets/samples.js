"use strict";
// The sample browser: one group of one step at a time. Where the reader is stands in the page's address, so that a
// reload or a bookmark shows the same place.
window.fastgrpoSections = window.fastgrpoSections || [];
window.fastgrpoSamples = window.fastgrpoSamples || {};
((samples, { element }) => {
  const { SCALES, prompt, card, total, tips, finder, list, number } = samples;
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
      group.completions.some((completion) => samples.has(completion, by))));
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
      samples.controls(this, COLOURS);
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

  window.fastgrpoSections.push((payload) => {
    const section = document.getElementById("samples");
    if (!payload.runs.length) return section.append(element("p", {}, "There are no runs to show."));
    const browser = new Browser(section, payload.runs);
    window.addEventListener("hashchange", () => {
      if (!location.hash.startsWith(PLACE)) return;
      browser.restore();
      browser.runChoice.value = browser.place.run;
      browser.showRun();
    });
  });
  Object.assign(samples, { nearest });
})(window.fastgrpoSamples, window.fastgrpoPage);
