// Shared code of the sections, and the sections of text: head, results, warnings and settings.
// The three scripts share one scope. Text from a run can never become HTML: it reaches the page in text nodes only.

/**
 * Make an element. Attributes whose value is null, undefined or false are left out, and so are children that are null.
 * Children are elements or text; text from a run can never become HTML this way.
 */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** A square in the color of a run. */
function swatch(color) {
  const made = element("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = color;
  return made;
}

/** A figure in at most four digits, as 0.0123, 12,300 or 1.2e-7. */
function figure(value) {
  if (value === undefined || value === null) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 12 : 4, maximumFractionDigits: 4 });
}

/** A scrolling box that the keyboard can reach. */
function scrolling(label, ...children) {
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, ...children);
}

/** The colors of the style sheet, which change with the reader's light or dark mode. */
function theme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["back", "front", "faint", "line", "card", "bad", "font"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

const PLACES = new Set(["output_dir", "run_name"]); // these name a run, so they always differ

function showHead(payload) {
  const head = document.getElementById("head");
  head.append(element("h1", {}, payload.title));
  const folders = payload.runs.length === 1 ? ` The run is in ${payload.runs[0].folder}.` : "";
  head.append(element("p", { class: "note" }, `Made ${payload.made}.${folders}`));
  const sections = Array.from(document.querySelectorAll("main > section")).filter((section) => !section.hidden);
  head.append(element("nav", { "aria-label": "Sections" }, element("ul", { class: "pages" }, ...sections.map((section) =>
    element("li", {}, element("a", { href: `#${section.id}` }, section.querySelector("h2").textContent))))));
}

/** One run: its figures in a row of cards, and a line with model, data and method. */
function oneRun(section, run) {
  section.append(element("dl", { class: "figures" }, ...run.headline.map(({ label, value, detail }) =>
    element("div", { class: "card" }, element("dt", {}, label),
      element("dd", {}, value, element("small", {}, detail))))));
  section.append(element("p", { class: "about" }, run.about.map(({ label, value }) => `${label}: ${value}`).join(" · ")));
}

/** Several runs: one table, a line for each run. */
function severalRuns(section, runs) {
  const labels = Array.from(new Set(runs.flatMap((run) => run.headline.map(({ label }) => label))));
  const head = element("tr", {}, ...["Run", ...labels].map((title) => element("th", { scope: "col" }, title)));
  const lines = runs.map((run) => {
    const found = Object.fromEntries(run.headline.map((row) => [row.label, row]));
    return element("tr", {}, element("th", { scope: "row" }, swatch(run.color), run.name),
      ...labels.map((label) => element("td", {}, found[label] ? found[label].value : "–",
        element("div", { class: "note" }, found[label] ? found[label].detail : ""))));
  });
  section.append(scrolling("Results of the runs",
    element("table", { class: "compare" }, element("thead", {}, head), element("tbody", {}, ...lines))));
}

function showHeadline({ runs }) {
  const section = document.getElementById("headline");
  if (runs.length === 1) oneRun(section, runs[0]);
  else severalRuns(section, runs);
}

function showWarnings({ runs }) {
  const section = document.getElementById("warnings");
  const all = runs.flatMap((run) => run.warnings.map((warning) => ({ ...warning, run })));
  section.hidden = !all.length;
  all.sort((a, b) => a.step - b.step);
  section.append(scrolling("Warnings", element("ul", { class: "warnings" }, ...all.map(({ step, text, run }) =>
    element("li", {}, element("span", { class: "step" }, `step ${step.toLocaleString("en")}`),
      ...(runs.length > 1 ? [element("span", {}, swatch(run.color), run.name)] : []), element("span", {}, text))))));
}

function showSettings({ runs }) {
  const section = document.getElementById("settings");
  const names = Array.from(new Set(runs.flatMap((run) => Object.keys(run.settings))));
  if (!names.length) return section.append(element("p", { class: "note" }, "config.json could not be read."));
  const head = ["Setting", ...runs.map((run) => run.name)].map((title, place) =>
    element("th", { scope: "col" }, ...(place && runs.length > 1 ? [swatch(runs[place - 1].color)] : []), title));
  const rows = names.map((name) => {
    const values = runs.map((run) => run.settings[name] ?? "–");
    const differs = !PLACES.has(name) && values.some((value) => value !== values[0]);
    const row = element("tr", { class: differs ? "differs" : null }, element("th", { scope: "row" }, name),
      ...values.map((value) => element("td", { class: "mono" }, value)));
    return { row, differs, text: [name, ...values].join(" ").toLowerCase() };
  });
  const find = element("input", { type: "search", oninput: filter });
  const only = element("input", { type: "checkbox", onchange: filter });
  const count = element("span", { class: "note", role: "status" });
  only.checked = runs.length > 1;
  function filter() {
    const wanted = find.value.trim().toLowerCase();
    for (const { row, differs, text } of rows) row.hidden = (only.checked && !differs) || !text.includes(wanted);
    count.textContent = `${rows.filter(({ row }) => !row.hidden).length} of ${rows.length} settings`;
  }
  section.append(element("div", { class: "toolbar" }, element("label", {}, "Find", find),
    ...(runs.length > 1 ? [element("label", {}, only, "Differences only")] : []), count));
  section.append(scrolling("Settings of the runs", element("table", {},
    element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows.map(({ row }) => row)))));
  filter();
}
