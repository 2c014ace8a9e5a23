"use strict";
// The controls of the sample browser: what is shown, how, and the search.
window.fastgrpoSamples = window.fastgrpoSamples || {};
((samples, { element }) => {
  const PAUSE = 200; // milliseconds after the last key before a search begins
  const KEYS = [
    [["←", "→"], "another step"], [["↑", "↓"], "another group"], [["Shift ←", "Shift →"], "from token to token in a text"],
  ];

  function labelled(name, control, id, ...more) {
    control.id = id;
    return element("div", { class: "control" }, element("label", { for: id }, name), element("div", { class: "row" }, control, ...more));
  }

  function button(name, label, press) {
    return element("button", { type: "button", "aria-label": label, title: label, onclick: press }, name);
  }

  function makeStepping(browser) {
    const { place } = browser;
    browser.runChoice = element("select", { onchange: () => {
      const step = browser.steps.length ? browser.steps[place.step].step : 0;
      place.run = Number(browser.runChoice.value);
      place.step = browser.steps.length ? samples.nearest(browser.steps, step) : 0;
      browser.showRun();
    } }, ...browser.runs.map((run, i) => element("option", { value: i }, run.name)));
    const choice = labelled("Run", browser.runChoice, "samples-run");
    choice.hidden = browser.runs.length === 1;
    browser.slider = element("input", { type: "range", min: 0, "aria-label": "Step, by the slider", oninput: () => {
      place.step = Number(browser.slider.value);
      browser.show();
    } });
    browser.number = element("input", { type: "number", onchange: () => {
      place.step = samples.nearest(browser.steps, Number(browser.number.value));
      browser.show();
    } });
    browser.groupChoice = element("select", { onchange: () => {
      place.group = Number(browser.groupChoice.value);
      browser.show();
    } });
    const around = (name, previous, next) => [
      button(previous, `Previous ${name}`, () => browser.move(name, -1)), button(next, `Next ${name}`, () => browser.move(name, 1)),
    ];
    const [back, on] = around("step", "◀", "▶"), [up, down] = around("group", "▲", "▼");
    const step = labelled("Step", browser.number, "samples-step", back, browser.slider, on);
    step.classList.add("wide");
    browser.stepping = element("div", { class: "controls" }, step, labelled("Group", browser.groupChoice, "samples-group", up, down));
    return choice;
  }

  function makeLooks(browser, colours) {
    const { place } = browser;
    browser.colour = element("select", { "aria-describedby": "samples-why", onchange: () => {
      place.by = browser.colour.value;
      browser.show();
    } }, ...Object.entries(colours).map(([value, name]) => element("option", { value }, name)));
    browser.sort = element("select", { onchange: () => {
      place.sort = browser.sort.value;
      browser.show();
    } });
    browser.lowest = element("button", { type: "button", "aria-pressed": "false", onclick: () => {
      place.lowest = place.lowest ? "" : "1";
      browser.show();
    } }, "Lowest first");
    let waiting = 0;
    browser.search = element("input", { type: "search", autocomplete: "off", spellcheck: "false", oninput: () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        place.find = browser.search.value;
        browser.showHits();
        browser.show();
      }, PAUSE);
    } });
    browser.why = element("p", { class: "note", id: "samples-why" });
    browser.told = element("p", { class: "told", role: "status" });
    browser.hits = element("ol", { class: "hits", hidden: true, "aria-label": "Texts that hold what you search" });
    browser.looks = element("div", {}, element("div", { class: "controls" },
      labelled("Tokens coloured by", browser.colour, "samples-colour"),
      labelled("Sorted by", browser.sort, "samples-sort", browser.lowest),
      labelled("Search in all texts of the run", browser.search, "samples-search")), browser.why, browser.told, browser.hits);
  }

  /** Make the controls as parts of the browser, and the panel that holds them. */
  function controls(browser, colours) {
    const choice = makeStepping(browser);
    makeLooks(browser, colours);
    const help = element("p", { class: "note shortcuts" }, "Keys in this section: ");
    KEYS.forEach(([keys, does], i) => {
      keys.forEach((key) => help.append(element("kbd", {}, key), " "));
      help.append(does + (i < KEYS.length - 1 ? ", " : "."));
    });
    browser.stepping.prepend(choice);
    browser.panel = element("div", { class: "panel" }, browser.stepping, browser.looks, help);
  }

  Object.assign(samples, { controls });
})(window.fastgrpoSamples, window.fastgrpoPage);
