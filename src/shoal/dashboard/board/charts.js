// Charts as SVG beside curves: bars, a map of shades, a timeline, a QR code.

import { canvas, drawAxes, element, far, measure, ticks } from "./svg.js";
import { make, number } from "./words.js";

const WIDEST_BAR = 64;

/** Bars: `bars` of [name, value]; upright with numbers below, or lying with names beside. */
export function bars(box, { bars: given, label = "", xName = "", lying = false }) {
  if (far.has(box)) return;
  if (!given.length) {
    box.replaceChildren(make("p", "note", "nothing yet"));
    return;
  }
  const area = measure(box), { width, text, left, right, bottom } = area;
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
  const height = 200, root = canvas(width, height, label), each = Math.min(WIDEST_BAR, (width - left - right) / given.length);
  const [, atY] = drawAxes(root, [[0, 1], [0, most]], height, area, { x: "", y: null });
  root.querySelectorAll("text[text-anchor=middle]").forEach((node) => node.remove());
  given.forEach(([name, value], at) => {
    const x = left + at * each;
    root.append(element("rect", { class: "bar", x: x + 1, width: Math.max(1, each - 2), y: atY(value), height: Math.max(0, height - bottom - atY(value)) }));
    if (given.length <= 24) root.append(element("text", { x: x + each / 2, y: height - bottom + 1.3 * text, "text-anchor": "middle" }, name));
  });
  root.append(element("text", { x: left + (each * given.length) / 2, y: height - 4, "text-anchor": "middle" }, xName));
  box.replaceChildren(root);
}

/** A square for each number, first row on top; a larger number has a stronger colour. */
export function shades(box, { rows, rowName, columnName, label = "" }) {
  if (far.has(box)) return;
  const { width, left, right } = measure(box), wide = Math.max(...rows.map((row) => row.length));
  const cell = Math.max(3, Math.min(34, (width - left - right) / wide));
  const root = canvas(width, rows.length * cell + 30, label);
  const most = Math.max(...rows.flat()) || 1;
  rows.forEach((row, y) => {
    if (cell >= 12 || y % Math.ceil(12 / cell) === 0) root.append(element("text", { x: left - 8, y: (y + 0.5) * cell + 4, "text-anchor": "end" }, `${rowName} ${y}`));
    row.forEach((value, x) => {
      const node = element("rect", { class: "bar", x: left + x * cell, y: y * cell, width: cell - 1, height: cell - 1, "fill-opacity": (0.06 + (0.94 * value) / most).toFixed(3) });
      node.append(element("title", {}, `${rowName} ${y}, ${columnName} ${x}: ${number(value)}`));
      root.append(node);
    });
  });
  root.append(element("text", { x: left, y: rows.length * cell + 20 }, `${columnName} 0 to ${wide - 1}; the strongest is ${number(most)}`));
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
  const { width, right } = measure(box), each = rows.length > 30 ? 12 : 22, left = Math.min(150, width * 0.3);
  const height = rows.length * each + 30, root = lanes(box, rows.map((row) => row[0]), width, each, left, label);
  const x = (time) => left + ((time - from) / (to - from || 1)) * (width - left - right);
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
