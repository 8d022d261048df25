// What all charts share: SVG elements, the size of a chart, and its axes. Texts are set as text; a chart is as wide as the box it is in.

import { number } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const NARROWEST = 260, USUAL = 600;

/** Boxes that are scrolled far out of view: nothing is drawn into them. */
export const far = new WeakSet();
/** Cached width and font size of boxes: reading them from the browser for each chart would lay out the whole page again. */
let sizes = new WeakMap();
window.addEventListener("resize", () => { sizes = new WeakMap(); });

/** The width, type size and margins of a chart in a box. The margins follow the size of the type there, which is large for a projector. */
export function measure(box) {
  const known = sizes.get(box) ?? { width: box.clientWidth, text: 0.75 * parseFloat(getComputedStyle(box).fontSize) };
  if (known.width) sizes.set(box, known);
  const { text } = known;
  return { width: Math.max(NARROWEST, known.width || USUAL), text, left: 4.8 * text, right: 14, top: 10, bottom: 3.1 * text };
}

export function element(name, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return node;
}

export function canvas(width, height, label) {
  const root = element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
  root.setAttribute("aria-label", label);
  return root;
}

/** About `count` round numbers from the least to the most. */
export function ticks(least, most, count = 5) {
  const span = most - least || Math.abs(most) || 1;
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const first = Math.ceil(least / step), found = [];
  for (let at = 0; at <= 2 * count && (first + at) * step <= most + step * 1e-9; at += 1) found.push((first + at) * step);
  return [...new Set(found)];  // beyond 2^53 neighbours may be one number
}

/** About `count` round numbers of a logarithmic axis, from 10^least to 10^most: powers of ten, or numbers between two of them. */
export function logTicks(least, most, count = 5) {
  const each = Math.max(1, Math.ceil((most - least) / count)), first = Math.ceil(least - 1e-9), powers = [];
  for (let at = first; at <= most + 1e-9; at += 1) if (at % each === 0) powers.push(10 ** at);
  if (powers.length >= 3 || each > 1) return powers.filter(Number.isFinite);
  const halves = powerSteps(least, most);
  return halves.length >= 3 ? halves : ticks(10 ** least, 10 ** most, count).filter((value) => value > 0);
}

/** 1, 2 and 5 times each power of ten in a range. */
function powerSteps(least, most) {
  const found = [];
  for (let power = Math.floor(least); power <= most; power += 1) found.push(...[1, 2, 5].map((one) => one * 10 ** power));
  return found.filter((value) => Math.log10(value) >= least - 1e-9 && Math.log10(value) <= most + 1e-9);
}

/**
 * Draw the axes of a chart of `ranges` [[x0, x1], [y0, y1]]; the y range of a logarithmic axis (`log`) is in powers of ten. `names.x` is below;
 * `names.y` writes the values at the left. Returns what gives the place of an x, and of a y in the range's scale.
 */
export function drawAxes(root, ranges, height, area, names, log = false) {
  const [[x0, x1], [y0, y1]] = ranges, { width, text, left, right, top, bottom } = area;
  const x = (value) => left + ((value - x0) / (x1 - x0 || 1)) * (width - left - right);
  const y = (value) => height - bottom - ((value - y0) / (y1 - y0 || 1)) * (height - top - bottom);
  for (const value of log ? logTicks(y0, y1, 4) : ticks(y0, y1, 4)) {
    const at = y(log ? Math.log10(value) : value);
    root.append(element("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }));
    root.append(element("text", { x: left - 8, y: at + 4, "text-anchor": "end" }, names.y ? names.y(value) : number(value)));
  }
  for (const value of ticks(x0, x1, Math.max(3, Math.floor(width / (11 * text))))) {
    root.append(element("text", { x: x(value), y: height - bottom + 1.3 * text, "text-anchor": "middle" }, number(value)));
  }
  root.append(element("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, names.x));
  return [x, y];
}
