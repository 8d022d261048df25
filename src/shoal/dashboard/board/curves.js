// Curves over steps or time, with axes, a legend, the values at the pointer, and marks where a value is not drawn.

import { level, limits, rangeOf, smoothed, spacing, stretches, thinned, within } from "./chart_data.js";
import { ChartTools, followSelection } from "./chart_tools.js";
import { canvas, drawAxes, element, far, measure } from "./svg.js";
import { fill, make, number } from "./words.js";

const PLAIN = { log: false, smoothing: 0 };
/** Distance of marks in pixels: more of them would cover each other. */
const MARK_EVERY = 7;
const HELP = "drag to zoom, double click for the whole; keys + and -, arrows, 0";

/**
 * Draw curves into a box: `series` of {name, points, place (its colour), dashed}, where a value that is not finite is NaN. `xName` is below; `fromZero`: the
 * y axis begins at 0; `marks`: x of things; `tools`: the row that the reader's tools are in, where there are any.
 */
export function curves(box, given) {
  if (!far.has(box)) (box.chart ??= new Curves(box)).draw(given);
}

class Curves {
  constructor(box) {
    this.box = box;
    this.tools = null;
    this.plot = make("div", "plot");
    this.legend = make("ul", "legend");
    this.notes = make("p", "note outliers");
    this.readout = make("p", "readout");
    this.plot.addEventListener("pointermove", (event) => { this.readout.textContent = this.under(event); });
    this.plot.addEventListener("pointerleave", () => { this.readout.textContent = ""; });
  }

  draw(given) {
    const shown = given.series.filter((one) => one.points.length);
    if (!shown.length) {
      this.box.replaceChildren(make("p", "note", "nothing yet"));
      return;
    }
    this.given = given;
    if (given.tools) this.prepareTools(given);
    const { log, smoothing } = this.tools?.options ?? PLAIN;
    const unit = Math.min(...shown.map((one) => spacing(one.points)));
    this.lines = shown.map((one) => prepared(one, log, smoothing, unit));
    this.area = measure(this.box);
    this.height = given.height ?? 220;
    this.whole = rangeOf(this.lines.flatMap((one) => one.points.map((point) => point[0])));
    this.ranges = this.rangesOf(this.tools?.zoom, given.fromZero && !log);
    this.drawPlot(log);
    this.legend.hidden = shown.length < 2;
    fill(this.legend, shown.map((one) => make("li", `s${one.place % 6}${one.dashed ? " dashed" : ""}`, make("span", "", one.name))));
    if (this.plot.parentNode !== this.box) this.box.replaceChildren(this.legend, this.plot, this.notes, this.readout);
  }

  prepareTools({ tools, label, xName }) {
    if (!this.tools) {
      this.tools = new ChartTools(tools, () => this.draw(this.given));
      this.plot.tabIndex = 0;
      this.plot.classList.add("zooms");
      this.plot.title = HELP;
      this.plot.setAttribute("role", "group");
      followSelection(this.plot, () => this, this.tools);
    }
    this.plot.setAttribute("aria-label", `Chart of ${label}: ${HELP}`);
    this.tools.select(label, xName);
  }

  /** The part that is shown: what the reader chose, else everything but outliers. */
  rangesOf(zoom, fromZero) {
    const x = zoom?.x ?? this.whole;
    if (zoom?.y) return [x, zoom.y];
    const levels = this.lines.flatMap((one) => one.levels.filter((y, at) => one.points[at][0] >= x[0] && one.points[at][0] <= x[1] && isInside(y, one.limits)));
    return [x, rangeOf(fromZero ? [0, ...levels] : levels)];
  }

  drawPlot(log) {
    const { given: { label = "", xName, y = null, marks = [] }, area, height, ranges } = this;
    const last = this.lines.map((one) => `${one.name} ${number(one.points.at(-1)[1])}`).join(", ");
    const root = canvas(area.width, height, `${label}: ${last}`);
    const [atX, atY] = drawAxes(root, ranges, height, area, { x: xName, y }, log);
    const x = area.left, top = area.top, width = area.width - x - area.right, tall = height - top - area.bottom;
    const inner = element("svg", { class: "inner", x, y: top, width, height: tall, viewBox: `${x} ${top} ${width} ${tall}` });
    for (const mark of marks.filter((one) => one >= ranges[0][0] && one <= ranges[0][1])) {
      inner.append(element("line", { class: "mark", x1: atX(mark), x2: atX(mark), y1: top, y2: height - area.bottom }));
    }
    const bounded = (value) => Math.max(-height, Math.min(2 * height, atY(value))).toFixed(1);
    for (const one of this.lines) {
      const kind = `curve s${one.place % 6}${one.dashed ? " dashed" : ""}`;
      const path = (levels) => pathOf(one.points.map(([x], at) => [x, levels[at]]), ranges[0], area.width, atX, bounded);
      inner.append(element("path", { class: `${kind}${one.smooth ? " pale" : ""}${one.points.length === 1 ? " point" : ""}`, d: path(one.levels) }));
      if (one.smooth) inner.append(element("path", { class: kind, d: path(one.smooth) }));
    }
    root.append(inner);
    this.markOutliers(root, atX, log);
    const old = this.plot.querySelector("svg");
    if (old) old.replaceWith(root);
    else this.plot.append(root);
  }

  /** Mark where values lie beyond the limits, or are no numbers that the axis can show, and say so below. */
  markOutliers(root, atX, log) {
    const [[x0, x1]] = this.ranges, { area, height } = this, found = { above: [], below: [], broken: [], negative: [] };
    for (const { points, levels, limits: [least, most] } of this.lines) {
      points.forEach(([x, value], at) => {
        if (x < x0 || x > x1) return;
        const kind = !Number.isFinite(value) ? "broken" : levels[at] > most ? "above" : levels[at] < least ? "below" : log && value <= 0 ? "negative" : "";
        if (kind) found[kind].push([x, value]);
      });
    }
    const top = area.top, bottom = height - area.bottom;
    const shapes = {
      above: (x) => `M${x - 4} ${top + 7}h8l-4 -7z`,
      below: (x) => `M${x - 4} ${bottom - 7}h8l-4 7z`,
      broken: (x) => `M${x - 3} ${bottom - 7}l6 6m0 -6l-6 6`,
    };
    for (const [kind, shape] of Object.entries(shapes)) {
      const places = [...new Set(found[kind].map(([x]) => Math.round(atX(x) / MARK_EVERY) * MARK_EVERY))];
      if (places.length) root.append(element("path", { class: `outlier ${kind}`, d: places.map(shape).join("") }));
    }
    this.notes.textContent = outlierNotes(found);
    this.notes.hidden = !this.notes.textContent;
  }

  /** The values of the curves at the pointer. */
  under(event) {
    const { lines, area: { width, left, right }, ranges: [[x0, x1]], given: { xName } } = this, place = this.plot.getBoundingClientRect();
    const x = x0 + (((event.clientX - place.left) * (width / place.width) - left) / (width - left - right)) * (x1 - x0);
    const log = this.tools?.options.log;
    const texts = lines.map(({ name, points, smooth }) => {
      const at = nearest(points, x), value = Number.isFinite(points[at][1]) ? number(points[at][1]) : "not finite";
      return `${name} ${value}${smooth && smooth[at] === smooth[at] ? ` (smoothed ${number(log ? 10 ** smooth[at] : smooth[at])})` : ""}`;
    });
    return `${xName} ${number(lines[0].points[nearest(lines[0].points, x)][0])}: ${texts.join(", ")}`;
  }
}

/** A series with its levels on the axis, the limits of what is drawn, and the smoothed levels where the reader wants them. */
function prepared(one, log, smoothing, unit) {
  const levels = one.points.map((point) => level(point[1], log)), bounds = limits(levels, log);
  return { ...one, levels, limits: bounds, smooth: smoothing ? smoothed(one.points, levels, smoothing, unit, bounds) : null };
}

function isInside(value, [least, most]) {
  return value >= least && value <= most;
}

function nearest(points, x) {
  let best = 0;
  for (let at = 1; at < points.length; at += 1) if (Math.abs(points[at][0] - x) < Math.abs(points[best][0] - x)) best = at;
  return best;
}

function pathOf(points, range, width, atX, atY) {
  const parts = stretches(within(points, range)).map((part) => {
    const places = thinned(part, width).map(([x, y]) => `${atX(x).toFixed(1)} ${atY(y)}`);
    return `M${places.join("L")}${places.length === 1 ? "h0" : ""}`;
  });
  return parts.join("") || "M0 0";
}

function outlierNotes({ above, below, broken, negative }) {
  return [
    above.length && `▲ ${counted(above.length)} above the chart, up to ${number(extreme(above, 1))}`,
    below.length && `▼ ${counted(below.length)} below the chart, down to ${number(extreme(below, -1))}`,
    broken.length && `× ${counted(broken.length)} not finite (NaN or infinite)`,
    negative.length && `${counted(negative.length)} at or below 0, which a logarithmic axis cannot show`,
  ].filter(Boolean).join("; ");
}

/** The most of the points' values; of sign -1 the least. */
function extreme(points, sign) {
  return points.reduce((best, [, value]) => (sign * value > sign * best ? value : best), points[0][1]);
}

function counted(count) {
  return `${number(count)} ${count === 1 ? "value" : "values"}`;
}
