"use strict";
// The search in all texts of a run that are in the page.
window.fastgrpoSamples = window.fastgrpoSamples || {};
((samples, { element }) => {
  const { marked, number } = samples;
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

  Object.assign(samples, { finder, list });
})(window.fastgrpoSamples, window.fastgrpoPage);
