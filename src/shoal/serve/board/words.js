// Numbers and times as people read them, and elements made of text: nothing that a run says ever becomes HTML.

/** An element with a class and with texts or elements in it. */
export function make(tag, className = "", ...content) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...content);
  return node;
}

/** Put elements into another, if they differ from what is there: who reads or scrolls is not disturbed. */
export function fill(node, children) {
  const box = document.createElement(node.tagName);
  box.append(...children);
  if (box.innerHTML !== node.innerHTML) node.replaceChildren(...box.childNodes);
}

export function number(value) {
  if (typeof value !== "number") return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en");
  if (size >= 1e6 || (size && size < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
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
