// Markdown as nodes of the page. Nothing that a model writes becomes HTML: there is no innerHTML here.

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

function list(lines, pattern, tag) {
  const node = make(tag);
  for (const line of lines) node.append(withInline("li", line.replace(pattern, "")));
  return node;
}

/** The nodes of a block that has no blank line in it. */
function block(text) {
  const heading = text.match(/^(#{1,6})\s+(.*)$/);
  if (heading) return withInline(`h${Math.min(6, heading[1].length + 2)}`, heading[2]);
  const lines = text.split("\n");
  const dash = /^\s*[-*+]\s+/, number = /^\s*\d+[.)]\s+/;
  if (lines.every((line) => dash.test(line))) return list(lines, dash, "ul");
  if (lines.every((line) => number.test(line))) return list(lines, number, "ol");
  return withInline("p", text);
}

/** The nodes of a text. A fence that is still open, as while it streams, runs to the end. */
export function render(text) {
  const nodes = [];
  text.split(/^```[^\n]*\n?/m).forEach((part, i) => {
    if (i % 2) {
      const pre = make("pre");
      pre.tabIndex = 0;
      pre.append(make("code", part.replace(/\n$/, "")));
      nodes.push(pre);
    } else {
      nodes.push(...part.split(/\n\s*\n/).filter((one) => one.trim()).map((one) => block(one.trim())));
    }
  });
  return nodes;
}
