// The chat: one conversation is shown, others wait in the list.

import { answer, KeyError, RefusedError, status } from "./api.js";
import { show, showDead } from "./machines.js";
import { render } from "./markdown.js";
import { loadConversations, loadSettings, newConversation, saveConversations, saveSettings } from "./store.js";

const find = (id) => document.getElementById(id);
const log = find("log"), question = find("question"), form = find("settings");
let conversations = loadConversations();
let current = conversations[0];
let model = null;
let writing = null;

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
  return node;
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
  showConversation();
}

function remove(conversation) {
  conversations = conversations.filter((one) => one !== conversation);
  if (!conversations.length) conversations = [newConversation()];
  saveConversations(conversations);
  choose(conversations.includes(current) ? current : conversations[0]);
}

/** Let the model go on with the conversation that is shown. Where the server refuses the request, `undo` is called. */
async function write(undo) {
  const own = current, controller = new AbortController();
  const turn = { role: "assistant", content: "" };
  writing = controller;
  say("writing …");
  showConversation();
  const node = turnNode(turn);
  log.append(node);
  try {
    let cut = false;
    for await (const { text, reason } of answer(model, own.turns, settings(), controller.signal)) {
      turn.content += text;
      cut ||= reason === "length";
      node.lastChild.replaceChildren(...render(turn.content));
      log.scrollTop = log.scrollHeight;
    }
    say(cut ? "the answer ends here: it has its greatest length, or the model's context is full" : "");
  } catch (error) {
    if (controller.signal.aborted) say("stopped");
    else say(error.message, true);
    if (error instanceof RefusedError) undo(own);
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
    if (own === current && !question.value) question.value = content;
  });
}

function again() {
  const before = [...current.turns];
  while (current.turns.at(-1)?.role === "assistant") current.turns.pop();
  if (current.turns.length && !writing) write((own) => (own.turns = before));
}

async function watch() {
  try {
    const answer = await status(settings().key);
    if (model === null) say("");
    model = answer.model;
    find("model").textContent = model;
    show(find("machines"), answer);
  } catch (error) {
    showDead(find("machines"), error instanceof KeyError ? "needs a key" : "cannot be reached");
    if (!writing) say(error.message, true);
    model = null;
  }
  setTimeout(watch, 2000);
}

find("ask").addEventListener("submit", ask);
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
form.addEventListener("change", () => saveSettings(settings()));
form.addEventListener("submit", (event) => event.preventDefault());
for (const [name, value] of Object.entries(loadSettings())) if (form.elements[name]) form.elements[name].value = value;
showConversation();
watch();
