// All data of a run's folder, as cards. A card without data is hidden.

import { bars, shades, timeline } from "./charts.js";
import { eventRow } from "./classroom.js";
import { curves } from "./curves.js";
import { far } from "./svg.js";
import { bytes, clock, counted, duration, fill, fillRows, followScrolling, isAway, make, number, percent, spread } from "./words.js";

const COLUMNS = [
  ["worker", "worker"], ["state", "state"], ["since", "since", clock], ["heard_s", "last message", (value) => (typeof value === "number" ? `${duration(value)} ago` : "–")],
  ["address", "address"], ["rate", "updates/s", number], ["lag", "lag", number], ["accepted", "accepted", number], ["rejected", "rejected", number],
  ["why", "why", counted],
  ["samples", "samples", number], ["bytes", "received", bytes], ["computing_s", "computing", duration], ["waiting_s", "waiting", duration],
  ["sending_s", "sending", duration], ["data_s", "data", duration], ["forward_backward_s", "forward + backward", duration],
  ["communication_s", "communication", duration], ["optimizer_s", "optimizer", duration],
  ["tokens_per_s", "tokens/s", number], ["mfu", "utilisation", percent], ["memory_bytes", "memory", bytes], ["task", "task"], ["system", "system"],
];
const ROLLOUTS = /^(score|reward|kl|kl_coefficient|entropy|clip_fraction|explained_variance|answer_length|distinct_share|policy_loss|value_loss|.*_p\d\d)$/;
const NORMS = /(gradient_norm$|^gradients\/|skipped|anomal|grad_)/;
/** Places of the seconds computed, waited and sent in a worker's moment; and shares that look the same in a row of some pixels. */
const PARTS = [1, 2, 3], ALIKE = 0.03;
const MOST_ROWS = 40, MOST_CURVES = 6, MOST_SHOWN = 500;

export class Engineer {
  constructor(root, owner, settingsOf) {
    this.root = root;
    this.owner = owner;
    this.settingsOf = settingsOf;
    this.by = "step";
    this.figure = "loss";
    this.sort = ["worker", 1];
    this.cards = new Map();
    this.settings = null;
    this.near = new IntersectionObserver((seen) => this.notice(seen), { rootMargin: "50% 0px" });
  }

  /** Cards have been scrolled near to the visible part of the page, or far from it. */
  notice(seen) {
    let came = false;
    for (const { target, isIntersecting } of seen) {
      const body = target.lastElementChild;
      came ||= isIntersecting && far.has(body);
      if (isIntersecting || target.hidden) far.delete(body);
      else far.add(body);
    }
    if (came && this.views) this.show(this.views);
  }

  /** The card of a name, made at its first use, then shown or hidden. */
  card(name, title, shown = true, wide = false) {
    if (!this.cards.has(name)) {
      const tools = make("div", "tools", make("h2", "", title)), body = make("div");
      const node = make("section", wide ? "card wide" : "card", tools, body);
      node.setAttribute("aria-label", title);
      this.root.append(node);
      this.cards.set(name, { node, tools, body, fresh: true });
      this.near.observe(node);
    }
    const card = this.cards.get(name);
    card.node.hidden = !shown;
    return card;
  }

  /** Whether a card is far from the visible part of the page, or has never had data: then its figures are not computed for each redraw. */
  rests(name) {
    const card = this.cards.get(name);
    return Boolean(card) && (far.has(card.body) || (card.node.hidden && this.calm));
  }

  show(views) {
    const [view] = views;
    this.calm = this.shown === view.run.records.length;  // nothing has come in since the last picture: only the time is another one
    this.shown = view.run.records.length;
    this.views = views;
    this.showLoss(views);
    this.showWorkers(view);
    this.showTimeline(view);
    this.showTraffic(view);
    this.showRule(view);
    this.showNorms(view);
    this.showExperts(view);
    this.showRollouts(view);
    this.showPrivacy(view);
    this.showAudit(view);
    this.showCheckpoints(view);
    this.showEvents(view);
    this.showSettings(0);
  }

  showLoss(views) {
    const card = this.card("loss", "Figures", true, true);
    if (card.fresh) this.prepareLoss(card);
    const names = [...new Set(views.flatMap((view) => view.names))].sort(byImportance);
    if (!names.includes(this.figure) && names.length) this.figure = names[0];
    fill(card.select, names.map((name) => option(name)));
    card.select.value = this.figure;
    const several = views.length > 1;
    const series = views.flatMap((view, place) => [
      { name: several ? `${view.run.title} train` : "train", points: view.points(view.train, this.figure, this.by), place },
      { name: several ? `${view.run.title} eval` : "eval", points: view.points(view.evals, this.figure, this.by), place: several ? place : 1, dashed: several },
    ]);
    const marks = several || this.by !== "step" ? [] : views[0].checkpoints.map((one) => one.step);
    drawCurves(card, { series, xName: this.by === "step" ? "step" : "seconds", height: 300, label: this.figure, marks });
  }

  prepareLoss(card) {
    card.fresh = false;
    card.select = make("select");
    card.select.setAttribute("aria-label", "Which figure");
    card.select.addEventListener("change", () => this.again(() => { this.figure = card.select.value; }));
    const buttons = [["step", "by step"], ["wall_s", "by time"]].map(([by, text]) => {
      const button = make("button", "", text);
      button.type = "button";
      button.setAttribute("aria-pressed", String(by === this.by));
      button.addEventListener("click", () => this.again(() => {
        this.by = by;
        buttons.forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
      }));
      return button;
    });
    card.tools.append(card.select, ...buttons);
  }

  again(change) {
    change();
    far.delete(this.card("loss", "Figures").body);  // redraw it at once, even if it is scrolled out of view
    if (this.views) this.showLoss(this.views);
  }

  showWorkers(view) {
    const rows = view.workers.map((row) => (isAway(row) ? { ...row, heard_s: null } : row)), status = view.run.status ?? {};
    const card = this.card("workers", "Workers", rows.length > 0 || Boolean(status.strategy), true);
    if (card.table && far.has(card.body)) return;
    const shown = COLUMNS.filter(([key]) => rows.some((row) => row[key] !== undefined && row[key] !== "" && row[key] !== null));
    const [key, sign] = this.sort;
    rows.sort((one, other) => sign * compare(one[key], other[key]));
    const left = rows.length - MOST_SHOWN + (view.counts.members_left_out ?? 0);
    const acts = this.owner.allowed && view.time === null && this.views.length === 1 && ["running", "paused"].includes(status.state);
    const cellsOf = (row) => {
      const cells = shown.map(([name, , text]) => [text ? text(row[name]) : String(row[name] ?? "–"), name === "why" ? "bad" : ""]);
      if (acts) cells.splice(1, 0, isAway(row) ? ["", ""] : () => this.owner.evictButton(row.worker));
      return cells;
    };
    const body = rows.slice(0, MOST_SHOWN).map((row) => [`${row.worker} ${acts && isAway(row)}`, isAway(row) ? "gone" : "", () => cellsOf(row)]);
    if (!card.table) this.prepareWorkers(card);
    this.showHeadings(card, shown, acts);
    fillRows(card.rows, body, shown.length + (acts ? 1 : 0));
    const counts = counted(view.counts.contributions);
    card.foot.textContent = [rows.length ? "" : "no worker has joined yet", counts && `contributions: ${counts}`, left > 0 ? `${left} more workers are not shown` : ""].filter(Boolean).join("; ");
  }

  prepareWorkers(card) {
    card.head = make("thead");
    card.rows = make("tbody");
    card.table = make("table", "", card.head, card.rows);
    card.foot = make("p", "note");
    const scroll = make("div", "scroll", card.table);
    followScrolling(card.rows, scroll);
    card.body.append(scroll, card.foot);
    card.rows.addEventListener("click", (event) => {
      const name = event.target.closest("button")?.dataset.evict;
      if (name) this.owner.evict(name);
    });
    card.head.addEventListener("click", (event) => {
      const name = event.target.closest("button")?.dataset.key;
      if (!name) return;
      this.sort = [name, this.sort[0] === name ? -this.sort[1] : 1];
      if (this.views) this.showWorkers(this.views[0]);
    });
  }

  /** The column headings, rebuilt only when the columns or the sort order change. */
  showHeadings(card, shown, acts) {
    const key = JSON.stringify([shown.map(([name]) => name), acts, this.sort]);
    if (card.headings === key) return;
    card.headings = key;
    const titles = shown.map(([name, title]) => this.heading(name, title));
    if (acts) titles.splice(1, 0, make("th"));
    fill(card.head, [make("tr", "", ...titles)]);
  }

  heading(name, title) {
    const button = make("button", "", title), cell = make("th", "", button);
    button.type = "button";
    button.dataset.key = name;
    if (this.sort[0] === name) cell.setAttribute("aria-sort", this.sort[1] > 0 ? "ascending" : "descending");
    return cell;
  }

  showTimeline(view) {
    const card = this.card("timeline", "What each worker did", view.moments.length > 1, true);
    if (view.moments.length < 2 || far.has(card.body)) return;
    const from = view.moments[0].wall_s, to = view.moments.at(-1).wall_s;
    const rows = this.lanesOf(view.run).map(([name, whole]) => [name, whole.filter((one) => one.from < to)]);
    timeline(card.body, { rows, from, to, label: "Shares of computing, waiting and sending of each worker over time" });
  }

  /** What each worker did in the whole run, computed when new data has arrived; an earlier time shows a part of it. */
  lanesOf(run) {
    if (this.lanes?.moments === run.moments) return this.lanes.rows;
    const names = run.workers.slice(0, MOST_ROWS), moments = spread(run.moments, names.length > 20 ? 60 : 120);
    this.lanes = { moments: run.moments, rows: names.map((name) => [name, stretches(moments, name)]) };
    return this.lanes.rows;
  }

  showTraffic(view) {
    if (["speed", "tokens", "utilisation", "phases", "rounds", "bytes", "lag"].every((name) => this.rests(name))) return;
    const speed = view.points(view.train, "samples_per_s", "wall_s"), xName = "seconds";
    const tokens = view.points(view.train, "tokens_per_s", "wall_s"), used = view.points(view.train, "mfu", "wall_s");
    drawCurves(this.card("tokens", "Tokens a second", tokens.length > 1), { series: [{ name: "tokens/s", points: tokens, place: 0 }], xName, fromZero: true, label: "Tokens a second" });
    drawCurves(this.card("utilisation", "Model FLOP utilisation", used.length > 1), { series: [{ name: "share of the peak", points: used, place: 0 }], xName, fromZero: true, label: "Model FLOP utilisation" });
    const phases = view.names.filter((name) => name.startsWith("seconds/")).map((name, place) => ({ name: name.slice(8).replace("_", " + "), points: view.points(view.train, name, "wall_s"), place }));
    drawCurves(this.card("phases", "Seconds of a step, by phase", phases.some((one) => one.points.length > 1)), { series: phases, xName, fromZero: true, label: "Seconds of a step, by phase" });
    const rounds = rates(view.train, (one, other) => (other.wall_s - one.wall_s) / (other.step - one.step || 1));
    drawCurves(this.card("speed", "Samples a second", speed.length > 1), { series: [{ name: "samples/s", points: speed, place: 0 }], xName, fromZero: true, label: "Samples a second" });
    drawCurves(this.card("rounds", "Seconds for a version", rounds.length > 1), { series: [{ name: "seconds", points: rounds, place: 0 }], xName, fromZero: true, label: "Seconds for a version" });
    const each = (name) => rates(view.train, (one, other) => Math.max(0, other[name] - one[name]) / (other.wall_s - one.wall_s || 1));
    const flows = ["received_bytes", "sent_bytes"].map((name, place) => ({ name: name.replace("_bytes", ""), points: view.train.some((one) => one[name]) ? each(name) : [], place }));
    drawCurves(this.card("bytes", "Bytes a second", flows.some((one) => one.points.length > 1)), { series: flows, xName, fromZero: true, label: "Bytes a second", y: bytes });
    const lags = view.ledger?.lags ?? [], end = lags.findLastIndex((count) => count > 0);
    bars(this.card("lag", "Lag of contributions, in versions", end >= 0).body, { bars: lags.slice(0, end + 1).map((count, lag) => [lag === 20 ? "20+" : String(lag), count]), label: "Lag", xName: "versions" });
  }

  showRule(view) {
    const dropped = Object.entries(view.ledger?.dropped ?? {}).sort((one, other) => other[1] - one[1]);
    const card = this.card("rule", "Left out by the rule", dropped.length > 0);
    bars(card.body, { bars: dropped.slice(0, 30), lying: true, label: "Contributions that the rule left out, by worker" });
  }

  showNorms(view) {
    if (this.rests("norms")) return;
    const names = view.names.filter((name) => NORMS.test(name)).slice(0, MOST_CURVES);
    const series = names.map((name, place) => ({ name, points: view.points(view.train, name, "step"), place }));
    drawCurves(this.card("norms", "Gradient norms and skipped steps", names.length > 0), { series, xName: "step", label: "Gradient norms" });
  }

  showExperts(view) {
    const rows = [];
    for (const [name, value] of Object.entries(view.train.at(-1) ?? {})) {
      const found = /^layers\/(\d{1,3})\/load\/(\d{1,4})$/.exec(name);
      if (found && typeof value === "number") (rows[Number(found[1])] ??= [])[Number(found[2])] = value;
    }
    const whole = Array.from(rows, (row) => Array.from(row ?? [], (value) => value ?? 0)).filter((row) => row.length);
    const card = this.card("experts", "Load of the experts", whole.length > 0);
    if (whole.length) shades(card.body, { rows: whole, rowName: "layer", columnName: "expert", label: "Load of each expert of each layer" });
    const excess = view.names.filter((name) => /^layers\/\d+\/load_excess$/.test(name)).slice(0, MOST_CURVES);
    const series = excess.map((name, place) => ({ name: `layer ${name.split("/")[1]}`, points: view.points(view.train, name, "step"), place }));
    drawCurves(this.card("excess", "Load of the fullest expert over the mean", excess.length > 0), { series, xName: "step", fromZero: true, label: "Excess load" });
  }

  showRollouts(view) {
    const names = view.names.includes("kl") ? view.names.filter((name) => ROLLOUTS.test(name)) : [];
    for (const name of names.slice(0, 12)) {
      const series = [{ name, points: view.points(view.train, name, "step"), place: 0 }, { name: "eval", points: view.points(view.evals, name, "step"), place: 1 }];
      drawCurves(this.card(`rollouts ${name}`, name.replaceAll("_", " ")), { series, xName: "step", height: 160, label: name });
    }
  }

  showPrivacy(view) {
    const points = view.points(view.train, "epsilon", "step"), privacy = view.run.status?.privacy;
    const card = this.card("privacy", "Privacy spent", points.length > 0);
    const most = privacy?.protects_up_to;
    const limit = points.length && most ? [{ name: `up to ${most} protects`, points: [[points[0][0], most], [points.at(-1)[0], most]], place: 1, dashed: true }] : [];
    drawCurves(card, { series: [{ name: "ε spent", points, place: 0 }, ...limit], xName: "step", fromZero: true, label: "ε" });
  }

  showAudit(view) {
    const ledger = view.ledger, card = this.card("audit", "Audit while it runs", Boolean(ledger?.lines));
    if (!ledger?.lines) return;
    const sound = ledger.problems.length ? ledger.problems.join("; ") : "nothing was lost, and nothing counted twice";
    const rows = [["ledger", sound], ["versions", number(ledger.version)], ["contributions", number(ledger.contributions)], ["samples", number(ledger.samples)],
      ["checked", ledger.checked_all ? "every contribution" : "the first 500,000 contributions"]];
    fill(card.body, [list(rows), make("p", "note", "shoal audit compares it with the workers' own receipts, too")]);
  }

  showCheckpoints(view) {
    const found = view.checkpoints, card = this.card("checkpoints", "Checkpoints", found.length > 0);
    fill(card.body, [list(found.slice(-12).reverse().map((one) => [one.name, clock(one.at)]))]);
  }

  showEvents(view) {
    const card = this.card("events", "Events", view.events.length > 0);
    if (card.fresh) {
      card.fresh = false;
      card.list = make("ol", "events");
      card.body.append(card.list);
    }
    fill(card.list, view.events.slice(-200).reverse().map(eventRow));
  }

  /** Every setting, and where its value came from, requested once. */
  async showSettings(number) {
    if (this.settings === number) return;
    this.settings = number;
    const card = this.card("settings", "Settings, and where they came from", false, true);
    const settings = await this.settingsOf(number).catch(() => ({}));
    const rows = Object.entries(settings).map(([path, one]) => [path, JSON.stringify(one?.value ?? null), String(one?.origin ?? "")]);
    card.node.hidden = !rows.length;
    const search = make("input"), table = make("tbody");
    search.type = "search";
    search.placeholder = "filter";
    search.setAttribute("aria-label", "Filter the settings");
    const draw = () => fill(table, rows.filter((row) => row.join(" ").includes(search.value)).map((row) => make("tr", "", ...row.map((cell) => make("td", "", cell)))));
    search.addEventListener("input", draw);
    card.tools.replaceChildren(make("h2", "", "Settings, and where they came from"), search);
    const head = make("thead", "", make("tr", "", ...["setting", "value", "came from"].map((title) => make("th", "", title))));
    card.body.replaceChildren(make("div", "scroll", make("table", "", head, table)));
    draw();
  }
}

/** Curves of a card, with tools in its title row. */
function drawCurves(card, given) {
  curves(card.body, { ...given, tools: card.tools });
}

function option(name) {
  const node = make("option", "", name);
  node.value = name;
  return node;
}

function list(rows) {
  return make("dl", "", ...rows.flatMap(([name, text]) => [make("dt", "", name), make("dd", "", text)]));
}

function compare(one, other) {
  if (one === other) return 0;
  if (one === undefined || one === null) return 1;
  if (other === undefined || other === null) return -1;
  return one < other ? -1 : 1;
}

function byImportance(one, other) {
  const first = ["loss", "accuracy", "perplexity", "score", "generator_loss", "discriminator_loss"];
  const rank = (name) => first.indexOf(name) >>> 0;
  return rank(one) - rank(other) || (one < other ? -1 : 1);
}

/** [time, f(record, next)] over neighbouring records. */
function rates(records, of) {
  const found = [];
  for (let at = 1; at < records.length; at += 1) {
    const value = of(records[at - 1], records[at]);
    if (Number.isFinite(value)) found.push([records[at].wall_s, value]);
  }
  return found;
}

/** How a worker's time is divided between two records. Times when it was not connected are left out. */
function stretches(moments, name) {
  const found = [];
  for (let at = 1; at < moments.length; at += 1) {
    const before = moments[at - 1].workers[name], now = moments[at].workers[name];
    if (!before || !now) continue;
    const spent = PARTS.map((field) => Math.max(0, (now[field] ?? 0) - (before[field] ?? 0)));
    const whole = spent[0] + spent[1] + spent[2], last = found.at(-1), goesOn = last?.to === moments[at - 1].wall_s;
    const shares = whole > 0 ? spent.map((one) => one / whole) : null;
    if (goesOn && (!shares || shares.every((share, part) => Math.abs(share - last.shares[part]) < ALIKE))) last.to = moments[at].wall_s;
    else if (shares) found.push({ from: moments[at - 1].wall_s, to: moments[at].wall_s, shares });
  }
  return found;
}
