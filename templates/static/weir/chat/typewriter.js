// Text arrives in bursts, one per engine step; a reader wants it to flow. Each frame shows a share of what waits.

import { Markdown } from "./markdown.js";

const SHARE_PER_FRAME = 0.22;
/** Parsing a long answer anew takes longer: so many times that pause, to leave the page to its reader. */
const REST = 4;
const stillness = matchMedia("(prefers-reduced-motion: reduce)");

/** Shows text that grows, smoothly, as markdown. */
export class Typewriter {
  #markdown;
  #shown = "";
  #pending = [];
  #frame = 0;
  #notBefore = 0;
  #isWhole = false;
  #onShown;

  /** @param {Element} element @param {() => void} onShown called after each change */
  constructor(element, onShown) {
    this.#markdown = new Markdown(element);
    this.#onShown = onShown;
  }

  write(text) {
    this.#pending.push(...text); // by code point: no half emoji is ever shown
    if (document.hidden || stillness.matches) this.flush();
    else this.#frame ||= requestAnimationFrame((now) => this.#show(now));
  }

  /** @param {boolean} isWhole whether nothing follows */
  flush(isWhole = false) {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    if (!this.#pending.length && isWhole === this.#isWhole) return;
    this.#isWhole = isWhole;
    this.#append(this.#pending.length);
  }

  #show(now) {
    this.#frame = 0;
    if (now >= this.#notBefore) this.#append(Math.max(1, Math.ceil(this.#pending.length * SHARE_PER_FRAME)));
    if (this.#pending.length) this.#frame = requestAnimationFrame((next) => this.#show(next));
  }

  #append(count) {
    const began = performance.now();
    this.#shown += this.#pending.splice(0, count).join("");
    this.#markdown.show(this.#shown, this.#isWhole);
    const ended = performance.now();
    this.#notBefore = ended + REST * (ended - began);
    this.#onShown();
  }
}
