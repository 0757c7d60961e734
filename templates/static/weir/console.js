// What every page shares: theme choice, copy buttons, the dialog.

import { localiseTimes } from "./times.js";

/** Copies `text`; where the clipboard is closed to us (plain http), through a selection. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "visually-hidden";
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

/** Says something to screen readers without moving the focus. */
export function announce(message) {
  const region = document.getElementById("announcer");
  if (region) region.textContent = message;
}

async function onCopy(button) {
  const source = document.getElementById(button.dataset.copy);
  if (!source) return;
  const copied = await copyText(source.value ?? source.textContent);
  const label = button.dataset.label ?? button.textContent;
  button.dataset.label = label;
  button.textContent = copied ? "Copied" : "Press Ctrl+C";
  announce(copied ? "Copied to the clipboard" : "Copying was refused by the browser");
  if (!copied) getSelection()?.selectAllChildren(source);
  clearTimeout(Number(button.dataset.timer));
  button.dataset.timer = String(setTimeout(() => { button.textContent = label; }, 2000));
}

function initTheme() {
  for (const group of document.querySelectorAll("[data-theme-choice]")) {
    const chosen = document.documentElement.dataset.theme ?? "auto";
    for (const radio of group.querySelectorAll("input")) {
      radio.checked = radio.value === chosen;
      radio.addEventListener("change", () => {
        if (radio.value === "auto") delete document.documentElement.dataset.theme;
        else document.documentElement.dataset.theme = radio.value;
        try {
          localStorage.setItem("weir.theme", radio.value);
        } catch {
          // Not kept; it still holds for this page.
        }
      });
    }
  }
}

document.addEventListener("click", (event) => {
  const target = event.target instanceof Element ? event.target : null;
  const copy = target?.closest("[data-copy]");
  if (copy) void onCopy(copy);
  const dialog = target?.closest("[data-close-dialog]")?.closest("dialog"); // on a page of its own it is a link
  if (dialog) {
    event.preventDefault();
    dialog.close();
  }
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    if (!target || !menu.contains(target)) menu.open = false;
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    menu.open = false;
    menu.querySelector("summary")?.focus();
    event.preventDefault(); // it meant the menu
  }
});

document.addEventListener("htmx:afterSwap", (event) => {
  const target = event.detail.target;
  if (!target.matches?.("dialog")) return;
  if (!target.open) target.showModal();
  else target.querySelector("[autofocus]")?.focus(); // one question led to another
});
document.addEventListener("weir:fresh", ({ target }) => window.htmx?.process(target));
document.addEventListener("htmx:afterSettle", () => {
  localiseTimes(document);
  const focus = document.querySelector("[data-focus]");
  if (focus) {
    focus.removeAttribute("data-focus");
    focus.focus();
  }
});
// A hidden tab asks for nothing; it goes on when it is looked at again.
document.addEventListener("htmx:beforeRequest", (event) => {
  if (document.hidden && event.target.matches("[data-polls]")) event.preventDefault();
});
// A failed fragment must not look like nothing happened: load the whole page, which shows the error. What asks again
// by itself does so in a moment: a page that somebody reads is not worth losing to an outage of a second.
document.addEventListener("htmx:responseError", (event) => {
  if (event.detail.xhr.status >= 502 && event.target.matches("[data-polls]")) return;
  announce("That did not work");
  location.reload();
});
document.addEventListener("submit", (event) => {
  // What a person typed in the chat leaves this browser with the session.
  if (event.target instanceof Element && event.target.matches("[data-sign-out]")) {
    dispatchEvent(new Event("weir:sign-out"));
    sessionStorage.clear();
  }
});

initTheme();
localiseTimes(document);
