// What the admin's theme lets a mouse alone do, the keyboard does here too; its symbols are no words, and its fields have
// names.
(() => {
  "use strict";
  const CLICKED = "[x-on\\:click]:not(a[href], button, input, select, textarea, #changelist-filter-close)";
  const INSIDE = 'a[href], button, input, select, [tabindex="0"]';
  const NAMES = { sidebar: "Menu", openTheme: "Theme", openRelated: "Add, change, look at", showPassword: "Show the password", openModal: "Close" };

  function makeReachable(root) {
    for (const symbol of root.querySelectorAll(".material-symbols-outlined:not([x-on\\:click])")) {
      const word = symbol.textContent.trim();
      const pressed = symbol.closest("a, button");
      symbol.ariaHidden = "true";
      // Of one that shows its symbol alone, that is the name.
      if (pressed && pressed.textContent.trim() === word && !pressed.title && !pressed.ariaLabel) {
        pressed.ariaLabel = word[0]?.toUpperCase() + word.slice(1).replaceAll("_", " ");
      }
    }
    for (const element of root.querySelectorAll(CLICKED)) {
      if (element.hasAttribute("tabindex") || element.querySelector(INSIDE)) continue;
      element.setAttribute("role", "button");
      element.tabIndex = 0;
      const change = element.getAttribute("x-on:click");
      const name = Object.keys(NAMES).find((part) => change.startsWith(part));
      if (name && !element.hasAttribute("title")) element.ariaLabel = NAMES[name];
    }
  }

  /** A field has a name by its label, or by the column of a table that it stands in. */
  function nameFields(root) {
    for (const field of root.querySelectorAll("select, textarea, input:not([type=hidden])")) {
      const column = field.closest("[data-label]")?.dataset.label;
      if (column && !field.labels?.length && !field.ariaLabel) field.ariaLabel = column;
    }
    for (const select of root.querySelectorAll("select.select2-hidden-accessible")) {
      const label = select.labels[0];
      for (const part of select.nextElementSibling?.querySelectorAll("[role=combobox], [role=textbox], [role=searchbox]") ?? []) {
        if (!label) {
          part.ariaLabel = select.ariaLabel;
          continue;
        }
        label.id ||= `label-of-${select.id}`;
        const value = part.role === "combobox" ? part.querySelector(".select2-selection__rendered")?.id : "";
        part.setAttribute("aria-labelledby", value ? `${label.id} ${value}` : label.id);
      }
    }
    for (const hint of root.querySelectorAll("span.help-tooltip[aria-label]")) hint.setAttribute("role", "img");
  }

  /** Into what the click opened: it stands anywhere on the page. */
  function follow(change) {
    const state = change.split(/\W/, 1)[0];
    const opened = document.querySelector(state.startsWith("sidebar") ? "#nav-sidebar-inner" : `[x-show="${state}"]`);
    if (opened?.checkVisibility()) [...opened.querySelectorAll(INSIDE)].find((each) => each.checkVisibility())?.focus();
  }

  document.addEventListener("keydown", (event) => {
    const element = event.target;
    if (!["Enter", " "].includes(event.key) || !(element instanceof Element) || !element.matches(CLICKED)) return;
    event.preventDefault();
    element.click();
    requestAnimationFrame(() => requestAnimationFrame(() => follow(element.getAttribute("x-on:click"))));
  });

  document.addEventListener("DOMContentLoaded", () => {
    const improve = (root) => {
      makeReachable(root);
      nameFields(root);
    };
    improve(document);
    new MutationObserver((records) => {
      for (const { target } of records) improve(target);
    }).observe(document.body, { childList: true, subtree: true });
  });
})();
