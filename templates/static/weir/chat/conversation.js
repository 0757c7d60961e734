// The turns of one conversation, kept for this tab so that a reload loses nothing.

import { Generation } from "./generation.js";

const KEEP_EVERY_MS = 400;

export class Conversation {
  #store;
  #timer = 0;
  #signedOut = false;

  /** @param {string} owner whose conversation it is: another person or tenant in the same tab sees nothing of it */
  constructor(owner) {
    this.#store = `weir.chat.${owner}`;
    /** @type {{question: string, answer: Generation}[]} */
    this.exchanges = [];
    this.model = null;
    this.#restore();
    addEventListener("pagehide", () => this.keepNow());
    addEventListener("weir:sign-out", () => { this.#signedOut = true; });
  }

  /** The messages to send for the exchange at `index`: everything before it, then its question. */
  messages(index, system) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const { question, answer } of this.exchanges.slice(0, index)) {
      if (!answer.text) continue; // a failed exchange is not part of what was said
      messages.push({ role: "user", content: question }, { role: "assistant", content: answer.text });
    }
    messages.push({ role: "user", content: this.exchanges[index].question });
    return messages;
  }

  get running() {
    return this.exchanges.filter(({ answer }) => !answer.isOver).map(({ answer }) => answer);
  }

  clear() {
    this.exchanges = [];
    this.keepNow();
  }

  /** Soon: a save per token would be waste. */
  keep() {
    this.#timer ||= setTimeout(() => this.keepNow(), KEEP_EVERY_MS);
  }

  keepNow() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    if (this.#signedOut) return;
    try {
      sessionStorage.setItem(this.#store, JSON.stringify({ exchanges: this.exchanges, model: this.model }));
    } catch {
      // Full or forbidden: the conversation then lives only as long as the page.
    }
  }

  #restore() {
    try {
      const kept = JSON.parse(sessionStorage.getItem(this.#store) ?? "{}");
      this.model = kept.model ?? null;
      this.exchanges = (kept.exchanges ?? []).map(({ question, answer }) => ({
        question,
        answer: new Generation(answer),
      }));
    } catch {
      this.exchanges = [];
    }
  }
}
