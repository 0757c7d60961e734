// The model and the settings panel: of the conversation that is looked at, which keeps them.

const NUMBERS = ["temperature", "max_tokens", "seed", "top_p", "top_k", "frequency_penalty", "presence_penalty"];

/** @typedef {{model: string, tier: string, other: string, system: string, params: Record<string, number>}} Values */

export class Settings {
  #model;
  #form;
  #panel;
  #toggle;

  /** @param {HTMLSelectElement} model @param {() => void} onChange what is set is another from now on */
  constructor(model, onChange) {
    this.#model = model;
    this.#form = document.getElementById("settings-form");
    this.#panel = document.getElementById("settings");
    this.#toggle = document.getElementById("settings-toggle");
    this.#pairTemperature();
    this.#nameModel();
    this.#form.addEventListener("input", onChange);
    model.addEventListener("change", () => {
      this.#nameModel();
      onChange();
    });
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    this.#form.addEventListener("reset", () => setTimeout(() => {
      this.#syncSlider();
      onChange();
    }));
    this.#toggle.addEventListener("click", () => this.#open(this.#panel.hidden));
    this.#panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.#open(false);
      this.#toggle.focus();
    });
  }

  get model() {
    return this.#model.value;
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

  /** @returns {Values} as they are now; a number out of its range is left out */
  get values() {
    return { model: this.model, tier: this.tier, other: this.other, system: this.#field("system").value, params: this.#numbers() };
  }

  /** Shows what a conversation kept; a model or tier that is no longer to be had stays what it is. @param {Values|null} values */
  show(values) {
    if (!values) return;
    for (const [list, wanted] of [[this.#model, values.model], [this.#field("tier"), values.tier], [this.#field("other"), values.other]]) {
      if (list && [...list.options].some(({ value }) => value === wanted)) list.value = wanted;
    }
    this.#field("system").value = values.system ?? "";
    for (const name of NUMBERS) this.#field(name).value = values.params?.[name] ?? "";
    this.#syncSlider();
    this.#nameModel();
  }

  /** @returns {Record<string, number>|null} null when a field is out of its range; the field is then shown and focused */
  params() {
    if (!this.#form.checkValidity()) {
      this.#open(true);
      this.#form.reportValidity();
      return null;
    }
    return this.#numbers();
  }

  #numbers() {
    const params = {};
    for (const name of NUMBERS) {
      const { valueAsNumber: value, validity } = this.#field(name);
      if (!Number.isNaN(value) && validity.valid) params[name] = value;
    }
    return params;
  }

  #nameModel() {
    for (const element of document.querySelectorAll("[data-model-name]")) element.textContent = this.model;
  }

  #field(name) {
    return this.#form.elements.namedItem(name);
  }

  #open(visible) {
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
}
