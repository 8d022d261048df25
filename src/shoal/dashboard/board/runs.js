// The runs as far as the page has received them, and views of them at an earlier time.

export const FIELDS = ["computing_s", "waiting_s", "sending_s", "accepted", "rejected", "lag", "samples", "memory_bytes"];

const LASTING = ["address", "since", "device", "system", "task"];

export class Run {
  constructor() {
    this.name = "";
    this.status = null;
    this.records = [];
    this.moments = [];
    this.events = [];
    this.samples = [];
    this.checkpoints = [];
    this.ledger = null;
    this.earlierLedgers = [];
    this.workers = [];
    this.known = new Map();
  }

  /** Apply a message of the stream. */
  receive(message) {
    const known = message.reset ? [[], [], [], []] : [this.records, this.moments, this.events, this.earlierLedgers];
    this.records = known[0].concat(message.records);
    this.moments = known[1].concat(message.moments);
    this.events = known[2].concat(message.events);
    this.earlierLedgers = known[3].concat(message.ledger_before);
    for (const name of ["name", "status", "ledger", "samples", "checkpoints"]) this[name] = message[name];
    this.addWorkers(message.reset ? [] : this.workers, message.moments);
    this.known = new Map([...(this.status?.gone ?? []), ...(this.status?.members ?? [])].map((row) => [row.worker, pick(row, LASTING)]));
  }

  /** Keep the sorted names of all workers that ever took part: collecting them for each redraw would take longer than the drawing. */
  addWorkers(known, moments) {
    const names = new Set(known);
    for (const moment of moments) for (const name of Object.keys(moment.workers)) names.add(name);
    this.workers = names.size === known.length ? known : [...names].sort();
  }

  /** The title when several runs are shown, which may have the same name: the end of the folder's path. */
  get title() {
    return (this.status?.folder ?? this.name).split("/").slice(-2).join("/");
  }

  /** Seconds from the run's beginning to the newest record. */
  get length() {
    const last = (list) => (list.length ? list[list.length - 1].wall_s || 0 : 0);
    return Math.max(last(this.records), last(this.moments), this.status?.wall_s || 0);
  }

  /** The run as it was `time` seconds after its beginning; null: as it is now. */
  at(time) {
    return new View(this, time);
  }
}

function until(list, time) {
  if (time === null) return list;
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((list[middle].wall_s ?? 0) <= time) low = middle + 1;
    else high = middle;
  }
  return list.slice(0, low);
}

export class View {
  constructor(run, time) {
    this.run = run;
    this.time = time;
    this.records = until(run.records, time);
    this.moments = until(run.moments, time);
    this.events = until(run.events, time);
    this.train = this.records.filter((one) => one.split === "train");
    this.evals = this.records.filter((one) => one.split === "eval");
  }

  get step() {
    if (this.time === null) return this.run.status?.version ?? 0;
    return Math.max(this.records.at(-1)?.step ?? 0, this.moments.at(-1)?.version ?? 0);
  }

  /** The summary of the ledger up to then. */
  get ledger() {
    return this.time === null ? this.run.ledger : (this.run.earlierLedgers.findLast((one) => one.version <= this.step) ?? null);
  }

  /** Counts of contributions by outcome, and how many workers the rows do not show. */
  get counts() {
    return (this.time === null ? this.run.status : this.moments.at(-1)) ?? {};
  }

  get samples() {
    return this.time === null ? this.run.samples : this.run.samples.filter((one) => one.step <= this.step);
  }

  get checkpoints() {
    return this.time === null ? this.run.checkpoints : this.run.checkpoints.filter((one) => one.step <= this.step);
  }

  /** One row for each worker: of now from the status, of the past from the history. */
  get workers() {
    const status = this.run.status;
    if (this.time === null) return [...(status?.members ?? []), ...(status?.gone ?? [])];
    return Object.entries(this.moments.at(-1)?.workers ?? {}).map(([worker, fields]) => {
      const row = { ...this.run.known.get(worker), worker, state: fields[0] };
      FIELDS.forEach((name, at) => { row[name] = fields[at + 1]; });
      return row;
    });
  }

  /** [x, y] of a figure in some records; x is the step or the time, y NaN where the figure was not finite. */
  points(records, name, by) {
    const found = [];
    for (const record of records) if (isFigure(record[name]) && typeof record[by] === "number") found.push([record[by], record[name] ?? NaN]);
    return found;
  }

  /** The names of all figures. */
  get names() {
    const names = new Set();
    for (const record of [this.train.at(-1), this.train[0], this.evals.at(-1)]) {
      for (const [name, value] of Object.entries(record ?? {})) if (isFigure(value)) names.add(name);
    }
    for (const name of ["step", "wall_s", "samples"]) names.delete(name);
    return [...names];
  }
}

/** Whether a record's value is a number; null is one that was not finite, which JSON cannot hold. */
function isFigure(value) {
  return typeof value === "number" || value === null;
}

function pick(row, names) {
  return Object.fromEntries(names.filter((name) => row && name in row).map((name) => [name, row[name]]));
}
