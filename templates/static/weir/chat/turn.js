// How one turn of the conversation looks.

import { Typewriter } from "./typewriter.js";

const ENDINGS = {
  length: "cut at the token limit",
  cancelled: "stopped",
  deadline: "ran out of time",
};

const number = (value, digits = 0) =>
  new Intl.NumberFormat(undefined, { maximumFractionDigits: digits }).format(value);

function fromTemplate(id) {
  return document.getElementById(id).content.firstElementChild.cloneNode(true);
}

export function userTurn(text) {
  const element = fromTemplate("user-turn");
  element.querySelector("[data-text]").textContent = text;
  return element;
}

/** The view of one answer. */
export class AnswerView {
  #writer;
  #waiting = false;

  constructor(generation, { onShown, onRetry, onCopy }) {
    this.generation = generation;
    this.element = fromTemplate("assistant-turn");
    this.#part("name").textContent = generation.model;
    this.#writer = new Typewriter(this.#part("text"), onShown);
    this.element.querySelector('[data-action="retry"]').addEventListener("click", onRetry);
    const copy = this.element.querySelector('[data-action="copy"]');
    copy.addEventListener("click", () => onCopy(copy));
    this.#writer.write(generation.text);
    this.#writer.flush();
    this.refresh();
  }

  write(text) {
    if (text) this.#writer.write(text);
    this.refresh();
  }

  /** Whether it changes by time alone. */
  get isMoving() {
    return !this.generation.isOver || this.#waiting;
  }

  /** @param {string|null} connection what is wrong with the connection, in words */
  refresh(connection = null) {
    const generation = this.generation;
    if (generation.isOver) this.#writer.flush();
    this.element.setAttribute("aria-busy", String(!generation.isOver));
    this.#refreshStatus(connection);
    this.#refreshError();
    this.#refreshRetry();
    const stats = this.#stats();
    this.#part("stats").textContent = stats;
    this.#part("foot").hidden = !generation.isOver && !stats;
    this.element.querySelector(".turn-actions").hidden = !generation.isOver;
    this.element.querySelector('[data-action="copy"]').hidden = !generation.text;
  }

  #refreshRetry() {
    const button = this.element.querySelector('[data-action="retry"]');
    const seconds = Math.ceil((this.generation.retryAt - Date.now()) / 1000);
    this.#waiting = seconds > 0;
    button.disabled = this.#waiting;
    button.textContent = this.#waiting ? `Retry in ${number(seconds)} s` : "Retry";
  }

  #refreshStatus(connection) {
    const status = this.#part("status");
    const { isOver, phase, text, nextSeq } = this.generation;
    let words = "";
    if (!isOver && connection) words = connection;
    else if (phase === "asked") words = "Asking";
    else if (phase === "running" && nextSeq === 0 && !text) words = "Waiting for the first token";
    status.textContent = words;
    status.hidden = !words;
    status.classList.toggle("warn", Boolean(connection));
  }

  #refreshError() {
    const box = this.#part("error");
    const error = this.generation.error;
    box.hidden = !error;
    if (!error || box.textContent) return;
    const title = document.createElement("strong");
    title.textContent = this.generation.text ? "The answer broke off" : "No answer";
    box.append(title, error.message ?? "Something went wrong.");
  }

  #stats() {
    const { usage, finishReason, isOver, nextSeq, text } = this.generation;
    const parts = [];
    const rate = isOver && usage ? usage.tokens_per_second : this.generation.liveRate();
    if (rate) parts.push(`${number(rate, rate < 10 ? 1 : 0)} tokens/s`);
    if (usage?.ttft_ms != null) parts.push(`first token after ${number(usage.ttft_ms)} ms`);
    const tokens = usage?.completion_tokens ?? nextSeq;
    if (tokens) parts.push(`${number(tokens)} ${tokens === 1 ? "token" : "tokens"}`);
    if (isOver && ENDINGS[finishReason]) parts.push(ENDINGS[finishReason]);
    if (isOver && finishReason === "stop" && !text) parts.push("the model had nothing to say");
    return parts.join(" · ");
  }

  #part(name) {
    return this.element.querySelector(`[data-${name}]`);
  }
}
