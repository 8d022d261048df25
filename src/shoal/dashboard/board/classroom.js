// One screen in large type: what the model makes, how well it does, and who helps.

import { code } from "./charts.js";
import { curves } from "./curves.js";
import { clock, duration, fill, isAway, make, number, percent, spread } from "./words.js";

const find = (id) => document.getElementById(id);
const share = (value) => `${(100 * value).toFixed(1)} %`;
const CONTEST = "discriminator_accuracy";
const HEADLINES = [["accuracy", share, "right"], [CONTEST, share, "of the time the critic is right"], ["score", number, "score"], ["perplexity", number, "perplexity"]];
const LOSSES = ["loss", "generator_loss", "policy_loss"];
const STRIP = 5;
const GOING_ON = ["starting", "running", "paused", "ending", "not here", "running or killed", "waiting for the database"];

export class Classroom {
  constructor(fetchSample) {
    this.fetchSample = fetchSample;
    this.pictures = new Map();
    this.shown = "";
    this.invitation = {};
    this.over = false;
  }

  show(view) {
    const samples = view.samples;
    this.over = view.time === null && !GOING_ON.includes(view.run.status?.state);
    this.offerPlaces();
    find("class").classList.toggle("plain", !samples.length);
    find("class-sample-card").hidden = !samples.length;
    if (samples.length) this.showSamples(samples);
    this.showFigures(view);
    this.showWorkers(view);
    const events = view.events.slice(-30).reverse();
    fill(find("class-events"), events.length ? events.map(eventRow) : [make("li", "note", "nothing yet")]);
  }

  /** The newest picture, and a few from the beginning until then. A picture is fetched once. */
  showSamples(samples) {
    const newest = samples.at(-1), names = samples.map((one) => one.name).join(" ");
    if (names === this.shown) return;
    this.shown = names;
    find("class-sample-title").textContent = newest.step ? `What it makes after ${number(newest.step)} steps` : "What it makes before it has learned";
    const isPicture = newest.name.endsWith(".png");
    find("class-picture").hidden = !isPicture;
    find("class-text").hidden = isPicture;
    if (!isPicture) {
      this.fetchSample(newest.name).then((response) => response.text()).then((text) => {
        find("class-text").textContent = text;
      }, () => {});
      find("class-strip").replaceChildren();
      return;
    }
    this.draw(find("class-picture"), newest.name);
    const several = samples.length > 2 ? spread(samples, STRIP) : [];
    find("class-strip").replaceChildren(...several.map((one) => {
      const canvas = make("canvas");
      canvas.width = canvas.height = 8;
      this.draw(canvas, one.name);
      return make("li", "", canvas, `step ${number(one.step)}`);
    }));
  }

  async draw(canvas, name) {
    if (!this.pictures.has(name)) {
      this.pictures.set(name, this.fetchSample(name).then((response) => response.blob()).then((blob) => createImageBitmap(blob)));
    }
    try {
      const picture = await this.pictures.get(name);
      canvas.width = picture.width;
      canvas.height = picture.height;
      canvas.getContext("2d").drawImage(picture, 0, 0);
    } catch {
      this.pictures.delete(name);
    }
  }

  showFigures(view) {
    const last = view.evals.at(-1) ?? {}, headline = HEADLINES.find(([name]) => typeof last[name] === "number");
    const loss = LOSSES.find((name) => view.names.includes(name)) ?? view.names.find((name) => name.endsWith("loss")) ?? "loss";
    const train = view.points(view.train, loss, "step"), evals = view.points(view.evals, loss, "step");
    find("class-figure").textContent = !headline ? "How wrong it still is" : headline[0] === CONTEST ? "Painter against critic" : "How well it does";
    const now = headline ? headline[1](last[headline[0]]) : train.length ? number(train.at(-1)[1]) : "";
    fill(find("class-big"), now ? [now, make("small", "", ` ${headline ? headline[2] : loss.replaceAll("_", " ")}`)] : []);
    const other = LOSSES.includes(loss) && view.names.includes("discriminator_loss") ? view.points(view.train, "discriminator_loss", "step") : [];
    const series = [
      { name: other.length ? "painter's loss" : "loss while learning", points: train, place: 0 },
      { name: "critic's loss", points: other, place: 2 },
      { name: other.length ? "painter's loss, judged on unseen data" : "loss on unseen data", points: evals, place: 1 },
    ];
    const height = Math.max(180, Math.min(460, window.innerHeight * 0.36));
    curves(find("class-curve"), { series, xName: view.run.status?.step_name ?? "step", height, label: loss });
  }

  showWorkers(view) {
    const ledger = view.run.ledger, counted = view.time === null && ledger?.contributions ? ledger.samples_of : null;
    const rows = view.workers.map((row) => ({ ...row, did: (counted ? counted[row.worker] : row.samples || row.accepted) || 0 }));
    const whole = rows.reduce((sum, row) => sum + row.did, 0) || 1;
    const count = this.over ? rows.length : rows.filter((row) => !isAway(row)).length;
    find("class-workers-title").textContent = `${count} ${count === 1 ? "laptop" : "laptops"} ${this.over ? "helped" : count === 1 ? "helps" : "help"}`;
    find("class-workers-card").hidden = !rows.length && !view.run.status?.strategy;
    rows.sort((one, other) => other.did - one.did || (one.worker < other.worker ? -1 : 1));
    fill(find("class-workers"), rows.slice(0, 60).map((row) => laptop(this.over ? { ...row, state: "" } : row, row.did / whole)));
  }

  /** Show how to join while the run is not over. */
  offerPlaces() {
    const invited = Boolean(this.invitation.line) && !this.over;
    find("class").classList.toggle("uninvited", !invited);
    find("class-join").hidden = !invited;
  }

  showInvitation(invitation) {
    this.invitation = invitation;
    this.offerPlaces();
    find("class-line").textContent = invitation.line;
    find("class-token").hidden = !invitation.token;
    find("class-token").querySelector("strong").textContent = invitation.token ?? "";
    code(find("class-code"), invitation.code ?? []);
  }
}

function laptop(row, share) {
  const gone = isAway(row);
  const meter = make("meter");
  meter.max = 1;
  meter.value = share;
  meter.setAttribute("aria-label", `share of ${row.worker}`);
  const text = row.state ? `${row.state}, ${percent(share)}` : percent(share);
  const line = make("div", gone ? "row gone" : "row", make("span", "", row.worker), make("span", "", text));
  return make("li", "", line, meter);
}

/** An event as a sentence. */
export function eventRow(event) {
  const time = make("time", "", typeof event.at === "number" ? clock(event.at) : duration(event.wall_s));
  const text = String(event.text ?? "");
  return make("li", text.startsWith("warning") ? "bad" : "", time, sentence(text));
}

function sentence(text) {
  const plain = text.replace(/^warning: /, "");
  const first = /^[a-z]+ /.test(plain) && !/^\S+ (joined|left|is |came|has |cannot)| (joined|left)$/.test(plain) ? plain.charAt(0).toUpperCase() + plain.slice(1) : plain;
  return /[.!?:…]$/.test(first) ? first : `${first}.`;
}
