// Keeps parts of a page fresh over a websocket while somebody sees them, and says so when it can't.
// <div data-live="limits" data-tenant="ID" data-live-state="id of the element that says how it stands">

import { localiseTimes } from "./times.js";

const SILENT_MS = 10_000;
const RETRY_MS = [500, 1000, 2000, 5000, 10_000];
const GONE = 4404;
const WORDS = { connecting: "Connecting", live: "Live", lost: "The connection is lost: these figures are old", gone: "You may no longer see this: load the page again" };

function watch(part) {
  const shown = document.getElementById(part.dataset.liveState);
  const query = new URLSearchParams({ part: part.dataset.live, tenant: part.dataset.tenant ?? "" });
  const address = `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/ws/live?${query}`;
  let socket = null;
  let failures = 0;
  let timer = 0;

  function show(state) {
    if (!shown || shown.dataset.state === state) return;
    shown.dataset.state = state;
    shown.textContent = WORDS[state];
  }

  function open() {
    if (socket || document.hidden) return;
    clearTimeout(timer);
    socket = new WebSocket(address);
    socket.addEventListener("message", ({ data }) => {
      failures = 0;
      if (data !== " ") replace(part, data);
      show("live");
      expectMore();
    });
    socket.addEventListener("close", ({ code, target }) => {
      if (target !== socket) return; // given up by us
      socket = null;
      clearTimeout(timer);
      if (code === GONE) show("gone");
      else lost();
    });
    expectMore();
  }

  function lost() {
    show("lost");
    clearTimeout(timer);
    timer = setTimeout(open, RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)] * (0.8 + 0.4 * Math.random()));
  }

  /** A connection can die without a word. */
  function expectMore() {
    clearTimeout(timer);
    timer = setTimeout(() => {
      giveUp();
      lost();
    }, SILENT_MS);
  }

  function giveUp() {
    const old = socket;
    socket = null;
    old?.close();
    clearTimeout(timer);
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) giveUp();
    else open();
  });
  // A page that the browser keeps for "back" must not keep a socket.
  addEventListener("pagehide", giveUp);
  addEventListener("pageshow", open);
  open();
}

/** Our own server's HTML, in which everything is escaped; scrolling and focus stay where they were. */
function replace(part, html) {
  const places = [...part.querySelectorAll("[tabindex='0']")].map(({ scrollLeft }) => scrollLeft);
  const focused = part.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  part.innerHTML = html;
  part.querySelectorAll("[tabindex='0']").forEach((element, index) => { element.scrollLeft = places[index] ?? 0; });
  if (focused) part.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  localiseTimes(part);
  part.dispatchEvent(new CustomEvent("weir:fresh", { bubbles: true }));
}

for (const part of document.querySelectorAll("[data-live]")) {
  localiseTimes(part);
  watch(part);
}
