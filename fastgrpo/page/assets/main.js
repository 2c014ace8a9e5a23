"use strict";
// Starts the page: reads the payload and hands it to each section. The sections are in the other files.
(() => {
  const payload = JSON.parse(document.getElementById("payload").textContent);
  document.title = `${payload.title} · fastgrpo report`;
  for (const show of window.fastgrpoSections) show(payload);
})();
