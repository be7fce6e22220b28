// Keeps a page as if it had just been loaded: rows that have changed come as server-sent events, and what only goes on
// with time (how long a lock is held, the timeline's window) goes on here. Without this script the page stays as it is.
"use strict";
(() => {
  const root = document.querySelector(".exclusive-locks[data-stream]");
  if (!root || !window.EventSource) return;
  const state = document.getElementById("state");
  const trouble = document.getElementById("trouble");
  const pause = document.getElementById("pause");
  let source = null, again = 0, paused = false;
  let ahead = Number(root.dataset.now) - Date.now() / 1000;

  const now = () => Date.now() / 1000 + ahead;

  function say(text) {
    if (state.textContent !== text) state.textContent = text;
  }

  // As `duration` in Python.
  function duration(seconds) {
    for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
      if (seconds >= 2 * size) return `${Math.floor(seconds / size)} ${unit}`;
    }
    return `${Math.round(Math.max(seconds, 0))} s`;
  }

  function tick() {
    if (paused) return;
    for (const time of root.querySelectorAll("time[data-since]")) time.textContent = duration(now() - time.dataset.since);
    for (const time of root.querySelectorAll("time[data-until]")) time.textContent = duration(time.dataset.until - now());
    for (const table of root.querySelectorAll("table.lanes")) {
      const span = Number(table.dataset.span), since = now() - span - table.dataset.origin;
      for (const lane of table.querySelectorAll("td.lane svg")) {
        lane.setAttribute("viewBox", `${since.toFixed(2)} 0 ${span} ${10 * lane.dataset.rows}`);
      }
    }
  }

  function made(html) {
    const template = document.createElement("template");
    template.innerHTML = html; // Escaped where it was made.
    return template.content.firstElementChild;
  }

  function change(region, rows, order) {
    for (const [id, html] of Object.entries(rows)) {
      const row = made(html), old = document.getElementById(id);
      if (old) old.replaceWith(row); else region.append(row);
    }
    if (!order) return;
    const wanted = new Set(order);
    for (const row of [...region.children]) if (!wanted.has(row.id)) row.remove();
    order.forEach((id, index) => {
      const row = document.getElementById(id);
      if (row && region.children[index] !== row) region.insertBefore(row, region.children[index]);
    });
  }

  // The focus may be on a link in a row that is replaced: it stays there.
  function keepingFocus(work) {
    const before = document.activeElement, row = before && before.closest && before.closest("[data-region] > [id]");
    const href = before && before.getAttribute && before.getAttribute("href");
    work();
    if (!row || document.activeElement === before) return;
    const same = before.isConnected ? before : [...(document.getElementById(row.id) || root).querySelectorAll("a")]
      .find((link) => link.getAttribute("href") === href);
    if (same) same.focus({ preventScroll: true });
  }

  function apply(event) {
    ahead = event.now - Date.now() / 1000;
    keepingFocus(() => {
      for (const table of root.querySelectorAll("table.lanes")) if (event.origin !== null) table.dataset.origin = event.origin;
      for (const [name, { rows, order }] of Object.entries(event.regions)) {
        const region = root.querySelector(`[data-region="${name}"]`);
        if (region) change(region, rows, order);
      }
    });
    if (trouble.textContent.trim() !== event.trouble) {
      trouble.replaceChildren();
      if (event.trouble) {
        const line = document.createElement("p");
        line.className = "trouble";
        line.textContent = event.trouble;
        trouble.append(line);
      }
    }
    say(event.trouble ? "Waiting for the lock server" : "Live");
    tick();
  }

  function open() {
    close();
    source = new EventSource(root.dataset.stream);
    source.onmessage = (message) => apply(JSON.parse(message.data));
    source.onerror = () => {
      say("Connection lost, trying again");
      if (source && source.readyState === EventSource.CLOSED) again = setTimeout(open, 5000);
    };
  }

  function close() {
    clearTimeout(again);
    if (source) source.close();
    source = null;
  }

  // A browser has few connections to one host: a page that nobody sees needs none.
  function listen() {
    if (paused || document.hidden) close(); else if (!source) open();
  }

  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    say(paused ? "Paused" : "Connecting");
    listen();
  });
  document.addEventListener("visibilitychange", listen);
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", listen);
  listen();
  setInterval(tick, 1000);
})();
