"use strict";
// What the sections share: elements made of text alone, figures for people, and the colors of the light and dark page.
window.fastgrpoSections = window.fastgrpoSections || [];
window.fastgrpoPage = (() => {
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

  /** A square in the color of a run. The style is set by the script, because the page's policy is for its attributes. */
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

  function table(titles, rows) {
    const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
    const body = rows.map((row) => element("tr", {}, ...row.map((cell, place) => {
      if (place === 0) return element("th", { scope: "row" }, cell);
      return element("td", { class: "number" }, cell);
    })));
    return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
  }

  /** A box that scrolls has to be reached by the keyboard. */
  function scrolling(label, ...children) {
    return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, ...children);
  }

  /** The colors of the style sheet, which change with the reader's light or dark mode. */
  function theme() {
    const style = getComputedStyle(document.documentElement);
    const names = ["back", "front", "faint", "line", "card", "bad", "font"];
    return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }

  function onThemeChange(act) {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", act);
  }

  return { element, swatch, figure, table, scrolling, theme, onThemeChange };
})();
