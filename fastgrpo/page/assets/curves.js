"use strict";
// The curves of the runs: what is drawn of a metric, over steps, tokens or time, raw and smoothed, with the warnings.
((page) => {
  const { figure, theme } = page;
  const AXES = { step: "step", tokens: "tokens", seconds: "time in steps" };
  const PALETTE = ["#3b82d6", "#e0762a", "#2f9e63", "#c94f9b", "#8f6ed5", "#b8891d", "#1f9fb0", "#d1495b"];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const STROKES = { solid: "", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3" };
  const TIMES = [[7200, 3600, "h"], [300, 60, "min"], [0, 1, "s"]]; // from so many seconds on: seconds of a unit, its name

  const isEvaluation = (metric) => metric.startsWith("eval/");

  /** The unit of the time axis, which all runs of the page share. */
  function timeUnit(runs) {
    const longest = Math.max(0, ...runs.map((run) => run.axes.seconds[run.axes.seconds.length - 1] || 0));
    return TIMES.find(([least]) => longest >= least);
  }

  /** Where the points of a curve lie on the chosen axis. */
  function along(run, at, state) {
    const axis = run.axes[state.x];
    if (!axis.length) return at.map(() => null);
    const unit = state.x === "seconds" ? state.unit[1] : 1;
    return at.map((place) => axis[place] / unit);
  }

  /** A place on the axis for a step that may have no line of its own: that of the last line before it. */
  function whereIs(run, step, state) {
    const steps = run.axes.step;
    let low = 0, high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle + 1; else high = middle;
    }
    return state.x === "step" ? step : along(run, [Math.max(0, low - 1)], state)[0];
  }

  /**
   * The moving average over the last lines. A point of a thinned curve stands for the mean of its stretch, the lines
   * since the point before it. Of the oldest stretch only so many lines count as the average reaches back to.
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

  function faded(color) {
    return `${color}55`;
  }

  /** How a metric is drawn: of one run each metric has a color, of several each run has, and a metric has its dashes. */
  function styleOf(state, run, order, dashed) {
    const single = state.runs.length === 1;
    const color = !single ? run.color : order ? PALETTE.filter((one) => one !== run.color)[(order - 1) % 7] : run.color;
    return { color, dash: dashed ? "dash" : single ? "solid" : DASHES[order % DASHES.length] };
  }

  function evaluationTrace(run, metric, series, x, name, style) {
    const { color, dash } = style;
    const [low, high] = ["low", "high"].map((end) => run.series[`${metric}/ci95_${end}`]);
    const bars = low && high && low.value.length === series.value.length ? { error_y: { type: "data", symmetric: false,
      array: series.value.map((value, place) => high.value[place] - value), thickness: 1, width: 2, color: faded(color),
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
    const common = { type: "scatter", hovertemplate: "%{y:.4~g}" };
    if (isEvaluation(metric)) return [{ ...common, ...evaluationTrace(run, metric, series, x, name, style) }];
    const line = { color: style.color, width: 1.8, dash: style.dash };
    if (state.smooth === 1 || window === 1) return [{ ...common, x, y: series.value, name, mode: "lines", line }];
    return [
      { ...common, x, y: series.value, name: `${name}, each`, mode: "lines", line: { color: faded(style.color), width: 1 } },
      { ...common, x, y: smoothed(series, state.smooth), name, mode: "lines", line },
    ];
  }

  /** A text of the run in a label of plotly, which reads some HTML: nothing in it may be a tag, and lines are short. */
  function label(text) {
    const lines = text.slice(0, 300).match(/.{1,56}(\s|$)|.{1,56}/g) || [""];
    return lines.map((line) => line.trim().replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;")).join("<br>");
  }

  /** The warnings: a triangle at the top that tells its text, and a thin line down from it. */
  function warningsOf(state) {
    const { bad } = theme();
    const marks = state.shown().flatMap((run) => run.warnings.map(({ step, text }) => ({
      x: whereIs(run, step, state), text: label(state.runs.length === 1 ? text : `${run.name}: ${text}`) })));
    if (!marks.length) return { traces: [], shapes: [] };
    const trace = { type: "scatter", mode: "markers", x: marks.map(({ x }) => x), y: marks.map(() => 1), yaxis: "y2",
      name: "warning", customdata: marks.map(({ text }) => text), hovertemplate: "%{customdata}",
      marker: { symbol: "triangle-down", size: 10, color: bad }, cliponaxis: false };
    const shapes = marks.slice(0, 50).map(({ x }) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1,
      line: { color: bad, width: 1, dash: "dot" }, opacity: 0.6 }));
    return { traces: [trace], shapes };
  }

  function xaxis(state) {
    const unit = state.x === "seconds" ? ` (${state.unit[2]})` : "";
    return { title: { text: AXES[state.x] + unit }, hoverformat: state.x === "step" ? "d" : ".4~s" };
  }

  /** The metrics of a panel with their labels, those to compare with last. */
  function entriesOf(panel) {
    const labels = panel.labels.length ? panel.labels : panel.metrics;
    return [
      ...panel.metrics.map((metric, order) => ({ metric, label: labels[order], order, dashed: false })),
      ...panel.dashed.map((metric, order) => ({ metric, label: metric, order, dashed: true })),
    ];
  }

  /** What plotly draws of a panel, what is read aloud, and the table behind it. */
  function make(panel, state) {
    const traces = [], rows = [], told = [];
    let negative = false;
    for (const run of state.shown()) for (const { metric, label: named, order, dashed } of entriesOf(panel)) {
      const series = run.series[metric];
      if (!series || !series.value.length) continue;
      traces.push(...tracesOf(state, run, metric, named, panel.window, styleOf(state, run, order, dashed)));
      const { value } = series;
      const name = state.runs.length === 1 ? named : `${run.name}: ${named}`;
      const least = value.reduce((one, other) => Math.min(one, other));
      const most = value.reduce((one, other) => Math.max(one, other));
      negative = negative || least < 0;
      rows.push([name, ...[value[0], value[value.length - 1], least, most].map(figure)]);
      told.push(`${name}: last ${figure(value[value.length - 1])}`);
    }
    const { traces: marks, shapes } = warningsOf(state);
    return { traces: [...traces, ...marks], told: told.join("; ") || "No run that is shown measured it.",
      table: [["Curve", "First", "Last", "Smallest", "Largest"], rows],
      layout: { xaxis: xaxis(state), shapes, yaxis: { rangemode: negative ? "normal" : "nonnegative" },
        yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true } } };
  }

  /** The legend of a panel. One curve needs none. */
  function caption(panel, state) {
    const measured = entriesOf(panel).filter(({ metric }) => state.runs.some((run) => run.series[metric]));
    if (measured.length < 2) return [];
    return measured.map(({ metric, label: named, order, dashed }) => {
      const { color, dash } = styleOf(state, state.runs[0], order, dashed);
      return window.fastgrpoCharts.key(named, { color: state.runs.length === 1 ? color : "", dash: STROKES[dash],
        dots: isEvaluation(metric) });
    });
  }

  window.fastgrpoCurves = { AXES, PALETTE, make, caption, xaxis, along, whereIs, smoothed, timeUnit };
})(window.fastgrpoPage);
