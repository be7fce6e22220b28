// Fetches the page again every two seconds, and puts its rows in the place of those that differ. Without this script the
// page stays as it was when it was loaded.
"use strict";
(() => {
  const state = document.getElementById("state"), pause = document.getElementById("pause");
  if (!pause) return;
  let paused = false;

  function update(old, fresh) {
    if (old.tagName !== "TBODY") return old.isEqualNode(fresh) || old.replaceWith(fresh);
    const rows = [...fresh.children];
    rows.forEach((row, number) => {
      const before = old.children[number];
      if (!before) old.append(row); else if (!before.isEqualNode(row)) before.replaceWith(row);
    });
    while (old.children.length > rows.length) old.lastElementChild.remove();
  }

  async function look() {
    try {
      const answer = await fetch(location.href);
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (!fresh.querySelector("[data-live=trouble]")) throw new Error("not a page of ours");
      if (paused) return;
      const href = document.activeElement.getAttribute("href");
      for (const old of document.querySelectorAll("[data-live]")) {
        const its = fresh.querySelector(`[data-live="${old.dataset.live}"]`);
        if (its) update(old, its);
      }
      // The focus may have been on a link in a row that was replaced: it stays there.
      if (href && document.activeElement === document.body) {
        [...document.links].find((link) => link.getAttribute("href") === href)?.focus({ preventScroll: true });
      }
      state.textContent = document.querySelector(".trouble") ? "Waiting for the lock server" : "Live";
    } catch {
      if (!paused) state.textContent = "Connection lost, trying again";
    }
  }

  async function go() {
    if (!paused && !document.hidden) await look();
    setTimeout(go, 2000);
  }

  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    state.textContent = paused ? "Paused" : "Connecting";
  });
  go();
})();
