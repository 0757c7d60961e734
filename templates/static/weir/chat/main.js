// The chat page: wires the socket, the conversation and the page together.

import { announce, copyText } from "../console.js";
import { Archive } from "./archive.js";
import { Conversation, TabMemory, newId } from "./conversation.js";
import { History } from "./history.js";
import { Follower } from "./scroll.js";
import { Settings } from "./settings.js";
import { ChatSocket } from "./socket.js";
import { AnswerView, userTurn } from "./turn.js";

const byId = (id) => document.getElementById(id);
const { socket: socketPath, tenant, user, archive: archivePath, token } = byId("chat").dataset;
const ui = {
  model: byId("model"), log: byId("log"), empty: byId("empty"), prompt: byId("prompt"), send: byId("send"),
  stop: byId("stop"), connection: byId("connection"), connectionText: byId("connection-text"), reconnect: byId("reconnect"),
  unsaved: byId("unsaved"),
};
let conversation = new Conversation();
const memory = new TabMemory(`${tenant}.${user}`, () => ({ conversation, draft: ui.prompt.value, edits: Object.fromEntries(edits) }));
/** Questions whose change was begun: the exchange's id, and what is written so far. */
const edits = new Map();
const settings = new Settings(ui.model, onSettings);
const follower = new Follower(byId("log-scroller"), byId("to-latest"));
const socket = new ChatSocket(socketPath);
const archive = new Archive(archivePath, token);
const history = new History(archive, {
  open: (id) => void open(id),
  removed: (id) => { if (id === conversation.id) lookAt(new Conversation()); },
  renamed: (id, title) => { if (id === conversation.id) conversation.title = title; },
});
/** @type {Map<string, AnswerView>} the answers to be seen, by generation id */
const views = new Map();
/** @type {Map<string, {conversation: Conversation, exchange: object}>} every answer under way, also of conversations put away */
const underWay = new Map();
let trouble = null;

const mayAsk = () => !conversation.running.length && socket.state === "open" && Boolean(ui.model.value);

function refresh() {
  const running = conversation.running.length > 0;
  ui.empty.hidden = conversation.exchanges.size > 0;
  ui.stop.hidden = !running;
  ui.send.hidden = running;
  ui.send.disabled = !ui.prompt.value.trim() || !mayAsk();
  for (const button of ui.log.querySelectorAll("[data-asks]")) button.disabled = !mayAsk() || "waits" in button.dataset;
}

/** Draws the branch that is looked at. */
function draw() {
  views.clear();
  ui.log.replaceChildren();
  for (const exchange of conversation.path()) {
    const beside = conversation.beside(exchange);
    const alternatives = conversation.alternatives(exchange);
    const place = alternatives.findIndex(({ id, pair }) => id === exchange.id || (pair && pair === exchange.pair));
    ui.log.append(userTurn(exchange.question, {
      place,
      count: alternatives.length,
      onStep: (by) => step(alternatives[place + by]),
      draft: edits.get(exchange.id),
      onEdit: (question) => {
        edits.delete(exchange.id);
        if (!ask({ parent: exchange.parent, question })) edits.set(exchange.id, question);
      },
      onDraft: (text) => {
        if (text === null) edits.delete(exchange.id);
        else edits.set(exchange.id, text);
        memory.keep();
      },
    }));
    const answers = beside.map((one) => answerView(one, exchange, beside.length > 1).element);
    if (answers.length > 1) ui.log.append(sideBySide(answers));
    else ui.log.append(...answers);
  }
  for (const view of views.values()) view.refresh(trouble);
  refresh();
}

function answerView(exchange, chosen, isPair) {
  const view = new AnswerView(exchange.answer, {
    onShown: () => follower.follow(),
    onRetry: () => ask({ parent: exchange.parent, question: exchange.question }),
    onCopy: async (button) => {
      button.textContent = (await copyText(exchange.answer.text)) ? "Copied" : "Copying was refused";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    },
    onChoose: isPair ? () => step(exchange) : null,
    isChosen: exchange === chosen,
  });
  views.set(exchange.id, view);
  return view;
}

function sideBySide(answers) {
  const item = document.createElement("li");
  const list = document.createElement("ol");
  item.className = "pair";
  list.setAttribute("aria-label", "Answers side by side");
  list.append(...answers);
  item.append(list);
  return item;
}

function step(exchange) {
  conversation.lookAt(exchange);
  draw();
  follower.follow();
  memory.keepNow();
  archive.look(conversation).catch(() => {}); // what is looked at is a convenience; it is saved with the next answer
}

/** Asks one model, or two side by side. */
function ask({ parent, question }) {
  const params = settings.params();
  if (params === null || !mayAsk()) return false;
  conversation.settings = settings.values;
  const models = settings.other ? [ui.model.value, settings.other] : [ui.model.value];
  const pair = models.length > 1 ? newId() : null;
  const before = conversation.leaf;
  const exchanges = models.map((model) =>
    conversation.add({ parent, question, model, tier: settings.tier, pair }));
  conversation.leaf = exchanges[0].id;
  for (const exchange of exchanges) {
    const sent = socket.send({
      type: "start", id: exchange.id, model: exchange.answer.model, tenant, params,
      ...(settings.tier && { tier: settings.tier }),
      messages: conversation.messages(exchange, settings.system),
    });
    if (sent) underWay.set(exchange.id, { conversation, exchange });
    else conversation.remove(exchange);
  }
  if (!conversation.running.length) {
    conversation.leaf = before;
    return false;
  }
  draw();
  nameAddress();
  memory.keepNow();
  follower.jump();
  return true;
}

function submit() {
  const question = ui.prompt.value.trim();
  if (question && ask({ parent: conversation.leaf, question })) {
    ui.prompt.value = "";
    memory.keepNow();
    refresh();
  }
}

function stop() {
  for (const { id } of conversation.running) socket.send({ type: "stop", id });
}

function onFrame(frame) {
  // What could not be stopped any more has ended: the page shows that already.
  if (frame.type === "error" && !frame.id && frame.error.code !== "generation_not_found") announce(frame.error.message);
  const found = underWay.get(frame.id);
  if (!found) return; // an answer of a conversation that was deleted
  const { exchange } = found;
  const text = exchange.answer.apply(frame);
  views.get(frame.id)?.write(text);
  memory.keep();
  if (frame.type === "started") void save(found);
  if (exchange.answer.isOver) onOver(found);
}

function onOver(found) {
  underWay.delete(found.exchange.id);
  void save(found);
  if (found.conversation !== conversation) return;
  memory.keepNow();
  const { error, finishReason } = found.exchange.answer;
  announce(error ? "The answer failed" : finishReason === "cancelled" ? "The answer is stopped" : "The answer is complete");
  refresh();
  follower.follow();
}

async function save({ conversation: which, exchange }) {
  const isNew = which.exchanges.size <= 2;
  const allKept = await archive.save(which, exchange);
  ui.unsaved.hidden = allKept;
  if (allKept && isNew) void history.refresh();
}

/** After the connection is back: ask for the rest of each answer that was under way. */
function resumeAll() {
  for (const found of [...underWay.values()]) {
    const frame = found.exchange.answer.resumeFrame(tenant);
    if (frame) socket.send(frame);
    else {
      found.exchange.answer.fail({ message: "The connection was lost before the answer began. Try again." });
      onOver(found);
    }
  }
  void archive.saveRest().then((allKept) => { ui.unsaved.hidden = allKept; });
}

/** The page's address leads back to the conversation, once there is one. */
function nameAddress() {
  const address = new URL(location.href);
  if (conversation.exchanges.size) address.searchParams.set("c", conversation.id);
  else address.searchParams.delete("c");
  window.history.replaceState(null, "", address);
}

const KEEP_SETTINGS_AFTER_MS = 600;
let settingsTimer = 0;

/** Kept with the conversation, once the server knows of it; not at once, for a person types. */
function onSettings() {
  conversation.settings = settings.values;
  memory.keep();
  clearTimeout(settingsTimer);
  settingsTimer = setTimeout(keepSettings, KEEP_SETTINGS_AFTER_MS);
}

function keepSettings() {
  if (!settingsTimer) return;
  clearTimeout(settingsTimer);
  settingsTimer = 0;
  // What fails here is kept with the next answer.
  if (conversation.isKept) archive.configure(conversation).catch(() => {});
}

function lookAt(next) {
  keepSettings();
  conversation = next;
  settings.show(next.settings);
  next.settings ??= settings.values;
  for (const exchange of next.running) underWay.set(exchange.id, { conversation: next, exchange });
  nameAddress();
  history.current = next.id;
  draw();
  memory.keepNow();
  follower.jump();
}

async function open(id) {
  const known = [...underWay.values()].find((found) => found.conversation.id === id)?.conversation;
  if (known) {
    lookAt(known);
    return;
  }
  try {
    lookAt(new Conversation(await archive.open(id)));
  } catch {
    announce("That conversation can’t be opened");
    byId("history-note").textContent = "That conversation can’t be opened.";
    byId("history-note").hidden = false;
    return;
  }
  if (socket.state === "open") resumeAll();
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
  const growsByItself = CSS.supports("field-sizing", "content");
  ui.prompt.addEventListener("input", () => {
    if (!growsByItself) ui.prompt.rows = Math.min(12, ui.prompt.value.split("\n").length);
    memory.keep();
    refresh();
  });
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
    if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (conversation.running.length) stop();
  });
}

function initBar() {
  byId("new-chat").addEventListener("click", () => {
    lookAt(new Conversation());
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

function begin() {
  const kept = memory.recall();
  const asked = new URL(location.href).searchParams.get("c")?.replaceAll("-", "").toLowerCase();
  const isAsked = /^[0-9a-f]{32}$/.test(asked ?? "");
  initBar();
  // A browser may have filled the box by itself already.
  ui.prompt.value ||= kept.draft ?? "";
  ui.prompt.setSelectionRange(ui.prompt.value.length, ui.prompt.value.length);
  for (const [id, text] of Object.entries(kept.edits ?? {})) edits.set(id, text);
  // What this tab kept has the text of an answer under way: it goes before what the server keeps.
  if (kept.conversation && (!isAsked || kept.conversation.id === asked)) lookAt(new Conversation(kept.conversation));
  else if (isAsked) void open(asked);
  else lookAt(conversation);
}

socket.addEventListener("frame", (event) => onFrame(event.detail));
socket.addEventListener("state", (event) => onState(event.detail));
addEventListener("pagehide", keepSettings);
initComposer();
begin();
void history.refresh();
socket.connect();
// The live rate moves also when no token comes, which is when it tells something; a wait to retry runs down.
setInterval(() => {
  if (!document.hidden) for (const view of views.values()) if (view.isMoving) view.refresh(trouble);
}, 500);
if ("awaitsModel" in byId("chat").dataset) setInterval(awaitModel, 5000);
