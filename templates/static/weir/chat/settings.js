// The settings panel: kept in this browser, read when a message is sent.

const STORE = "weir.chat.settings";

export class Settings {
  #form;
  #panel;
  #toggle;

  constructor() {
    this.#form = document.getElementById("settings-form");
    this.#panel = document.getElementById("settings");
    this.#toggle = document.getElementById("settings-toggle");
    this.#restore();
    this.#pairTemperature();
    this.#form.addEventListener("input", () => this.#keep());
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    this.#form.addEventListener("reset", () => setTimeout(() => {
      this.#syncSlider();
      this.#keep();
    }));
    this.#toggle.addEventListener("click", () => this.#show(this.#panel.hidden));
    this.#panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.#show(false);
      this.#toggle.focus();
    });
  }

  get system() {
    return this.#field("system").value.trim();
  }

  /** The queue to wait in; empty for the tenant's own. */
  get tier() {
    return this.#field("tier")?.value ?? "";
  }

  /** The second model, whose answer is shown beside the first's; empty for none. */
  get other() {
    return this.#field("other").value;
  }

  /** @returns {Record<string, number>|null} null when a field is out of its range; the field is then shown and focused */
  params() {
    if (!this.#form.checkValidity()) {
      this.#show(true);
      this.#form.reportValidity();
      return null;
    }
    const params = {};
    for (const name of ["temperature", "max_tokens", "seed", "top_p", "top_k", "frequency_penalty", "presence_penalty"]) {
      const value = this.#field(name).valueAsNumber;
      if (!Number.isNaN(value)) params[name] = value;
    }
    return params;
  }

  #field(name) {
    return this.#form.elements.namedItem(name);
  }

  #show(visible) {
    this.#panel.hidden = !visible;
    this.#toggle.setAttribute("aria-expanded", String(visible));
  }

  #pairTemperature() {
    const slider = document.getElementById("temperature-range");
    slider.addEventListener("input", () => { this.#field("temperature").value = slider.value; });
    this.#field("temperature").addEventListener("input", () => this.#syncSlider());
    this.#syncSlider();
  }

  #syncSlider() {
    document.getElementById("temperature-range").value = this.#field("temperature").value;
  }

  #keep() {
    const values = Object.fromEntries(new FormData(this.#form));
    try {
      sessionStorage.setItem(STORE, JSON.stringify(values));
    } catch {
      // Not kept; they hold until the page is left.
    }
  }

  #restore() {
    try {
      const values = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
      for (const [name, value] of Object.entries(values)) {
        const field = this.#field(name);
        if (!field) continue;
        field.value = value;
        if (field.selectedIndex === -1) field.selectedIndex = 0; // that model or tier is no longer to be had
      }
    } catch {
      // Unreadable: defaults.
    }
  }
}
