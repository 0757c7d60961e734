// Keeps the operator's live page fresh while somebody looks at it; says so when it can't.

const EVERY_MS = 2000;
const part = document.getElementById("live-part");
const shown = document.getElementById("live-state");
let isAsking = false;

async function refresh() {
  // Who is about to press a button there keeps it.
  if (document.hidden || isAsking || part.querySelector("form:focus-within")) return;
  isAsking = true;
  try {
    const response = await fetch(part.dataset.source, { redirect: "manual", cache: "no-store", signal: AbortSignal.timeout(8000) });
    if (!response.ok) throw new Error(String(response.status));
    const places = [...part.querySelectorAll(".live-scroll")].map(({ scrollLeft }) => scrollLeft);
    const focused = document.activeElement?.getAttribute("aria-label");
    part.innerHTML = await response.text(); // our own server's page: everything in it is escaped there
    part.querySelectorAll(".live-scroll").forEach((element, index) => { element.scrollLeft = places[index] ?? 0; });
    if (focused && document.activeElement === document.body) {
      part.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    }
    show("live", "Live");
  } catch {
    show("lost", "The connection is lost: these figures are old");
  } finally {
    isAsking = false;
  }
}

function show(state, words) {
  if (shown.dataset.state === state) return;
  shown.dataset.state = state;
  shown.textContent = words;
}

setInterval(refresh, EVERY_MS);
document.addEventListener("visibilitychange", refresh);
