"use strict";
// The charts that a run has for itself: its rewards as a histogram over time, and the stages of its steps, stacked.
((page) => {
  const { figure, theme } = page;

  const share = (value) => `${(100 * value).toFixed(0)}%`;

  /** The rewards of the logged completions: each column is a step, and its colors are shares of its completions. */
  function rewards(run, state) {
    const { whereIs, xaxis } = window.fastgrpoCurves;
    const { step, edges, counts } = run.rewards;
    const totals = counts.map((column) => column.reduce((sum, one) => sum + one, 0));
    const shares = edges.slice(1).map((_, bin) => counts.map((column, at) => column[bin] / totals[at]));
    const x = step.map((one) => whereIs(run, one, state));
    const centers = edges.slice(1).map((edge, bin) => (edge + edges[bin]) / 2);
    const trace = { type: "heatmap", x, y: centers, z: shares, zmin: 0, zmax: 1, hoverongaps: false,
      colorscale: [[0, theme().card], [0.02, `${run.color}30`], [1, run.color]],
      colorbar: { thickness: 8, len: 1, tickformat: ".0%", outlinewidth: 0, tickfont: { color: theme().faint } },
      hovertemplate: `%{x}<br>reward about %{y:.3~g}: %{z:.0%}<extra></extra>` };
    const last = counts.length - 1;
    const rows = edges.slice(1).map((edge, bin) => [`${figure(edges[bin])} to ${figure(edge)}`,
      share(shares[bin][0]), share(shares[bin][last])]);
    const told = rows.filter((row) => row[2] !== "0%").map((row) => `${row[0]}: ${row[2]}`).join("; ");
    return { traces: [trace], told: `Shares at the last logged step: ${told}`,
      table: [["Reward", `Step ${step[0]}`, `Step ${step[last]}`], rows],
      layout: { xaxis: xaxis(state), hovermode: "closest", yaxis: { title: { text: "total reward" },
        ...(centers.length <= 8 ? { tickvals: centers, ticktext: centers.map(figure) } : {}) } } };
  }

  const stagesOf = (run) => Object.keys(run.series).filter((name) => name.startsWith("time/"));

  function stageColor(order) {
    const { PALETTE } = window.fastgrpoCurves;
    return PALETTE[order % PALETTE.length];
  }

  /** The seconds of a step by its stages, one upon the other, smoothed like the curves. */
  function stages(run, state) {
    const { along, smoothed, xaxis } = window.fastgrpoCurves;
    const names = stagesOf(run);
    const traces = names.map((name, order) => ({ type: "scatter", mode: "lines", stackgroup: "stages",
      name: name.slice(5), x: along(run, run.series[name].at, state), y: smoothed(run.series[name], state.smooth),
      line: { width: 0.5, color: stageColor(order) }, fillcolor: `${stageColor(order)}b0`, hovertemplate: "%{y:.3~g} s" }));
    const means = names.map((name) => {
      const series = run.series[name];
      return smoothed(series, Infinity)[series.value.length - 1];
    });
    const whole = means.reduce((sum, one) => sum + one, 0) || 1;
    const rows = names.map((name, order) => [name.slice(5), figure(means[order]), share(means[order] / whole)]);
    return { traces, told: rows.map((row) => `${row[0]}: ${row[2]} of the time`).join("; "),
      table: [["Stage", "Mean seconds a step", "Share"], rows],
      layout: { xaxis: xaxis(state), yaxis: { title: { text: "s a step" }, rangemode: "tozero" } } };
  }

  /** Add the charts of each run behind the curves. */
  function addAll(place, state) {
    const { add, key } = window.fastgrpoCharts;
    const single = state.runs.length === 1;
    const cards = [];
    const named = (title, run) => (single ? title : `${title}: ${run.name}`);
    for (const run of state.runs.filter((one) => one.rewards)) cards.push([run, add(place, {
      title: named("Rewards over time", run), note: run.rewards.note, wide: single, make: () => rewards(run, state) })]);
    for (const run of state.runs.filter((one) => stagesOf(one).length)) cards.push([run, add(place, {
      title: named("Where the time of a step goes", run), wide: single, make: () => stages(run, state),
      caption: () => stagesOf(run).map((name, order) => key(name.slice(5), { color: stageColor(order) })) })]);
    return () => { for (const [run, card] of cards) card.hidden = state.hidden.has(run.name); };
  }

  window.fastgrpoDistributions = { addAll };
})(window.fastgrpoPage);
