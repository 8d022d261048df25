// The chat: one conversation is shown, others wait in the list.

import { answer, KeyError, RefusedError, status } from "./api.js";
import { copyButton } from "./copy.js";
import { showDefaults } from "./defaults.js";
import { show, showDead } from "./machines.js";
import { render } from "./markdown.js";
import { chosenModel, forgetModel, showModels } from "./models.js";
import { loadConversations, loadSettings, newConversation, saveConversations, saveSettings } from "./store.js";

const find = (id) => document.getElementById(id);
const NEAR_PX = 40; // so near to its end, the conversation follows the answer that is written
const log = find("log"), question = find("question"), form = find("settings");
let conversations = loadConversations();
let current = conversations[0];
let model = null;
let loaded = true;
let writing = null;
let defaults = null;

function settings() {
  return Object.fromEntries(new FormData(form));
}

function say(text, bad = false) {
  find("state").textContent = text;
  find("state").className = bad ? "bad" : "";
}

function turnNode(turn) {
  const node = document.createElement("article");
  node.className = `turn ${turn.role}`;
  const who = document.createElement("p");
  who.className = "who";
  who.textContent = turn.role === "user" ? "You" : "Answer";
  const text = document.createElement("div");
  if (turn.role === "user") text.textContent = turn.content;
  else text.replaceChildren(...render(turn.content));
  node.append(who, text);
  if (turn.role === "assistant") node.append(...below(turn));
  return node;
}

/** What stands below an answer: whether the user stopped it, and a button that copies it. */
function below(turn) {
  const note = document.createElement("p");
  note.className = "ended";
  note.textContent = "You stopped the answer here.";
  return [...(turn.stopped ? [note] : []), copyButton("Copy the answer", () => turn.content)];
}

/** Show the text of an answer. Parts that did not change stay, so that a selection and a button in them do, too. */
function showText(box, text) {
  const nodes = render(text), known = [...box.childNodes];
  const same = nodes.findIndex((node, at) => !known[at]?.isEqualNode(node));
  if (same < 0 && known.length === nodes.length) return;
  const from = same < 0 ? nodes.length : same;
  known.slice(from).forEach((node) => node.remove());
  box.append(...nodes.slice(from));
}

/** On a narrow screen: show one of the panels beside the chat, or none. */
function openPanel(button) {
  for (const one of document.querySelectorAll(".opens")) {
    const open = one === button && one.getAttribute("aria-expanded") === "false";
    one.setAttribute("aria-expanded", String(open));
    find(one.getAttribute("aria-controls")).classList.toggle("open", open);
  }
}

function showConversation() {
  log.replaceChildren(...current.turns.map(turnNode));
  log.scrollTop = log.scrollHeight;
  find("conversations").replaceChildren(...conversations.map(entry));
  find("again").disabled = writing !== null || !current.turns.some((turn) => turn.role === "user");
  find("stop").hidden = writing === null;
  find("send").disabled = writing !== null;
}

function entry(conversation) {
  const node = document.createElement("li"), open = document.createElement("button"), drop = document.createElement("button");
  open.type = drop.type = "button";
  const title = conversation.turns[0]?.content.slice(0, 40) || "empty";
  open.textContent = title;
  open.setAttribute("aria-current", String(conversation === current));
  open.onclick = () => choose(conversation);
  drop.textContent = "×";
  drop.setAttribute("aria-label", `Delete the conversation “${title}”`);
  drop.onclick = () => remove(conversation);
  node.append(open, drop);
  return node;
}

function choose(conversation) {
  writing?.abort();
  current = conversation;
  openPanel(null);
  showConversation();
}

function remove(conversation) {
  conversations = conversations.filter((one) => one !== conversation);
  if (!conversations.length) conversations = [newConversation()];
  saveConversations(conversations);
  choose(conversations.includes(current) ? current : conversations[0]);
}

/** Let the model go on with the conversation that is shown. Where nothing comes, `undo` is called. */
async function write(undo) {
  const own = current, controller = new AbortController();
  const turn = { role: "assistant", content: "" };
  writing = controller;
  say(loaded ? "writing …" : `loading ${model} …`);
  showConversation();
  const node = turnNode(turn);
  log.append(node);
  try {
    let cut = false;
    for await (const { text, reason } of answer(model, own.turns, settings(), controller.signal)) {
      if (!turn.content && text) say("writing …");
      turn.content += text;
      cut ||= reason === "length";
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
      showText(node.children[1], turn.content);
      if (atEnd) log.scrollTop = log.scrollHeight;
    }
    say(cut ? "the answer ends here: it has its greatest length, or the model's context is full" : "");
  } catch (error) {
    turn.stopped = controller.signal.aborted;
    if (turn.stopped) say(turn.content ? "stopped" : "stopped before the first word");
    else say(error.message, true);
    // Without an answer, the next question would follow this one: chat templates refuse that
    if (error instanceof RefusedError || (!turn.content && own === current)) undo(own);
  }
  if (turn.content) own.turns.push(turn);
  saveConversations(conversations);
  if (writing === controller) writing = null;
  showConversation();
}

function ask(event) {
  event.preventDefault();
  const content = question.value.trim();
  if (!content || writing || !model) return;
  question.value = "";
  current.turns.push({ role: "user", content });
  saveConversations(conversations);
  write((own) => {
    own.turns.pop(); // else every later question would be refused with it
    if (own === current) question.value = question.value ? `${content}\n${question.value}` : content;
  });
}

function again() {
  const before = [...current.turns];
  while (current.turns.at(-1)?.role === "assistant") current.turns.pop();
  if (current.turns.length && !writing) write((own) => (own.turns = before));
}

async function look() {
  try {
    const asked = chosenModel(), answer = await status(settings().key, asked);
    if (asked !== chosenModel()) return;
    if (model === null) say("");
    model = answer.model;
    loaded = answer.models.find(({ id }) => id === model).loaded;
    showModels(answer);
    defaults = answer.defaults;
    showDefaults(form, defaults);
    show(find("machines"), answer);
  } catch (error) {
    if (error instanceof RefusedError && chosenModel()) return forgetModel();
    showDead(find("machines"), error instanceof KeyError ? "needs a key" : "cannot be reached");
    if (!writing) say(error.message, true);
    model = null;
  }
}

async function watch() {
  await look();
  setTimeout(watch, 2000);
}

find("ask").addEventListener("submit", ask);
find("models").addEventListener("chosen", () => {
  model = null; // a question waits until the state of the chosen model is known
  look();
});
find("stop").addEventListener("click", () => writing?.abort());
find("again").addEventListener("click", again);
find("new").addEventListener("click", () => {
  conversations.unshift(newConversation());
  choose(conversations[0]);
  question.focus();
});
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") writing?.abort();
});
for (const button of document.querySelectorAll(".opens")) button.addEventListener("click", () => openPanel(button));
form.addEventListener("change", () => {
  saveSettings(settings());
  if (defaults) showDefaults(form, defaults);
});
form.addEventListener("submit", (event) => event.preventDefault());
for (const [name, value] of Object.entries(loadSettings())) if (form.elements[name]) form.elements[name].value = value;
showConversation();
watch();
