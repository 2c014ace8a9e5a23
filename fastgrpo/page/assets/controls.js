"use strict";
// The section of the charts: its controls, the charts that the task names, and those that the reader adds.
((page) => {
  const { element, swatch } = page;
  const WINDOWS = [1, 2, 5, 10, 20, 50, 100, 200, 500]; // logged steps that the moving average is over

  /** Every metric that no chart shows yet and that is a curve of its own. */
  function further(runs, panels) {
    const shown = new Set(panels.flatMap((panel) => panel.metrics));
    const all = new Set(runs.flatMap((run) => Object.keys(run.series)));
    return Array.from(all).filter((name) => !shown.has(name) && !/\/ci95_(low|high)$/.test(name)).sort();
  }

  function showCharts({ runs, panels, metrics }) {
    const section = document.getElementById("charts");
    const curves = window.fastgrpoCurves, charts = window.fastgrpoCharts;
    const longest = Math.max(...runs.map((run) => (run.series.reward || run.series.loss || { at: [] }).at.length));
    // A tenth of a short run is smoothed over, so that the curve ends near the last values.
    const usual = Math.max(...WINDOWS.filter((one) => one <= Math.max(1, Math.min(10, longest / 10))));
    const state = { x: "step", smooth: usual, hidden: new Set(), added: [], runs,
      unit: curves.timeUnit(runs), shown: () => runs.filter((run) => !state.hidden.has(run.name)) };
    if (!runs.some((run) => Object.keys(run.series).length)) {
      section.append(element("p", { class: "note" }, "metrics.jsonl has no line yet."));
      return;
    }
    const measured = panels.filter((panel) =>
      panel.metrics.some((metric) => runs.some((run) => run.series[metric])));
    const grid = element("div", { class: "grid" });
    const more = element("div", { class: "grid more" });
    let hide = () => {};
    const changed = () => { hide(); charts.refresh(); };

    const addCurve = (metric) => {
      const panel = { title: metric, metrics: [metric], labels: [], dashed: [], window: 10 };
      charts.add(more, { title: metric, note: metrics[metric] || "", make: () => curves.make(panel, state),
        remove: () => { state.added = state.added.filter((name) => name !== metric); } });
    };

    section.append(toolbar(state, changed), ...(runs.length > 1 ? [chooser(state, changed)] : []));
    for (const panel of measured) charts.add(grid, { title: panel.title, note: panel.unit,
      caption: () => curves.caption(panel, state), make: () => curves.make(panel, state) });
    hide = window.fastgrpoDistributions.addAll(grid, state);
    section.append(grid);
    for (const { note } of runs) if (note) section.append(element("p", { class: "note after" }, note));
    section.append(adder(further(runs, measured), state, addCurve), more);
    hide();
  }

  function toolbar(state, changed) {
    const over = element("select", { onchange: () => { state.x = over.value; changed(); } },
      ...Object.entries(window.fastgrpoCurves.AXES).map(([value, name]) => element("option", { value }, name)));
    over.value = state.x;
    const told = element("output", {});
    const say = () => {
      const text = state.smooth === 1 ? "off" : `mean of ${state.smooth} logged steps`;
      told.textContent = text;
      slider.setAttribute("aria-valuetext", text);
    };
    const slider = element("input", { type: "range", min: 0, max: WINDOWS.length - 1, step: 1,
      oninput: () => { state.smooth = WINDOWS[slider.value]; say(); changed(); } });
    slider.value = WINDOWS.indexOf(state.smooth);
    say();
    return element("div", { class: "toolbar" }, element("label", {}, "Over", over),
      element("label", {}, "Smoothing", slider, told));
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

  function adder(names, state, addCurve) {
    const choice = element("select", { onchange: () => {
      const metric = choice.value;
      if (metric && !state.added.includes(metric)) {
        state.added.push(metric);
        addCurve(metric);
      }
      choice.value = "";
    } }, element("option", { value: "" }, `choose one of ${names.length} more metrics`),
      ...names.map((name) => element("option", { value: name }, name)));
    return element("div", { class: "toolbar after" }, element("label", {}, "Add a chart", choice));
  }

  window.fastgrpoSections.push(showCharts);
})(window.fastgrpoPage);
