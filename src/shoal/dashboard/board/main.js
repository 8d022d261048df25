// The dashboard: two views of the runs that the stream describes, as they are now or at an earlier time.

import { Classroom } from "./classroom.js";
import { Engineer } from "./engineer.js";
import { Owner } from "./owner.js";
import { Run } from "./runs.js";
import { ask, follow, Refused } from "./stream.js";
import { duration, number } from "./words.js";

const find = (id) => document.getElementById(id);
const asked = new URLSearchParams(location.hash.slice(1));
let token = asked.get("token") ?? sessionStorage.getItem("token") ?? "";
let shown = asked.get("view") ?? "";
let time = null;
let playing = 0;
let waiting = false;
const runs = [];
const classroom = new Classroom((name) => ask(`api/runs/0/samples/${encodeURIComponent(name)}`, token));
const owner = new Owner(asked.get("owner") ?? sessionStorage.getItem("owner") ?? "", say);
const engineer = new Engineer(find("engineer"), owner, (run) => ask(`api/runs/${run}/settings`, token).then((response) => response.json()));

/** Redraw at the next animation frame, once for all changes until then. */
function draw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    if (runs.length && runs.every((run) => run.status)) drawNow();
  });
}

function drawNow() {
  const views = runs.map((run) => run.at(time)), status = runs[0].status;
  if (!shown) choose(runs.length === 1 && runs[0].samples.length ? "class" : "engineer", false);
  find("name").textContent = runs.map((run) => (runs.length > 1 ? run.title : run.status.run || run.name)).join(" · ");
  document.title = `${find("name").textContent} · Shoal`;
  const good = ["starting", "running", "paused", "ending", "completed"].includes(status.state);
  find("state").textContent = time === null ? status.state : "as it was";
  find("state").className = `chip ${time !== null ? "" : good ? "good" : "bad"}`;
  const left = status.eta_s && time === null && status.state === "running" ? `, about ${duration(status.eta_s)} left` : "";
  find("progress-text").textContent = `${status.step_name} ${number(views[0].step)}${status.of ? ` of ${number(status.of)}` : ""}, ${duration(time ?? status.wall_s)}${left}`;
  find("progress").value = time === null ? (status.progress ?? 1) : status.of ? views[0].step / status.of : time / (length() || 1);
  showTime();
  showOwner(status.state);
  if (shown === "class") classroom.show(views[0]);
  else engineer.show(views);
}

/** Buttons for the owner, while there is a coordinator to receive the commands. */
function showOwner(state) {
  find("owner").hidden = !owner.allowed || runs.length > 1 || time !== null || !["running", "paused"].includes(state);
  find("pause").textContent = state === "paused" ? "Resume" : "Pause";
}

function say(text, bad = false) {
  find("said").textContent = text;
  find("said").className = bad ? "bad" : "";
  find("said").hidden = !text;
  clearTimeout(say.later);
  say.later = setTimeout(() => say(""), 8000);
}

function length() {
  return Math.max(1, ...runs.map((run) => run.length));
}

function showTime() {
  if (time === null) find("time").value = 1000;
  find("when").textContent = time === null ? "now" : duration(time);
  find("live").hidden = time === null;
  find("play").textContent = playing ? "❚❚" : "▶";
  find("play").setAttribute("aria-label", playing ? "Pause" : "Play");
}

function choose(view, redraw = true) {
  shown = view;
  find("class").hidden = view !== "class";
  find("engineer").hidden = view === "class";
  find("show-class").setAttribute("aria-pressed", String(view === "class"));
  find("show-engineer").setAttribute("aria-pressed", String(view !== "class"));
  if (redraw) draw();
}

function goTo(seconds) {
  time = seconds === null || seconds >= length() ? null : Math.max(0, seconds);
  if (time !== null) find("time").value = Math.round((1000 * time) / length());
  draw();
}

/** Show the run from here to its end, in about half a minute. */
function play() {
  if (playing) {
    clearInterval(playing);
    playing = 0;
    showTime();
    return;
  }
  if (time === null) goTo(0);
  playing = setInterval(() => {
    goTo((time ?? 0) + length() / 150);
    if (time === null) play();
  }, 200);
  showTime();
}

function onMessage(message) {
  while (runs.length < message.of) runs.push(new Run());
  runs[message.run].receive(message);
  draw();
}

function showTrouble(text) {
  find("trouble").textContent = text;
  find("trouble").hidden = !text;
}

async function watch() {
  try {
    find("key").hidden = true;
    owner.checkAccess().then(() => owner.invitation()).then((invitation) => {
      if (invitation) classroom.showInvitation(invitation);
      draw();
    });
    await follow(token, onMessage, showTrouble);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    sessionStorage.removeItem("token");
    showTrouble(token && `${error.message}: the program that shows this dashboard printed the right one`);
    find("state").textContent = "locked";
    find("key").hidden = false;
    find("token").focus();
  }
}

const KEYS = {
  c: () => choose("class"),
  e: () => choose("engineer"),
  l: () => goTo(null),
  " ": play,
  ArrowLeft: () => goTo((time ?? length()) - length() / 100),
  ArrowRight: () => goTo((time ?? length()) + length() / 100),
};
document.addEventListener("keydown", (event) => {
  const busy = event.target.closest(event.key === " " ? "input, select, textarea, button" : "input, select, textarea");
  if (busy || event.ctrlKey || event.metaKey || event.altKey) return;
  if (!KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});
find("show-class").addEventListener("click", KEYS.c);
find("show-engineer").addEventListener("click", KEYS.e);
find("live").addEventListener("click", KEYS.l);
find("play").addEventListener("click", play);
find("time").addEventListener("input", () => goTo((length() * Number(find("time").value)) / 1000));
find("key").addEventListener("submit", (event) => {
  event.preventDefault();
  token = find("token").value.trim();
  watch();
});
find("pause").addEventListener("click", () => owner.send(runs[0].status.state === "paused" ? "resume" : "pause"));
find("stop").addEventListener("click", () => owner.stop());
window.addEventListener("resize", draw);
for (const [name, value] of [["token", token], ["owner", owner.password]]) if (value) sessionStorage.setItem(name, value);
if (asked.has("token") || asked.has("owner")) history.replaceState(null, "", location.pathname);
if (shown) choose(shown, false);
watch();
