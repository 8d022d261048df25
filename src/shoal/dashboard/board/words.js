// Numbers and times as people read them, and elements made of text: nothing that a run says ever becomes HTML.

/** Table rows that are visible at once, extra rows above and below, and the delay before the others are drawn. */
const SEEN = 20, MARGIN = 5, LATER_MS = 150;
/** Made once: making one for each number would take longer than drawing a chart. */
const WHOLE = new Intl.NumberFormat("en");

/** Whether a worker is not here: it has left, or its computer's user needs it. */
export const isAway = (row) => row.state === "gone" || row.state === "left" || String(row.state).startsWith("paused: ");

/** An element with a class and with texts or elements in it. */
export function make(tag, className = "", ...content) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...content);
  return node;
}

/** Replace the children of an element if they differ from the present ones, so that scrolling and selections are not disturbed. */
export function fill(node, children) {
  const box = document.createElement(node.tagName);
  box.append(...children);
  if (box.innerHTML !== node.innerHTML) node.replaceChildren(...box.childNodes);
}

/**
 * Put rows into a table's body: each is [key, class, what gives its cells], and a cell is [text, class] or what makes an element. A row of a key that is
 * there stays, and only texts that differ are changed. Of hundreds of rows those in sight are written at once, the others a moment later.
 */
export function fillRows(body, rows, columns) {
  const known = (body.known ??= new Map()), shown = new Set(rows.map((row) => row[0]));
  for (const [key, row] of known) if (!shown.has(key)) [row.remove(), known.delete(key)];
  const first = (body.first ?? 0) - MARGIN, last = first + SEEN + 2 * MARGIN, later = [];
  let before = null;
  rows.forEach((given, at) => {
    const [key, , cells] = given;
    let row = known.get(key);
    const fresh = row?.children.length !== columns;
    if (fresh) {
      row?.remove();
      row = make("tr", "", ...cells().map((cell) => (typeof cell === "function" ? make("td", "", cell()) : make("td", cell[1]))));
      row.texts = [];
      known.set(key, row);
    }
    if (fresh || (at >= first && at <= last)) write(row, given);
    else later.push([row, given]);
    const place = before ? before.nextSibling : body.firstChild;
    if (place !== row) body.insertBefore(row, place);
    before = row;
  });
  clearTimeout(body.later);
  if (later.length) body.later = setTimeout(() => later.forEach(([row, given]) => write(row, given)), LATER_MS);
}

function write(row, [, kind, cells]) {
  if (row.className !== kind) row.className = kind;
  cells().forEach((cell, place) => {
    if (typeof cell === "function" || row.texts[place] === cell[0]) return;
    row.texts[place] = cell[0];
    row.children[place].textContent = cell[0];
  });
}

/** Record the first visible row of a table when the box around it is scrolled. All rows have about the same height. */
export function followScrolling(body, box) {
  box.addEventListener("scroll", () => { body.first = Math.floor((body.children.length * box.scrollTop) / (box.scrollHeight || 1)); }, { passive: true });
}

export function number(value) {
  if (typeof value !== "number") return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return size < 1000 ? String(value) : WHOLE.format(value);
  if (size >= 1e6 || (size && size < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

/** Counts by outcome, as text: `late` and `cancelled` units were both too late. */
export function counted(counts) {
  const shown = new Map();
  for (const [outcome, count] of Object.entries(counts ?? {})) {
    const name = outcome === "late" || outcome === "cancelled" ? "too late" : outcome;
    shown.set(name, (shown.get(name) ?? 0) + count);
  }
  return [...shown].map(([name, count]) => `${number(count)} ${name}`).join(", ");
}

export function bytes(value) {
  if (typeof value !== "number") return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) [value, at] = [value / 1000, at + 1];
  return `${at ? value.toFixed(1) : value} ${units[at]}`;
}

export function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export function clock(at) {
  return typeof at === "number" ? new Date(at * 1000).toLocaleTimeString("en-GB") : "–";
}

export function percent(share) {
  return `${Math.round(100 * share)} %`;
}

/** At most `count` of a list's elements, at even distances; the first and the last are among them. */
export function spread(list, count) {
  if (list.length <= count) return list;
  return Array.from({ length: count }, (_, at) => list[Math.round((at * (list.length - 1)) / (count - 1))]);
}
