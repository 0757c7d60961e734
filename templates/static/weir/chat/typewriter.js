// Text arrives in bursts, one per engine step; a reader wants it to flow. Each frame shows a share of what waits.

const SHARE_PER_FRAME = 0.22;
const stillness = matchMedia("(prefers-reduced-motion: reduce)");

/** Appends text to one node, smoothly. Only ever text: what a model writes is never parsed as HTML. */
export class Typewriter {
  #node;
  #pending = [];
  #frame = 0;
  #onShown;

  /** @param {Element} element @param {() => void} onShown called after each change */
  constructor(element, onShown) {
    this.#node = element.appendChild(document.createTextNode(""));
    this.#onShown = onShown;
  }

  write(text) {
    this.#pending.push(...text); // by code point: no half emoji is ever shown
    if (document.hidden || stillness.matches) this.flush();
    else this.#frame ||= requestAnimationFrame(() => this.#show());
  }

  flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#append(this.#pending.length);
  }

  #show() {
    this.#frame = 0;
    this.#append(Math.max(1, Math.ceil(this.#pending.length * SHARE_PER_FRAME)));
    if (this.#pending.length) this.#frame = requestAnimationFrame(() => this.#show());
  }

  #append(count) {
    if (!this.#pending.length) return;
    this.#node.appendData(this.#pending.splice(0, count).join(""));
    this.#onShown();
  }
}
