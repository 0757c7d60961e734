// Loaded before the stylesheet paints, and not as a module, so that a chosen theme never flashes the other one.
(() => {
  "use strict";
  let theme = "auto";
  try {
    theme = localStorage.getItem("weir.theme") || "auto";
  } catch {
    // Storage may be forbidden; the system's preference then holds.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  document.documentElement.classList.add("js");
})();
