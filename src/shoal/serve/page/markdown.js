// Markdown as nodes of the page. Nothing that a model writes becomes HTML: there is no innerHTML here.

import { copyButton } from "./copy.js";

const INLINE = /(`[^`\n]+`)|\*\*([^*\n]+)\*\*|\*([^*\n]+)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/g;

function make(tag, text) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  return node;
}

function link(text, address) {
  const node = make("a", text);
  node.href = address;
  node.rel = "noopener noreferrer";
  node.target = "_blank";
  return node;
}

/** The nodes of one line of text. */
function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(document.createTextNode(text.slice(end, match.index)));
    const [whole, code, bold, italic, label, address] = match;
    if (code) nodes.push(make("code", code.slice(1, -1)));
    else if (bold) nodes.push(make("strong", bold));
    else if (italic) nodes.push(make("em", italic));
    else nodes.push(link(label, address));
    end = match.index + whole.length;
  }
  nodes.push(document.createTextNode(text.slice(end)));
  return nodes;
}

function withInline(tag, text) {
  const node = make(tag);
  text.split("\n").forEach((line, i) => {
    if (i) node.append(make("br"));
    node.append(...inline(line));
  });
  return node;
}

const DASH = /^\s*[-*+]\s+/, NUMBER = /^\s*(\d+)[.)]\s+/, HEADING = /^(#{1,6})\s+(.*)$/, INDENTED = /^\s{2,}\S/;

/** The line below a table's first row, as in `|---|:-:|`; and the most columns, because each row is filled up to as many. */
const RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/, MOST_COLUMNS = 50;

/** The cells of a table's row. A pipe that belongs to a cell is written `\|`. */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function beginsTable(line, next) {
  if (!line.includes("|") || !RULE.test(next ?? "")) return false;
  const columns = cells(line).length;
  return columns <= MOST_COLUMNS && columns === cells(next).length;
}

/** A table in a box that scrolls sideways. */
function table([first, rule, ...rows]) {
  const sides = cells(rule).map((one) => (one.endsWith(":") ? (one.startsWith(":") ? "middle" : "right") : ""));
  const row = (tag, line) => {
    const texts = cells(line), node = make("tr");
    node.append(...sides.map((side, at) => {
      const cell = withInline(tag, texts[at] ?? "");
      if (side) cell.className = side;
      return cell;
    }));
    return node;
  };
  const node = make("table"), head = make("thead"), body = make("tbody"), box = make("div");
  head.append(row("th", first));
  body.append(...rows.map((line) => row("td", line)));
  node.append(head, body);
  box.className = "wide";
  box.tabIndex = 0;
  box.append(node);
  return box;
}

function kindOf(line, next, before) {
  if (beginsTable(line, next) || (before === "table" && line.includes("|"))) return "table";
  if (HEADING.test(line)) return "heading";
  if (DASH.test(line)) return "ul";
  if (NUMBER.test(line)) return "ol";
  return INDENTED.test(line) && (before === "ul" || before === "ol") ? before : "p";
}

function list(lines, tag) {
  const node = make(tag), pattern = tag === "ul" ? DASH : NUMBER, items = [];
  for (const line of lines) {
    if (pattern.test(line)) items.push(line.replace(pattern, ""));
    else items[items.length - 1] += `\n${line.trim()}`;
  }
  if (tag === "ol") node.start = Number(lines[0].match(NUMBER)[1]);
  node.append(...items.map((item) => withInline("li", item)));
  return node;
}

/** The nodes of a block that has no blank line in it: headings, lists, tables and paragraphs may follow each other line by line. */
function block(text) {
  const runs = [];
  const lines = text.split("\n");
  lines.forEach((line, at) => {
    const last = runs[runs.length - 1], kind = kindOf(line, lines[at + 1], last?.kind);
    if (last && kind === last.kind && kind !== "heading") last.lines.push(line);
    else runs.push({ kind, lines: [line] });
  });
  return runs.map(({ kind, lines }) => {
    if (kind === "heading") {
      const [, marks, title] = lines[0].match(HEADING);
      return withInline(`h${Math.min(6, marks.length + 2)}`, title);
    }
    if (kind === "table") return table(lines);
    return kind === "p" ? withInline("p", lines.join("\n")) : list(lines, kind);
  });
}

function program(text) {
  const box = make("div"), pre = make("pre");
  box.className = "code";
  pre.tabIndex = 0;
  pre.append(make("code", text));
  box.append(copyButton("Copy the code", () => text), pre);
  return box;
}

/** The nodes of a text. A fence that is still open, as while it streams, runs to the end. */
export function render(text) {
  const nodes = [];
  text.split(/^```[^\n]*\n?/m).forEach((part, i) => {
    if (i % 2) {
      nodes.push(program(part.replace(/\n$/, "")));
    } else {
      nodes.push(...part.split(/\n\s*\n/).filter((one) => one.trim()).flatMap((one) => block(one.trim())));
    }
  });
  return nodes;
}
