"use strict";
// A chart in its card: drawn by plotly once it comes into view, and drawn again when a control or the mode changes.
((page) => {
  const { element, figure, table, theme } = page;
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

  /** The layout that all charts have: the colors of the page, and no more than that of plotly's own. */
  function layout(more) {
    const { front, faint, line, card, back, font } = theme();
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickfont: { color: faint }, automargin: true,
      exponentformat: "SI" };
    return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: front, family: font, size: 12 },
      margin: { l: 8, r: 8, t: 12, b: 8 }, showlegend: false, hovermode: "x unified",
      hoverlabel: { bgcolor: back, bordercolor: line, font: { color: front }, align: "left" },
      modebar: { bgcolor: card, color: faint, activecolor: front }, ...more,
      xaxis: { ...axis, ...more.xaxis, title: { font: { color: faint }, standoff: 6, ...(more.xaxis || {}).title } },
      yaxis: { ...axis, ...more.yaxis } };
  }

  /** Draw a chart that is in view and is not up to date. */
  function draw(chart) {
    if (!chart.inView || !chart.stale) return;
    chart.stale = false;
    const made = chart.make();
    chart.plot.setAttribute("aria-label", `${chart.title}. ${made.told}`);
    Plotly.react(chart.plot, made.traces, layout(made.layout), CONFIG);
    if (chart.details.open) fill(chart);
  }

  /** The figures of a chart for those who do not see it. */
  function fill(chart) {
    chart.details.querySelector(".scroll").replaceChildren(table(...chart.make().table));
  }

  /**
   * Put a chart into a place of the page.
   * make() returns its traces, its layout, a sentence that tells its last values, and [titles, rows] of its table.
   */
  function add(place, { title, note = "", wide = false, caption = () => [], make, remove = null }) {
    const plot = element("div", { class: "plot", role: "img", "aria-label": title });
    const details = element("details", {}, element("summary", {}, "As a table"),
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title} as a table` }));
    const chart = { title, plot, details, make, stale: true, inView: false };
    const heading = element("h3", {}, title);
    const keys = element("ul", { class: "keys" }, ...caption());
    const card = element("article", { class: wide ? "card wide" : "card" },
      element("header", {}, heading, ...(note ? [element("span", { class: "note" }, note)] : [])), keys, plot, details);
    if (remove) card.firstChild.append(element("button", { type: "button", "aria-label": `Remove the chart ${title}`,
      onclick: () => { drop(chart); card.remove(); remove(); } }, "Remove"));
    details.addEventListener("toggle", () => details.open && fill(chart));
    place.append(card);
    charts.add(chart);
    watch.observe(plot);
    return card;
  }

  function drop(chart) {
    watch.unobserve(chart.plot);
    charts.delete(chart);
    Plotly.purge(chart.plot);
  }

  /** Draw everything again: what is in view now, the rest when it comes into view. */
  function refresh() {
    for (const chart of charts) {
      chart.stale = true;
      draw(chart);
    }
  }

  /** A short piece of the line that a legend explains. */
  function key(name, { color, dash = "", dots = false }) {
    const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [at, value] of Object.entries({ width: 26, height: 10, "aria-hidden": "true" })) picture.setAttribute(at, value);
    const draw = (shape, attributes) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", shape);
      for (const [at, value] of Object.entries(attributes)) made.setAttribute(at, value);
      picture.append(made);
    };
    const stroke = color || "currentColor";
    draw("line", { x1: 1, x2: 25, y1: 5, y2: 5, stroke, "stroke-width": 2, "stroke-dasharray": dash });
    if (dots) draw("circle", { cx: 13, cy: 5, r: 4, fill: stroke });
    return element("li", {}, picture, name);
  }

  page.onThemeChange(refresh);
  window.fastgrpoCharts = { add, refresh, key, figure };
})(window.fastgrpoPage);
