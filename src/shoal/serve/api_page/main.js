// The API's documentation, made from openapi.json.

import { example, fields, resolve, typeName } from "./schema.js";

const find = (id) => document.getElementById(id);

function element(tag, text = "", className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

function table(schema, spec) {
  const rows = fields(schema, spec);
  if (!rows.length) return element("p", typeName(schema, spec), "note");
  const box = element("div", "", "table"), node = element("table"), head = element("tr");
  head.append(...["field", "type", "meaning"].map((word) => element("th", word)));
  node.append(head, ...rows.map(row));
  box.append(node);
  return box;
}

function row(field) {
  const node = element("tr"), name = element("td", field.name), meaning = element("td", field.description);
  if (field.required) name.append(element("span", " *", "needed"));
  node.append(name, element("td", field.type), meaning);
  return node;
}

function requestParts(operation, spec) {
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  if (!body) return [];
  return [element("h3", "Request body (JSON; * is required)"), table(body, spec), ...nested(body, spec)];
}

/** A table for each schema that a body refers to, directly or not, such as a message of a chat. */
function nested(schema, spec, seen = new Set()) {
  return fields(schema, spec).flatMap((field) => field.refers).flatMap((name) => {
    if (seen.has(name)) return [];
    seen.add(name);
    const found = spec.components.schemas[name];
    return [element("h4", name), table(found, spec), ...nested(found, spec, seen)];
  });
}

function responseParts(operation, spec) {
  const parts = [element("h3", "Responses")];
  for (const [code, response] of Object.entries(operation.responses)) {
    const details = element("details"), summary = element("summary", `${code} ${response.description ?? ""}`);
    details.append(summary);
    for (const [type, content] of Object.entries(response.content ?? {})) {
      details.append(element("h4", type), ...(content.schema ? [table(content.schema, spec), ...nested(content.schema, spec)] : []));
    }
    parts.push(details);
  }
  return parts;
}

function command(method, path, operation, spec, model) {
  const words = [`curl ${location.origin}${path}`];
  if (operation.security) words.push('-H "Authorization: Bearer $SHOAL_API_KEY"');
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  if (body) words.push("-H 'Content-Type: application/json'", `-d '${JSON.stringify(example(resolve(body, spec), spec, model))}'`);
  return element("pre", words.join(" \\\n  "));
}

function operationNode(path, method, operation, spec, model) {
  const node = element("article", "", "operation"), title = element("h2");
  node.id = operation.operationId;
  title.append(element("span", method.toUpperCase(), "method"), element("span", path, "path"));
  if (operation.security) title.append(" ", element("span", "needs the key", "key"));
  const text = element("p", operation.description ?? operation.summary);
  node.append(title, text, command(method, path, operation, spec, model));
  node.append(...requestParts(operation, spec), ...responseParts(operation, spec));
  return node;
}

function link(path, method, operation) {
  const node = element("li"), anchor = element("a", `${method.toUpperCase()} ${path}`, "path");
  anchor.href = `#${operation.operationId}`;
  node.append(anchor);
  return node;
}

function show(spec, model) {
  find("title").textContent = `${spec.info.title} ${spec.info.version}: API`;
  document.title = `${spec.info.title} API`;
  find("about").textContent = spec.info.description ?? "";
  for (const [path, methods] of Object.entries(spec.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      find("contents").append(link(path, method, operation));
      find("operations").append(operationNode(path, method, operation, spec, model));
    }
  }
  find("state").textContent = "";
}

try {
  const answer = await fetch("../openapi.json");
  if (!answer.ok) throw new Error(`openapi.json: ${answer.status}`);
  const health = await fetch("../health");
  show(await answer.json(), (health.ok && (await health.json()).model) || "MODEL");
} catch (error) {
  find("state").textContent = error.message;
  find("state").className = "bad";
}
