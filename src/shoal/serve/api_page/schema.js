// JSON schemas in words.

const PREFIX = "#/components/schemas/";

export function resolve(schema, spec) {
  return schema.$ref ? spec.components.schemas[schema.$ref.slice(PREFIX.length)] : schema;
}

/** The names of the schemas that a schema refers to. */
function references(schema) {
  if (schema.$ref) return [schema.$ref.slice(PREFIX.length)];
  return [...(schema.anyOf ?? []), ...(schema.items ? [schema.items] : [])].flatMap(references);
}

function bounds(schema) {
  const least = schema.minimum ?? schema.minLength ?? schema.minItems ?? schema.exclusiveMinimum;
  const most = schema.maximum ?? schema.maxLength ?? schema.maxItems ?? schema.maxProperties ?? schema.exclusiveMaximum;
  const unit = { string: " letters", array: " entries", object: " entries" }[schema.type] ?? "";
  if (least === undefined && most === undefined) return "";
  if (most === undefined) return ` (${least} or more${unit})`;
  return least === undefined ? ` (up to ${most}${unit})` : ` (${least} to ${most}${unit})`;
}

export function typeName(schema, spec) {
  if (schema.$ref) return schema.$ref.slice(PREFIX.length);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.anyOf) return schema.anyOf.filter((one) => one.type !== "null").map((one) => typeName(one, spec)).join(" | ");
  if (schema.type === "array" && schema.items) return `list of ${typeName(schema.items, spec)}${bounds(schema)}`;
  if (schema.type === "object" && schema.additionalProperties?.type) {
    return `object of ${typeName(schema.additionalProperties, spec)}${bounds(schema)}`;
  }
  return `${schema.type ?? "anything"}${bounds(schema)}`;
}

/** The fields of an object: name, type, whether it is required, what it means, and the schemas that it refers to. */
export function fields(schema, spec) {
  const found = resolve(schema, spec), required = new Set(found.required ?? []);
  const entries = Object.entries(found.properties ?? {}).sort(([one], [other]) => required.has(other) - required.has(one));
  return entries.map(([name, one]) => ({
    name,
    type: typeName(one, spec),
    required: required.has(name),
    description: [one.description, defaultText(one)].filter(Boolean).join(" "),
    refers: references(one),
  }));
}

function defaultText(schema) {
  const value = schema.default;
  if (value === undefined || value === null || (typeof value === "object" && !Object.keys(value).length)) return "";
  return typeof value === "object" ? "" : `Default: ${JSON.stringify(value)}.`;
}

/** A body with every required field, and a message's text. */
export function example(schema, spec, model) {
  const shown = (name) => schema.required?.includes(name) || name === "content";
  const entries = Object.entries(schema.properties ?? {}).filter(([name]) => shown(name));
  return Object.fromEntries(entries.map(([name, one]) => [name, value(name, one, spec, model)]));
}

function value(name, schema, spec, model) {
  const found = resolve(schema, spec);
  if (found.enum) return found.enum.includes("user") ? "user" : found.enum[0];
  if (found.anyOf) return value(name, found.anyOf[0], spec, model);
  if (found.type === "array") return [value(name, found.items, spec, model)];
  if (found.type === "object") return example(found, spec, model);
  return found.type === "string" ? { model, content: "Hello!", prompt: "Once upon a time" }[name] ?? "text" : found.minimum ?? 0;
}
