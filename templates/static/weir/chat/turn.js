// How one turn of the conversation looks.

import { Typewriter } from "./typewriter.js";

const ENDINGS = {
  length: "cut at the token limit",
  cancelled: "stopped",
  deadline: "ran out of time",
  budget_exceeded: "cut where a budget ended",
};

// Nobody watches a longer wait run down; and a budget that is raised meanwhile ends it.
const WAITED_FOR_S = 600;

const number = (value, digits = 0) =>
  new Intl.NumberFormat(undefined, { maximumFractionDigits: digits }).format(value);

/** Small costs with enough digits to tell them apart. */
const money = (microusd) =>
  new Intl.NumberFormat(undefined, { style: "currency", currency: "USD", maximumSignificantDigits: 3 }).format(microusd / 1e6);

function fromTemplate(id) {
  return document.getElementById(id).content.firstElementChild.cloneNode(true);
}

/**
 * A question, with the way to its other versions.
 * @param {{place: number, count: number, draft?: string, onStep: (by: number) => void, onEdit: (text: string) => void,
 *   onDraft: (text: string|null) => void}} options `draft`: a change that was begun; null: none is any more
 */
export function userTurn(text, { place, count, draft, onStep, onEdit, onDraft }) {
  const element = fromTemplate("user-turn");
  const part = (name) => element.querySelector(`[data-${name}]`);
  part("text").textContent = text;
  part("branches").hidden = count < 2;
  part("place").textContent = `${place + 1} of ${count}`;
  part("earlier").disabled = place === 0;
  part("later").disabled = place === count - 1;
  part("earlier").addEventListener("click", () => onStep(-1));
  part("later").addEventListener("click", () => onStep(1));
  const [form, box, edit] = [part("edit-form"), part("edit-box"), part("edit")];
  const show = (isEditing) => {
    form.hidden = !isEditing;
    part("shown").hidden = isEditing;
    edit.hidden = isEditing;
  };
  const leave = () => {
    onDraft(null);
    show(false);
    edit.focus();
  };
  if (draft !== undefined) {
    box.value = draft;
    show(true);
  }
  edit.addEventListener("click", () => {
    box.value = text;
    show(true);
    box.focus();
  });
  box.addEventListener("input", () => onDraft(box.value));
  part("keep").addEventListener("click", leave);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (box.value.trim()) onEdit(box.value.trim());
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      leave();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === box) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  return element;
}

/** The view of one answer. */
export class AnswerView {
  #writer;
  #waiting = false;

  constructor(generation, { onShown, onRetry, onCopy, onChoose = null, isChosen = true }) {
    this.generation = generation;
    this.element = fromTemplate("assistant-turn");
    this.#part("name").textContent = generation.tier ? `${generation.model} · ${generation.tier}` : generation.model;
    this.#writer = new Typewriter(this.#part("text"), onShown);
    this.#button("retry").addEventListener("click", onRetry);
    this.#button("copy").addEventListener("click", () => onCopy(this.#button("copy")));
    const choose = this.#button("choose");
    choose.hidden = !onChoose || isChosen;
    if (onChoose) choose.addEventListener("click", onChoose);
    this.element.classList.toggle("passed-over", !isChosen);
    this.#writer.write(generation.text);
    this.#writer.flush(generation.isOver);
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
    if (generation.isOver) this.#writer.flush(true);
    this.element.setAttribute("aria-busy", String(!generation.isOver));
    this.#refreshStatus(connection);
    this.#refreshError();
    this.#refreshRetry();
    const stats = this.#stats();
    this.#part("stats").textContent = stats;
    this.#part("foot").hidden = !generation.isOver && !stats;
    this.element.querySelector(".turn-actions").hidden = !generation.isOver;
    this.#button("copy").hidden = !generation.text;
    this.#part("request").hidden = !generation.requestId;
    if (generation.requestId) this.#part("request").href = `../requests/${encodeURIComponent(generation.requestId)}/`;
  }

  #refreshRetry() {
    const button = this.#button("retry");
    const seconds = Math.ceil((this.generation.retryAt - Date.now()) / 1000);
    this.#waiting = seconds > 0 && seconds <= WAITED_FOR_S;
    button.toggleAttribute("data-waits", this.#waiting);
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
    box.append(title, error.message || "Something went wrong.");
  }

  #stats() {
    const { usage, finishReason, isOver, nextSeq, text } = this.generation;
    const parts = [];
    const rate = isOver && usage ? usage.tokens_per_second : this.generation.liveRate();
    if (rate) parts.push(`${number(rate, rate < 10 ? 1 : 0)} tokens/s`);
    if (usage?.ttft_ms != null) parts.push(`first token after ${number(usage.ttft_ms)} ms`);
    const tokens = usage?.completion_tokens ?? nextSeq;
    if (tokens) parts.push(`${number(tokens)} ${tokens === 1 ? "token" : "tokens"}`);
    if (usage?.cost_microusd != null) parts.push(money(usage.cost_microusd));
    if (isOver && ENDINGS[finishReason]) parts.push(ENDINGS[finishReason]);
    if (isOver && finishReason === "stop" && !text) parts.push("the model had nothing to say");
    return parts.join(" · ");
  }

  #button(action) {
    return this.element.querySelector(`[data-action="${action}"]`);
  }

  #part(name) {
    return this.element.querySelector(`[data-${name}]`);
  }
}
