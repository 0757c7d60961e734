// One conversation: a tree of exchanges, of which one branch is looked at. Kept for this tab too, so that a reload
// in mid-answer loses nothing.

import { Generation } from "./generation.js";

const KEEP_EVERY_MS = 400;
const TITLE_LENGTH = 80;

export const newId = () => crypto.getRandomValues(new Uint8Array(16)).toHex?.() ?? randomHex();

function randomHex() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @typedef {{id: string, parent: string|null, pair: string|null, question: string, answer: Generation}} Exchange */

export class Conversation {
  constructor({ id = newId(), title = "", leaf = null, settings = null, exchanges = [] } = {}) {
    this.id = id.replaceAll("-", "");
    this.title = title;
    this.leaf = leaf;
    /** @type {import("./settings.js").Values|null} null where none were kept */
    this.settings = settings;
    /** @type {Map<string, Exchange>} in the order they were asked */
    this.exchanges = new Map();
    for (const exchange of exchanges) {
      this.exchanges.set(exchange.id, { ...exchange, answer: new Generation(exchange.answer) });
    }
    if (!this.exchanges.has(this.leaf)) this.leaf = [...this.exchanges.keys()].at(-1) ?? null;
  }

  /** Asks below `parent`, and looks at it. */
  add({ parent, question, model, tier, pair = null }) {
    const id = newId();
    const exchange = { id, parent, pair, question, answer: new Generation({ id, model, tier }) };
    this.exchanges.set(id, exchange);
    this.leaf = id;
    this.title ||= question.split("\n", 1)[0].slice(0, TITLE_LENGTH).trim() || "New chat";
    return exchange;
  }

  remove(exchange) {
    this.exchanges.delete(exchange.id);
    this.leaf = exchange.parent;
  }

  /** From the first exchange to the one looked at. */
  path(from = this.leaf) {
    const path = [];
    for (let step = this.exchanges.get(from); step && !path.includes(step); step = this.exchanges.get(step.parent)) {
      path.unshift(step);
    }
    return path;
  }

  /** What else was asked or answered in its place, itself included; a pair counts as one. */
  alternatives(exchange) {
    const seen = new Set();
    return [...this.exchanges.values()].filter(({ id, parent, pair }) => {
      if (parent !== exchange.parent) return false;
      const key = pair ?? id;
      if (seen.has(key)) return false;
      seen.add(key);
      return true;
    });
  }

  /** The answers to be seen beside each other: the exchange alone, or it and its pair. */
  beside(exchange) {
    if (!exchange.pair) return [exchange];
    return [...this.exchanges.values()].filter(({ pair }) => pair === exchange.pair);
  }

  /** Looks at the latest branch that goes through that exchange. */
  lookAt(exchange) {
    let end = exchange;
    for (const candidate of this.exchanges.values()) if (candidate.parent === end.id) end = candidate;
    this.leaf = end.id;
  }

  /** The messages to send for an exchange: everything before it, then its question. */
  messages(exchange, system) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const { question, answer } of this.path(exchange.parent)) {
      if (!answer.text) continue; // a failed exchange is not part of what was said
      messages.push({ role: "user", content: question }, { role: "assistant", content: answer.text });
    }
    messages.push({ role: "user", content: exchange.question });
    return messages;
  }

  /** Whether the server was told of it. */
  get isKept() {
    return [...this.exchanges.values()].some(({ answer }) => answer.phase !== "asked");
  }

  get running() {
    return [...this.exchanges.values()].filter(({ answer }) => !answer.isOver);
  }

  toJSON() {
    return { id: this.id, title: this.title, leaf: this.leaf, settings: this.settings, exchanges: [...this.exchanges.values()] };
  }
}

/** The conversation in this tab, with the text of answers under way and of the message that is being written. */
export class TabMemory {
  #key;
  #timer = 0;
  #signedOut = false;
  #read;

  /** @param {string} owner another person or tenant in the same tab sees nothing of it @param {() => object} read what to keep */
  constructor(owner, read) {
    this.#key = `weir.chat.${owner}`;
    this.#read = read;
    addEventListener("pagehide", () => this.keepNow());
    addEventListener("weir:sign-out", () => { this.#signedOut = true; });
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
      sessionStorage.setItem(this.#key, JSON.stringify(this.#read()));
    } catch {
      // Full or forbidden: then only what the server keeps outlives the page.
    }
  }

  recall() {
    try {
      return JSON.parse(sessionStorage.getItem(this.#key) ?? "{}");
    } catch {
      return {};
    }
  }
}
