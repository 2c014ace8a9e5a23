"use strict";
// Loads a live page again when the run has written more. The reader's place is in the address; how far the page was
// scrolled, what had the focus and what was half typed are kept for the next page.
window.fastgrpoSections = window.fastgrpoSections || [];
(({ element }) => {
  const LEAST = 2000; // milliseconds between two questions; a page that takes long to load asks less often
  const KEPT = "fastgrpo-live";

  /** Whether a reload would take something from the reader now: a selection, or a word that is being typed. */
  function busy(typed) {
    return document.hidden || !document.getSelection().isCollapsed || performance.now() - typed < 1500;
  }

  function keep() {
    const { id } = document.activeElement || {};
    sessionStorage.setItem(KEPT, JSON.stringify({ x: scrollX, y: scrollY, id }));
  }

  function restore() {
    const kept = JSON.parse(sessionStorage.getItem(KEPT) || "null");
    sessionStorage.removeItem(KEPT);
    if (!kept) return;
    const focused = kept.id && document.getElementById(kept.id);
    if (focused) focused.focus({ preventScroll: true });
    scrollTo(kept.x, kept.y);
  }

  window.fastgrpoSections.push((payload) => {
    if (!payload.live) return;
    restore();
    const { content: version } = document.querySelector('meta[name="fastgrpo-version"]');
    const state = element("p", { id: "live", role: "status" }, "Live: the page follows the run.");
    document.getElementById("head").append(state);
    let typed = -Infinity;
    addEventListener("input", () => { typed = performance.now(); });
    const pause = Math.max(LEAST, 3 * performance.now());
    let waiting = 0;
    let asking = false;
    const ask = async () => {
      if (asking) return;
      asking = true;
      clearTimeout(waiting);
      try {
        const answer = await fetch("/version", { cache: "no-store" });
        if (!answer.ok) throw new Error(answer.statusText);
        const changed = (await answer.text()) !== version;
        if (changed && !busy(typed)) {
          keep();
          location.reload();
          return; // and ask no more: the next page is on its way
        }
        state.textContent = changed ? "Live: there is more, and the page waits for you." : "Live: the page follows the run.";
      } catch {
        state.textContent = "The command that serves this page has ended. This is what it served last.";
      }
      asking = false;
      waiting = setTimeout(ask, pause);
    };
    waiting = setTimeout(ask, pause);
    // Who comes back to the page sees the newest at once.
    document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
  });
})(window.fastgrpoPage);
