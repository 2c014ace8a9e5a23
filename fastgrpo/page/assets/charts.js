// The section of the charts: curves, histograms of rewards, times of a step, and their controls.

// A chart is drawn by plotly once it comes into view, and again when a control or the mode changes.

const CONFIG = { displaylogo: false, responsive: true, showSendToCloud: false,
  modeBarButtons: [["toImage", "resetScale2d"]] };
const charts = new Set();
const watch = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const chart = Array.from(charts).find(({ plot }) => plot === target);
    if (!chart) continue;
    chart.inView = isIntersecting;
    if (isIntersecting) draw(chart);
  }
}, { rootMargin: "300px" });

/** The layout that all charts have, in the colors of the page. */
function layout(more) {
  const { front, faint, line, card, back, font } = theme();
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickfont: { color: faint }, automargin: true,
    exponentformat: "SI" };
  return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: front, family: font, size: 12 },
    margin: { l: 8, r: 8, t: 12, b: 8 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, hovermode: "x unified",
    hoverlabel: { bgcolor: back, bordercolor: line, font: { color: front }, align: "left", namelength: -1 },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
    modebar: { bgcolor: card, color: faint, activecolor: front }, ...more,
    xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis } };
}

/** Draw a chart that is in view and is not up to date. */
function draw(chart, inView = chart.inView) {
  if (!window.Plotly || !inView || !chart.stale) return;
  chart.stale = false;
  const made = chart.make();
  Plotly.react(chart.plot, made.traces, layout(made.layout), CONFIG);
}

/** Unpack and run plotly's bundle, then draw the charts in view. */
async function unpack() {
  const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent), (one) => one.charCodeAt(0));
  const script = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(element("script", {}, await new Response(script).text()));
  refresh();
}

/** Put a chart into a place of the page. make() returns its traces and its layout. */
function add(place, { title, note = "", wide = false, make }) {
  const plot = element("div", { class: "plot", role: "img", "aria-label": title });
  const card = element("article", { class: wide ? "card wide" : "card" },
    element("header", {}, element("h3", {}, title), note ? element("span", { class: "note" }, note) : null), plot);
  place.append(card);
  charts.add({ plot, make, stale: true, inView: false });
  watch.observe(plot);
  return card;
}

/** Draw all charts again: those in view now, the others when they come into view. */
function refresh() {
  for (const chart of charts) {
    chart.stale = true;
    draw(chart);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
addEventListener("beforeprint", () => charts.forEach((chart) => draw(chart, chart.plot.offsetParent !== null)));

// The curves of a metric over steps, tokens or time, raw and smoothed, with the warnings.

const AXES = { step: "step", tokens: "tokens", seconds: "training time, without evaluations" };
const PALETTE = ["#3b82d6", "#e0762a", "#2f9e63", "#c94f9b", "#8f6ed5", "#b8891d", "#1f9fb0", "#d1495b"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const TIMES = [[7200, 3600, "h"], [300, 60, "min"], [0, 1, "s"]]; // from so many seconds on: seconds of a unit, its name

const isEvaluation = (metric) => /^(eval|test)(_[^/]+)?\//.test(metric);
const modeOf = ({ value }) => value.length === 1 ? "lines+markers" : "lines"; // a line of one point is invisible

/** The unit of the time axis, which all runs of the page share. */
function timeUnit(runs) {
  const longest = Math.max(0, ...runs.map((run) => run.axes.seconds[run.axes.seconds.length - 1] || 0));
  return TIMES.find(([least]) => longest >= least);
}

/** The positions of a curve's points on the chosen axis. */
function along(run, at, state) {
  const axis = run.axes[state.x];
  if (!axis.length) return at.map(() => null);
  const unit = state.x === "seconds" ? state.unit[1] : 1;
  return at.map((place) => axis[place] / unit);
}

/** The position of a step on the axis; without a logged line, that of the last line before it. */
function whereIs(run, step, state) {
  if (state.x === "step") return step;
  const after = run.axes.step.findIndex((other) => other > step);
  return along(run, [Math.max(0, (after < 0 ? run.axes.step.length : after) - 1)], state)[0];
}

/**
 * The moving average over the last lines. A point of a thinned curve has the mean of all lines since the point before
 * it. If the window begins among these lines, only those within the window count, each with this mean.
 */
function smoothed({ value, mean, lines: stretches }, lines) {
  const values = mean || value;
  const linesAt = (place) => (stretches ? stretches[place] : 1);
  let sum = 0, count = 0, first = 0;
  return values.map((one, place) => {
    sum += one * linesAt(place);
    count += linesAt(place);
    for (; count - linesAt(first) >= lines; first += 1) {
      sum -= values[first] * linesAt(first);
      count -= linesAt(first);
    }
    const over = Math.max(0, count - lines);
    return (sum - over * values[first]) / (count - over);
  });
}

const faded = (color) => `${color}55`;

/** The style of a metric. One run: a color per metric. Several runs: a color per run, and dashes per metric. */
function styleOf(state, run, order, dashed) {
  const single = state.runs.length === 1;
  const color = !single ? run.color : order ? PALETTE.filter((one) => one !== run.color)[(order - 1) % 7] : run.color;
  return { color, dash: dashed ? "dash" : single ? "solid" : DASHES[order % DASHES.length] };
}

function evaluationTrace(run, metric, series, x, name, style) {
  const { color, dash } = style;
  const [low, high] = ["low", "high"].map((end) => run.series[`${metric}/ci95_${end}`]);
  const measured = [low, high].every((end) => end && String(end.at) === String(series.at)); // of the same lines
  const bars = measured ? { error_y: { type: "data", symmetric: false, thickness: 1, width: 2, color: faded(color),
    array: series.value.map((value, place) => high.value[place] - value),
    arrayminus: series.value.map((value, place) => value - low.value[place]) } } : {};
  return { x, y: series.value, name, mode: "lines+markers", line: { color, width: 1.5, dash }, marker: { color, size: 6 },
    ...bars };
}

/** The traces of one metric of one run. */
function tracesOf(state, run, metric, label, window, style) {
  const series = run.series[metric];
  if (!series || !series.value.length) return [];
  const x = along(run, series.at, state);
  const name = state.runs.length === 1 ? label : `${run.name}: ${label}`;
  const format = series.value.some((value) => Math.abs(value) >= 1000) ? ",.4~r" : ".4~g"; // 12,350 and not 1.235e+4
  const common = { type: "scatter", hovertemplate: `%{y:${format}}`, legendgroup: metric,
    showlegend: state.runs.length === 1 };
  if (isEvaluation(metric)) return [{ ...common, ...evaluationTrace(run, metric, series, x, name, style) }];
  const line = { color: style.color, width: 1.8, dash: style.dash };
  if (state.smooth === 1 || window === 1) return [{ ...common, x, y: series.value, name, mode: modeOf(series), line }];
  return [
    { ...common, x, y: series.value, name: `${name}, each`, showlegend: false, mode: modeOf(series), line: { color: faded(style.color), width: 1 } },
    { ...common, x, y: smoothed(series, state.smooth), name, mode: modeOf(series), line },
  ];
}

/** A text of the run for a label of plotly, which interprets some HTML: without tags, in short lines. */
function label(text) {
  const lines = text.slice(0, 300).match(/.{1,56}(\s|$)|.{1,56}/g) || [""];
  return lines.map((line) => line.trim().replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;")).join("<br>");
}

/** The warnings: a triangle at the top with the text as its label, and a thin line down from it. */
function warningsOf(state) {
  const { bad } = theme();
  const marks = state.shown().flatMap((run) => run.warnings.map(({ step, text }) => ({
    x: whereIs(run, step, state), text: label(state.runs.length === 1 ? text : `${run.name}: ${text}`) })));
  if (!marks.length) return { traces: [], shapes: [] };
  const trace = { type: "scatter", mode: "markers", x: marks.map(({ x }) => x), y: marks.map(() => 1), yaxis: "y2",
    name: "warning", showlegend: false, customdata: marks.map(({ text }) => text), cliponaxis: false,
    hovertemplate: "%{customdata}<extra></extra>", marker: { symbol: "triangle-down", size: 10, color: bad } };
  const shapes = marks.slice(0, 50).map(({ x }) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1,
    line: { color: bad, width: 1, dash: "dot" }, opacity: 0.6 }));
  return { traces: [trace], shapes };
}

function xaxis(state) {
  const unit = state.x === "seconds" ? ` (${state.unit[2]})` : "";
  return { title: { text: AXES[state.x] + unit },
    hoverformat: { step: "d", tokens: ".4~s", seconds: ".4~g" }[state.x] };
}

/** The metrics of a panel with their labels, those to compare with last. */
function entriesOf(panel) {
  const labels = panel.labels.length ? panel.labels : panel.metrics;
  return [
    ...panel.metrics.map((metric, order) => ({ metric, label: labels[order], order, dashed: false })),
    ...panel.dashed.map((metric, order) => ({ metric, label: metric, order, dashed: true })),
  ];
}

/** What plotly draws of a panel. Of several runs, the legend has a grey line for each metric: the runs have colors. */
function make(panel, state) {
  const drawn = state.shown().flatMap((run) => entriesOf(panel).map((entry) => ({ run, ...entry })))
    .filter(({ run, metric }) => run.series[metric] && run.series[metric].value.length
      && (!panel.command || run.settings.command === panel.command));
  const curves = drawn.flatMap(({ run, metric, label: named, order, dashed }) =>
    tracesOf(state, run, metric, named, panel.window, styleOf(state, run, order, dashed)));
  const keys = state.runs.length === 1 ? [] : drawn.filter(({ metric }, at) => drawn.findIndex((one) => one.metric === metric) === at)
    .map(({ run, metric, label: named, order, dashed }) => ({ type: "scatter", mode: "lines", x: [null], y: [null], name: named,
      legendgroup: metric, line: { ...styleOf(state, run, order, dashed), color: theme().faint, width: 1.8 } }));
  const values = drawn.flatMap(({ run, metric }) => run.series[metric].value);
  const { traces: marks, shapes } = warningsOf(state);
  return { traces: [...curves, ...keys, ...marks],
    layout: { xaxis: xaxis(state), shapes, showlegend: new Set(drawn.map(({ metric }) => metric)).size > 1,
      yaxis: { rangemode: values.some((value) => value < 0) ? "normal" : "nonnegative",
        exponentformat: values.every((value) => Math.abs(value) < 1e-3) ? "e" : "SI" }, // 1e-6 and not 1μ
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true } } };
}

// The charts of a single run: its rewards as a histogram over time, and the parts of its steps, stacked.

/** The rewards of the logged completions: each column is a step, and its colors are shares of its completions. */
function rewards(run, state) {
  const { step, edges, counts } = run.rewards;
  const totals = counts.map((column) => column.reduce((sum, one) => sum + one, 0));
  const shares = edges.slice(1).map((_, bin) => counts.map((column, at) => column[bin] / totals[at]));
  const x = step.map((one) => whereIs(run, one, state));
  const centers = edges.slice(1).map((edge, bin) => (edge + edges[bin]) / 2);
  const trace = { type: "heatmap", x, y: centers, z: shares, zmin: 0, zmax: 1, hoverongaps: false,
    colorscale: [[0, theme().card], [0.02, `${run.color}30`], [1, run.color]],
    colorbar: { thickness: 8, len: 1, tickformat: ".0%", outlinewidth: 0, tickfont: { color: theme().faint } },
    hovertemplate: `%{x}<br>reward about %{y:,.3~r}: %{z:.0%}<extra></extra>` };
  return { traces: [trace],
    layout: { xaxis: xaxis(state), hovermode: "closest", yaxis: { title: { text: "total reward" },
      ...(centers.length <= 8 ? { tickvals: centers, ticktext: centers.map(figure) } : {}) } } };
}

const stagesOf = (run) => Object.keys(run.series).filter((name) => name.startsWith("time/"));

/** The seconds of a step by its stages, one upon the other, smoothed like the curves. */
function stages(run, state) {
  const traces = stagesOf(run).map((name, order) => ({ type: "scatter", mode: modeOf(run.series[name]), stackgroup: "stages",
    name: name.slice(5), x: along(run, run.series[name].at, state), y: smoothed(run.series[name], state.smooth),
    line: { width: 0.5, color: PALETTE[order % PALETTE.length] }, fillcolor: `${PALETTE[order % PALETTE.length]}b0`,
    hovertemplate: "%{y:,.3~r} s" }));
  return { traces,
    layout: { xaxis: xaxis(state), yaxis: { title: { text: "seconds per step" }, rangemode: "tozero" } } };
}

/** Add the charts of each run behind the curves. */
function addAll(place, state) {
  const single = state.runs.length === 1;
  const cards = [];
  const named = (title, run) => (single ? title : `${title}: ${run.name}`);
  for (const run of state.runs.filter((one) => one.rewards)) cards.push([run, add(place, {
    title: named("Rewards over time", run), note: run.rewards.note, wide: single, make: () => rewards(run, state) })]);
  for (const run of state.runs.filter((one) => stagesOf(one).length)) cards.push([run, add(place, {
    title: named("Where the time of a step goes", run), wide: single, make: () => stages(run, state) })]);
  return () => { for (const [run, card] of cards) card.hidden = state.hidden.has(run.name); };
}

// The controls.

const WINDOWS = [1, 2, 5, 10, 20, 50, 100, 200, 500]; // logged steps that the moving average is over

/** Every metric that no chart shows yet and that is a curve of its own. */
function further(runs, panels) {
  const shown = new Set(panels.flatMap((panel) => panel.metrics));
  const all = new Set(runs.flatMap((run) => Object.keys(run.series)));
  return Array.from(all).filter((name) => !shown.has(name) && !/\/ci95_(low|high)$/.test(name)).sort();
}

function showCharts({ runs, panels, metrics }) {
  const section = document.getElementById("charts");
  const longest = Math.max(...runs.map((run) => (run.series.reward || run.series.loss || { at: [] }).at.length));
  // The window is at most a tenth of the run, so that the smoothed curve ends near the last values.
  const usual = Math.max(...WINDOWS.filter((one) => one <= Math.max(1, Math.min(10, longest / 10))));
  const state = { x: "step", smooth: usual, hidden: new Set(), runs,
    unit: timeUnit(runs), shown: () => runs.filter((run) => !state.hidden.has(run.name)) };
  if (!runs.some((run) => Object.keys(run.series).length))
    return section.append(element("p", { class: "note" }, "metrics.jsonl has no line yet."));
  const grid = element("div", { class: "grid" });
  const more = element("div", { class: "grid more" });
  let hide = () => {};
  const changed = () => { hide(); refresh(); };

  const addCurve = (metric) => add(more, { title: metric, note: metrics[metric] || "",
    make: () => make({ metrics: [metric], labels: [], dashed: [], window: 10 }, state) });

  section.append(toolbar(state, changed), ...(runs.length > 1 ? [chooser(state, changed)] : []));
  for (const panel of panels) add(grid, { title: panel.title, note: panel.unit, make: () => make(panel, state) });
  hide = addAll(grid, state);
  section.append(grid);
  for (const { note } of runs) if (note) section.append(element("p", { class: "note after" }, note));
  unpack();
  section.append(adder(further(runs, panels), addCurve), more);
  hide();
}

function toolbar(state, changed) {
  const choice = (name, options, chosen, act) => {
    const made = element("select", { onchange: () => { act(made.value); changed(); } },
      ...options.map(([value, told]) => element("option", { value }, told)));
    made.value = chosen;
    return element("label", {}, name, made);
  };
  return element("div", { class: "toolbar" },
    choice("Over", Object.entries(AXES), state.x, (value) => { state.x = value; }),
    choice("Smoothing", WINDOWS.map((one) => [one, one === 1 ? "off" : `mean of ${one} logged steps`]), state.smooth,
      (value) => { state.smooth = Number(value); }));
}

/** The legend of the runs, in which each can be hidden. */
function chooser(state, changed) {
  return element("ul", { class: "runs", "aria-label": "Runs" }, ...state.runs.map((run) => {
    const box = element("input", { type: "checkbox", onchange: () => {
      if (box.checked) state.hidden.delete(run.name); else state.hidden.add(run.name);
      changed();
    } });
    box.checked = !state.hidden.has(run.name);
    return element("li", {}, element("label", {}, box, swatch(run.color), run.name));
  }));
}

function adder(names, addCurve) {
  const choice = element("select", {}, ...names.map((name) => element("option", {}, name)));
  const button = element("button", { type: "button", onclick: () => {
    addCurve(choice.value);
    choice.selectedOptions[0].remove();
    button.disabled = !choice.length;
  } }, "Add");
  button.disabled = !choice.length;
  return element("div", { class: "toolbar after" }, element("label", {}, "Add a chart", choice), button);
}
