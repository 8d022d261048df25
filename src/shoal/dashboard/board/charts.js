// Charts as SVG: curves, bars, a map of shades, a timeline. Texts are set as text; a chart is as wide as the box it is in.

import { make, number } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const RIGHT = 14, TOP = 10;
const WIDEST_BAR = 64;
let LEFT = 58, BOTTOM = 38, TEXT = 12;

/** Boxes that are scrolled far out of view: nothing is drawn into them. */
export const far = new WeakSet();
/** Cached width and font size of boxes: reading them from the browser for each chart would lay out the whole page again. */
let sizes = new WeakMap();
window.addEventListener("resize", () => { sizes = new WeakMap(); });

/** The width of a chart in a box. The margins follow the size of the type there, which is large for a projector. */
function measure(box) {
  const known = sizes.get(box) ?? { width: box.clientWidth, text: 0.75 * parseFloat(getComputedStyle(box).fontSize) };
  if (known.width) sizes.set(box, known);
  TEXT = known.text;
  [LEFT, BOTTOM] = [4.8 * TEXT, 3.1 * TEXT];
  return Math.max(260, known.width || 600);
}

function element(name, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return node;
}

function canvas(width, height, label) {
  const root = element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
  root.setAttribute("aria-label", label);
  return root;
}

/** About `count` round numbers from the least to the most. */
export function ticks(least, most, count = 5) {
  const span = most - least || Math.abs(most) || 1;
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const found = [];
  for (let at = Math.ceil(least / step) * step; at <= most + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

/** At most two points for each pixel column: the lowest and the highest. */
export function thinned(points, most) {
  if (points.length <= 2 * most) return points;
  const each = Math.ceil(points.length / most), kept = [];
  for (let at = 0; at < points.length; at += each) {
    let low = points[at], high = points[at];
    for (let i = at; i < Math.min(at + each, points.length); i += 1) {
      if (points[i][1] < low[1]) low = points[i];
      if (points[i][1] > high[1]) high = points[i];
    }
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

function frame(root, ranges, size, names) {
  const [[x0, x1], [y0, y1]] = ranges, [width, height] = size;
  const x = (value) => LEFT + ((value - x0) / (x1 - x0 || 1)) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - ((value - y0) / (y1 - y0 || 1)) * (height - TOP - BOTTOM);
  for (const value of ticks(y0, y1, 4)) {
    root.append(element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    root.append(element("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, names.y ? names.y(value) : number(value)));
  }
  for (const value of ticks(x0, x1, Math.max(2, Math.floor(width / (11 * TEXT))))) {
    root.append(element("text", { x: x(value), y: height - BOTTOM + 1.3 * TEXT, "text-anchor": "middle" }, number(value)));
  }
  root.append(element("text", { x: (LEFT + width - RIGHT) / 2, y: height - 4, "text-anchor": "middle" }, names.x));
  return [x, y];
}

function rangeOf(values, fromZero) {
  let least = fromZero ? 0 : Infinity, most = -Infinity;
  for (const value of values) {
    if (value < least) least = value;
    if (value > most) most = value;
  }
  if (!(most >= least)) return [0, 1];
  return least === most ? [least - Math.abs(least || 1) * 0.1, most + Math.abs(most || 1) * 0.1] : [least, most];
}

/**
 * Curves: `series` of {name, points, place (its colour), dashed}. `xName` is below; `fromZero`: the y axis begins at 0; `marks`: x of things.
 */
export function curves(box, { series, xName, fromZero = false, height = 220, label = "", marks = [], y = null }) {
  if (far.has(box)) return;
  const shown = series.filter((one) => one.points.length);
  if (!shown.length) {
    box.replaceChildren(make("p", "note", "nothing yet"));
    return;
  }
  const width = measure(box), all = shown.flatMap((one) => one.points);
  const ranges = [rangeOf(all.map((point) => point[0]), false), rangeOf(all.map((point) => point[1]), fromZero)];
  const last = shown.map((one) => `${one.name} ${number(one.points.at(-1)[1])}`).join(", ");
  const root = canvas(width, height, `${label}: ${last}`);
  const [atX, atY] = frame(root, ranges, [width, height], { x: xName, y });
  for (const mark of marks.filter((one) => one >= ranges[0][0] && one <= ranges[0][1])) {
    root.append(element("line", { class: "mark", x1: atX(mark), x2: atX(mark), y1: TOP, y2: height - BOTTOM }));
  }
  for (const one of shown) {
    const path = thinned(one.points, width).map(([x, y]) => `${atX(x).toFixed(1)} ${atY(y).toFixed(1)}`);
    const kind = `curve s${one.place % 6}${one.dashed ? " dashed" : ""}`;
    root.append(element("path", { class: path.length === 1 ? `${kind} point` : kind, d: `M${path.join("L")}${path.length === 1 ? "h0" : ""}` }));
  }
  const legend = make("ul", "legend", ...shown.map((one) => make("li", `s${one.place % 6}${one.dashed ? " dashed" : ""}`, make("span", "", one.name))));
  const readout = make("p", "readout");
  root.addEventListener("pointermove", (event) => readout.replaceChildren(under(event, root, width, ranges[0], shown, xName)));
  root.addEventListener("pointerleave", () => readout.replaceChildren());
  box.replaceChildren(...(shown.length > 1 ? [legend] : []), root, readout);
}

/** The values of the curves at the pointer. */
function under(event, root, width, [x0, x1], shown, xName) {
  const place = root.getBoundingClientRect();
  const x = x0 + (((event.clientX - place.left) * (width / place.width) - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0);
  const nearest = (points) => points.reduce((best, one) => (Math.abs(one[0] - x) < Math.abs(best[0] - x) ? one : best));
  const values = shown.map((one) => `${one.name} ${number(nearest(one.points)[1])}`);
  return `${xName} ${number(nearest(shown[0].points)[0])}: ${values.join(", ")}`;
}

/** Bars: `bars` of [name, value]; upright with numbers below, or lying with names beside. */
export function bars(box, { bars: given, label = "", xName = "", lying = false }) {
  if (far.has(box)) return;
  if (!given.length) {
    box.replaceChildren(make("p", "note", "nothing yet"));
    return;
  }
  const width = measure(box);
  const most = Math.max(...given.map((one) => one[1])) || 1;
  if (lying) {
    const each = 22, root = canvas(width, each * given.length + 4, label), from = Math.min(180, width * 0.4);
    given.forEach(([name, value], at) => {
      root.append(element("text", { x: from - 8, y: at * each + 15, "text-anchor": "end" }, name.length > 24 ? `${name.slice(0, 23)}…` : name));
      root.append(element("rect", { class: "bar", x: from, y: at * each + 4, height: each - 8, width: Math.max(1, ((width - from - 70) * value) / most) }));
      root.append(element("text", { x: from + ((width - from - 70) * value) / most + 6, y: at * each + 15 }, number(value)));
    });
    box.replaceChildren(root);
    return;
  }
  const height = 200, root = canvas(width, height, label), each = Math.min(WIDEST_BAR, (width - LEFT - RIGHT) / given.length);
  const [, atY] = frame(root, [[0, 1], [0, most]], [width, height], { x: "", y: null });
  root.querySelectorAll("text[text-anchor=middle]").forEach((node) => node.remove());
  given.forEach(([name, value], at) => {
    const x = LEFT + at * each;
    root.append(element("rect", { class: "bar", x: x + 1, width: Math.max(1, each - 2), y: atY(value), height: Math.max(0, height - BOTTOM - atY(value)) }));
    if (given.length <= 24) root.append(element("text", { x: x + each / 2, y: height - BOTTOM + 1.3 * TEXT, "text-anchor": "middle" }, name));
  });
  root.append(element("text", { x: LEFT + (each * given.length) / 2, y: height - 4, "text-anchor": "middle" }, xName));
  box.replaceChildren(root);
}

/** A square for each number, first row on top; a larger number has a stronger colour. */
export function shades(box, { rows, rowName, columnName, label = "" }) {
  if (far.has(box)) return;
  const width = measure(box), wide = Math.max(...rows.map((row) => row.length));
  const cell = Math.max(3, Math.min(34, (width - LEFT - RIGHT) / wide));
  const root = canvas(width, rows.length * cell + 30, label);
  const most = Math.max(...rows.flat()) || 1;
  rows.forEach((row, y) => {
    if (cell >= 12 || y % Math.ceil(12 / cell) === 0) root.append(element("text", { x: LEFT - 8, y: (y + 0.5) * cell + 4, "text-anchor": "end" }, `${rowName} ${y}`));
    row.forEach((value, x) => {
      const node = element("rect", { class: "bar", x: LEFT + x * cell, y: y * cell, width: cell - 1, height: cell - 1, "fill-opacity": (0.06 + (0.94 * value) / most).toFixed(3) });
      node.append(element("title", {}, `${rowName} ${y}, ${columnName} ${x}: ${number(value)}`));
      root.append(node);
    });
  });
  root.append(element("text", { x: LEFT, y: rows.length * cell + 20 }, `${columnName} 0 to ${wide - 1}; the strongest is ${number(most)}`));
  box.replaceChildren(root);
}

function tenth(value) {
  return Math.round(10 * value) / 10;
}

const PARTS = ["computing", "waiting", "sending"];

/**
 * What each worker did: `rows` of [name, [{from, to, shares: [computing, waiting, sending]}]], times in seconds. One path for each kind, so
 * that many workers cost no more than few.
 */
export function timeline(box, { rows, from, to, label = "" }) {
  if (far.has(box)) return;
  const width = measure(box), each = rows.length > 30 ? 12 : 22, left = Math.min(150, width * 0.3);
  const height = rows.length * each + 30, root = lanes(box, rows.map((row) => row[0]), width, each, left, label);
  const x = (time) => left + ((time - from) / (to - from || 1)) * (width - left - RIGHT);
  const paths = PARTS.map(() => []);
  rows.forEach(([, stretches], row) => {
    const top = row * each + 2, tall = each - 4;
    for (const { from: begin, to: end, shares } of stretches) {
      const left = tenth(x(begin)), wide = tenth(Math.max(0.5, x(Math.min(to, end)) - x(begin)));
      let y = top;
      shares.forEach((share, part) => {
        if (share <= 0) return;
        paths[part].push(`M${left} ${tenth(y)}h${wide}v${tenth(share * tall)}h${-wide}z`);
        y += share * tall;
      });
    }
  });
  PARTS.forEach((part, at) => root.parts[at].setAttribute("d", paths[at].join("") || "M0 0"));
  const times = ticks(from, to, Math.max(2, Math.floor(width / 150)));
  root.times.replaceChildren(...times.map((value) => element("text", { x: x(value), y: height - 8, "text-anchor": "middle" }, `${number(value)} s`)));
}

/** The names of a timeline's rows, and the paths that each redraw fills; reused while the names are the same. */
function lanes(box, names, width, each, left, label) {
  const key = JSON.stringify([names, width, each]);
  if (box.lanes?.key === key) return box.lanes;
  const root = canvas(width, names.length * each + 30, label);
  names.forEach((name, row) => {
    root.append(element("text", { x: left - 8, y: row * each + each / 2 + 4, "text-anchor": "end" }, name.length > 18 ? `${name.slice(0, 17)}…` : name));
  });
  const parts = PARTS.map((part) => element("path", { class: part })), times = element("g");
  root.append(...parts, times);
  box.replaceChildren(make("ul", "legend", ...PARTS.map((part) => make("li", part, make("span", "", part)))), root);
  box.lanes = { key, parts, times };
  return box.lanes;
}

/** A QR code: rows of 0 and 1. */
export function code(box, rows) {
  if (!rows.length) {
    box.replaceChildren();
    return;
  }
  const size = rows.length + 8, root = element("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", "shape-rendering": "crispEdges" });
  root.setAttribute("aria-label", "The line to join with, as a QR code");
  const dark = rows.flatMap((row, y) => [...row].flatMap((one, x) => (one === "1" ? [`M${x + 4} ${y + 4}h1v1h-1z`] : [])));
  root.append(element("rect", { class: "light", width: size, height: size }), element("path", { class: "dark", d: dark.join("") }));
  box.replaceChildren(root);
}
