// The chat page: wires the socket, the conversation and the page together.

import { announce, copyText } from "../console.js";
import { Conversation } from "./conversation.js";
import { Generation } from "./generation.js";
import { Follower } from "./scroll.js";
import { Settings } from "./settings.js";
import { ChatSocket } from "./socket.js";
import { AnswerView, userTurn } from "./turn.js";

const byId = (id) => document.getElementById(id);
const { socket: socketPath, tenant, user } = byId("chat").dataset;
const ui = {
  model: byId("model"), log: byId("log"), empty: byId("empty"), prompt: byId("prompt"), send: byId("send"),
  stop: byId("stop"), connection: byId("connection"), connectionText: byId("connection-text"), reconnect: byId("reconnect"),
};
const conversation = new Conversation(`${tenant}.${user}`);
const settings = new Settings();
const follower = new Follower(byId("log-scroller"), byId("to-latest"));
const socket = new ChatSocket(socketPath);
/** @type {Map<string, AnswerView>} by generation id */
const views = new Map();
let trouble = null;

const newId = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

function refresh() {
  const running = conversation.running.length > 0;
  ui.empty.hidden = conversation.exchanges.length > 0;
  ui.stop.hidden = !running;
  ui.send.hidden = running;
  ui.send.disabled = !ui.prompt.value.trim() || socket.state !== "open" || !ui.model.value;
  const exchanges = conversation.exchanges;
  exchanges.forEach(({ answer }, index) => {
    const retry = views.get(answer.id)?.element.querySelector('[data-action="retry"]');
    if (retry) retry.hidden = index !== exchanges.length - 1;
  });
}

function show(exchange) {
  const view = new AnswerView(exchange.answer, {
    onShown: () => follower.follow(),
    onRetry: () => retryLast(),
    onCopy: async (button) => {
      button.textContent = (await copyText(exchange.answer.text)) ? "Copied" : "Copying was refused";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    },
  });
  views.set(exchange.answer.id, view);
  ui.log.append(userTurn(exchange.question), view.element);
}

function ask(index) {
  const { answer } = conversation.exchanges[index];
  const params = settings.params();
  if (params === null) return false;
  return socket.send({
    type: "start", id: answer.id, model: answer.model, tenant, params,
    messages: conversation.messages(index, settings.system),
  });
}

function submit() {
  const question = ui.prompt.value.trim();
  if (!question || conversation.running.length || !ui.model.value) return;
  const exchange = { question, answer: new Generation({ id: newId(), model: ui.model.value }) };
  conversation.exchanges.push(exchange);
  if (!ask(conversation.exchanges.length - 1)) {
    conversation.exchanges.pop();
    return;
  }
  ui.prompt.value = "";
  show(exchange);
  conversation.keepNow();
  refresh();
  follower.jump();
}

function retryLast() {
  const index = conversation.exchanges.length - 1;
  const exchange = conversation.exchanges[index];
  if (!exchange?.answer.isOver || socket.state !== "open" || !ui.model.value) return;
  const old = views.get(exchange.answer.id);
  views.delete(exchange.answer.id);
  old.element.previousElementSibling.remove();
  old.element.remove();
  exchange.answer = new Generation({ id: newId(), model: ui.model.value });
  show(exchange);
  if (!ask(index)) exchange.answer.fail({ message: "The message could not be sent. Check the connection and retry." });
  views.get(exchange.answer.id).refresh(trouble);
  conversation.keepNow();
  refresh();
  follower.jump();
}

function stop() {
  for (const generation of conversation.running) socket.send({ type: "stop", id: generation.id });
}

function onFrame(frame) {
  const view = views.get(frame.id);
  if (frame.type === "error" && !frame.id) announce(frame.error.message);
  if (!view) return; // an answer of a conversation that was put away
  view.write(view.generation.apply(frame));
  conversation.keep();
  if (!view.generation.isOver) return;
  conversation.keepNow();
  announce(view.generation.error ? "The answer failed" : "The answer is complete");
  refresh();
  follower.follow();
}

/** After the connection is back: ask for the rest of each answer that was under way. */
function resumeAll() {
  for (const generation of conversation.running) {
    const frame = generation.resumeFrame(tenant);
    if (frame) socket.send(frame);
    else generation.fail({ message: "The connection was lost before the answer began. Try again." });
  }
  conversation.keepNow();
}

function onState({ state, delayMs }) {
  const seconds = Math.max(1, Math.round(delayMs / 1000));
  const words = {
    connecting: "Connecting", open: "Connected", waiting: `Connection lost, next try in ${seconds} s`, ended: "Your session has ended",
  };
  trouble = {
    connecting: "Connecting; what was written so far is kept", open: null,
    waiting: "The connection was lost; the answer goes on and will be fetched", ended: "Sign in again to go on",
  }[state];
  ui.connection.dataset.state = state;
  ui.connectionText.textContent = words[state];
  ui.reconnect.hidden = state !== "waiting" && state !== "ended";
  ui.reconnect.textContent = state === "ended" ? "Sign in" : "Try now";
  if (state === "open") resumeAll();
  for (const view of views.values()) view.refresh(trouble);
  refresh();
}

function initComposer() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  ui.prompt.addEventListener("input", refresh);
  ui.prompt.addEventListener("keydown", (event) => {
    // While an input method composes a character, Enter belongs to it.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!ui.send.disabled) submit();
  });
  ui.stop.addEventListener("click", () => {
    stop();
    ui.prompt.focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && conversation.running.length) stop();
  });
}

function initBar() {
  if (conversation.model && [...ui.model.options].some(({ value }) => value === conversation.model)) {
    ui.model.value = conversation.model;
  }
  const nameModel = () => {
    for (const element of document.querySelectorAll("[data-model-name]")) element.textContent = ui.model.value;
  };
  nameModel();
  ui.model.addEventListener("change", () => {
    conversation.model = ui.model.value;
    conversation.keep();
    nameModel();
  });
  byId("new-chat").addEventListener("click", () => {
    stop();
    conversation.clear();
    views.clear();
    ui.log.replaceChildren();
    refresh();
    ui.prompt.focus();
  });
  ui.reconnect.addEventListener("click", () => {
    if (socket.state === "ended") location.reload();
    else socket.retryNow();
  });
}

/** Without a model there is nothing to do here but to wait for one. */
async function awaitModel() {
  if (document.hidden) return;
  try {
    const page = new DOMParser().parseFromString(await (await fetch(location.href)).text(), "text/html");
    if (page.querySelector("#model option[value]:not([value=''])")) location.reload();
  } catch {
    // The next round tries again.
  }
}

socket.addEventListener("frame", (event) => onFrame(event.detail));
socket.addEventListener("state", (event) => onState(event.detail));
conversation.exchanges.forEach(show);
initComposer();
initBar();
refresh();
follower.jump();
socket.connect();
// The live rate moves also when no token comes, which is when it tells something; a wait to retry runs down.
setInterval(() => {
  for (const view of views.values()) if (view.isMoving) view.refresh(trouble);
}, 500);
if ("awaitsModel" in byId("chat").dataset) setInterval(awaitModel, 5000);
