// What a reader sets at a chart: a logarithmic axis and smoothing, which the browser remembers for each figure, and the part that is shown.

import { make } from "./words.js";

const MOST_SMOOTHING = 0.99;
/** Pixels of a drag that select a stretch of an axis; less is the shaking of a hand. */
const SHORTEST = 8, LOWEST = 30;
const PAN = 0.25;

/** The browser may keep nothing, or what another program wrote. */
function recall(name) {
  try {
    const found = JSON.parse(localStorage.getItem(`chart ${name}`)) ?? {};
    return { log: found.log === true, smoothing: Math.min(MOST_SMOOTHING, Math.max(0, Number(found.smoothing) || 0)) };
  } catch {
    return { log: false, smoothing: 0 };
  }
}

function remember(name, options) {
  try {
    if (options.log || options.smoothing) localStorage.setItem(`chart ${name}`, JSON.stringify(options));
    else localStorage.removeItem(`chart ${name}`);
  } catch {
    // Without storage the page forgets it at its end.
  }
}

/** Buttons in the title row of a card. `onChange` is called when the chart must be drawn again. */
export class ChartTools {
  constructor(row, onChange) {
    this.onChange = onChange;
    this.name = null;
    this.options = recall("");
    this.zoom = null;
    this.log = make("button", "", "log");
    this.log.title = "a logarithmic axis";
    this.log.addEventListener("click", () => this.set({ log: !this.options.log }));
    this.slider = make("input");
    Object.assign(this.slider, { type: "range", min: 0, max: MOST_SMOOTHING, step: 0.01, title: "weight of the earlier values in the moving average" });
    this.slider.addEventListener("input", () => this.set({ smoothing: Number(this.slider.value) }));
    this.whole = make("button", "", "whole");
    this.whole.title = "show the whole chart (double click, or key 0)";
    this.whole.addEventListener("click", () => this.show(null));
    this.log.type = this.whole.type = "button";
    row.append(this.log, make("label", "", "smooth ", this.slider), this.whole);
    this.write();
  }

  /** Use the options of a figure. Another figure or x axis is shown whole. */
  select(name, axis) {
    if (name !== this.name) this.options = recall(name);
    if (name !== this.name || axis !== this.axis) this.zoom = null;
    [this.name, this.axis] = [name, axis];
    this.write();
  }

  set(change) {
    if ("log" in change && this.zoom) this.zoom = { x: this.zoom.x, y: null };
    Object.assign(this.options, change);
    remember(this.name, this.options);
    this.show(this.zoom);
  }

  /** Show a part, {x: [from, to], y: [from, to] or null for what fits}; null: the whole. */
  show(zoom) {
    this.zoom = zoom;
    this.write();
    this.onChange();
  }

  write() {
    this.log.setAttribute("aria-pressed", String(this.options.log));
    if (Number(this.slider.value) !== this.options.smoothing) this.slider.value = this.options.smoothing;
    this.slider.setAttribute("aria-valuetext", this.options.smoothing ? `${Math.round(100 * this.options.smoothing)} %` : "none");
    this.whole.hidden = !this.zoom;
  }
}

/**
 * Let a pointer, a finger or keys choose the part of a chart. `plot` has the chart's element in it; `shown()` gives {ranges, whole, area, height} of the
 * last drawing, and `tools` takes the part.
 */
export function followSelection(plot, shown, tools) {
  const box = make("div", "selection");
  let began = null;
  const end = () => {
    began = null;
    box.remove();
  };
  plot.addEventListener("pointerdown", (event) => {
    if (event.button || !event.isPrimary) return;
    began = placeOf(event, plot, shown());
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    if (began) drawSelection(box, plot, began, placeOf(event, plot, shown()), event.pointerType === "touch");
  });
  plot.addEventListener("pointerup", (event) => {
    if (!began) return;
    const [from, to] = [began, placeOf(event, plot, shown())];
    end();
    const zoom = zoomOf(from, to, shown(), event.pointerType === "touch");
    if (zoom) tools.show(zoom);
  });
  plot.addEventListener("pointercancel", end);
  plot.addEventListener("dblclick", () => tools.show(null));
  plot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const zoom = keyed(event.key, shown(), Boolean(tools.zoom));
    if (zoom === undefined) return;
    event.preventDefault();
    event.stopPropagation();  // the same keys go through the time of the run elsewhere
    tools.show(zoom);
  });
}

/** Where a pointer is in the chart, in its own pixels and inside its axes. */
function placeOf(event, plot, { area, height }) {
  const place = plot.getBoundingClientRect(), scale = area.width / place.width;
  return {
    x: Math.max(area.left, Math.min(area.width - area.right, (event.clientX - place.left) * scale)),
    y: Math.max(area.top, Math.min(height - area.bottom, (event.clientY - place.top) * scale)),
    scale,
  };
}

function drawSelection(box, plot, from, to, wholeHeight) {
  const low = wholeHeight || Math.abs(to.y - from.y) < LOWEST, scale = to.scale;
  box.hidden = Math.abs(to.x - from.x) < SHORTEST;
  box.style.left = `${Math.min(from.x, to.x) / scale}px`;
  box.style.width = `${Math.abs(to.x - from.x) / scale}px`;
  box.style.top = low ? "0" : `${Math.min(from.y, to.y) / scale}px`;
  box.style.height = low ? "100%" : `${Math.abs(to.y - from.y) / scale}px`;
  if (!box.parentNode) plot.append(box);
}

/** The part between two places; null where they are too near to each other. A flat selection fits the height to what is in it. */
function zoomOf(from, to, { ranges: [[x0, x1], [y0, y1]], area, height }, wholeHeight) {
  if (Math.abs(to.x - from.x) < SHORTEST) return null;
  const x = (at) => x0 + ((at - area.left) / (area.width - area.left - area.right)) * (x1 - x0);
  const y = (at) => y0 + ((height - area.bottom - at) / (height - area.top - area.bottom)) * (y1 - y0);
  const tall = !wholeHeight && Math.abs(to.y - from.y) >= LOWEST;
  return { x: [x(Math.min(from.x, to.x)), x(Math.max(from.x, to.x))], y: tall ? [y(Math.max(from.y, to.y)), y(Math.min(from.y, to.y))] : null };
}

/** The part that a key asks for; undefined where the key is for something else. */
function keyed(key, { ranges: [[x0, x1]], whole: [least, most] }, zoomed) {
  const wide = x1 - x0, middle = (x0 + x1) / 2;
  if (key === "+" || key === "=") return wide > (most - least) * 1e-6 ? { x: [middle - wide / 4, middle + wide / 4], y: null } : undefined;
  if (!zoomed) return undefined;
  if (key === "0" || key === "Escape") return null;
  if (key === "-") return 2 * wide >= most - least ? null : moved([middle - wide, middle + wide], least, most);
  if (key === "ArrowLeft") return moved([x0 - PAN * wide, x1 - PAN * wide], least, most);
  if (key === "ArrowRight") return moved([x0 + PAN * wide, x1 + PAN * wide], least, most);
  return undefined;
}

/** A range, moved into the whole. */
function moved([from, to], least, most) {
  const by = from < least ? least - from : to > most ? most - to : 0;
  return { x: [from + by, to + by], y: null };
}
