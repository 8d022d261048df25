"""Documents made from the schema: JSON Schema, and docs/settings.md and docs/dialects.md."""

from __future__ import annotations

from typing import Any

from shoal.config import fields as f
from shoal.config.dialects import DIALECTS
from shoal.config.dialects.table import Dialect
from shoal.config.field_docs import field_docs
from shoal.config.fields import MISSING, Checker, Section, as_data
from shoal.config.schema import Run
from shoal.config.show import scalar

OLD_COMMANDS = {
    "classroom": ("classroom.md",),
    "smolcluster": ("shelf.md", "serving.md"),
    "dist-llm-train": ("volunteers.md",),
    "diloco": ("islands.md",),
    "ava": ("rack.md", "feedback.md"),
}
"""By dialect: the pages whose first table says what one types now in place of the earlier program's commands."""

_INTERPOLATED = {"type": "string", "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*(:[-?][^}]*)?\}", "description": "taken from the environment"}


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a native file. `${…}` may stand for any value."""
    definitions: dict[str, Any] = {}
    root = _section(Run, definitions)
    root["properties"]["dialect"] = {"enum": [*DIALECTS, "shoal"], "description": "the vocabulary of this file"}
    root["properties"]["resolved"] = {"type": "boolean", "description": "a run wrote this file from all of its settings"}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Shoal run"}
    return head | root | {"$defs": definitions}


def _section(section: type[Section], definitions: dict[str, Any]) -> dict[str, Any]:
    docs = field_docs(section)
    properties = {}
    for name, field in section.fields().items():
        schema = _of(field.checker, definitions)
        if docs.get(name):
            schema = schema | {"description": docs[name]}
        if field.default is not MISSING:
            schema = schema | {"default": as_data(field.default)}
        properties[name] = schema
    schema = {"type": "object", "description": (section.__doc__ or "").strip(), "properties": properties, "additionalProperties": False}
    required = [name for name, field in section.fields().items() if field.default is MISSING]
    return schema | ({"required": required} if required else {})


def _reference(section: type[Section], definitions: dict[str, Any]) -> dict[str, Any]:
    name = section.__name__ if section.__module__.startswith("shoal.") else f"{section.__module__}.{section.__name__}"
    if name not in definitions:
        definitions[name] = {}
        definitions[name] = _section(section, definitions)
    return {"$ref": f"#/$defs/{name}"}


def _of(checker: Checker, definitions: dict[str, Any]) -> dict[str, Any]:
    match checker:
        case f.OptionalType():
            return {"anyOf": [_of(checker.item, definitions), {"type": "null"}]}
        case f.SectionType():
            return {"anyOf": [_reference(checker.section, definitions), {"type": "null"}]}
        case f.TaggedType():
            kinds = [_reference(section, definitions) for section in checker.kinds.values()]
            mapping = {"type": "object", "properties": {"kind": {"enum": list(checker.kinds)}}, "anyOf": kinds}
            return {"anyOf": [{"enum": list(checker.kinds)}, _INTERPOLATED, mapping]} if checker.shorthand else mapping
        case f.ListType():
            return {"type": "array", "items": _of(checker.item, definitions)}
        case f.MappingType():
            return {"type": "object", "additionalProperties": _of(checker.item, definitions)}
        case f.ChoiceType():
            return {"anyOf": [{"enum": list(checker.choices)}, _INTERPOLATED]}
        case f.SwitchType():
            return {"anyOf": [{"type": "boolean"}, {"enum": [checker.word]}, _INTERPOLATED]}
        case f.BoolType():
            return {"anyOf": [{"type": "boolean"}, _INTERPOLATED]}
        case f.NumberType():
            names = {"at_least": "minimum", "above": "exclusiveMinimum", "at_most": "maximum", "below": "exclusiveMaximum"}
            limits = {names[name]: limit for name, limit in checker.bounds._asdict().items() if limit is not None}
            word = [{"enum": [checker.word]}] if isinstance(checker, f.NumberOrWordType) else []
            return {"anyOf": [{"type": "integer" if checker.whole else "number"} | limits, *word, _INTERPOLATED]}
        case f.TextType():
            return {"type": "string"}
        case f.SecretType():
            return {"type": ["string", "integer"], "writeOnly": True}
    return {}


def settings_page() -> str:
    """docs/settings.md: every setting, its type, its default, its meaning."""
    rows = ["# Settings", "", "Every setting of a native file. Generated from the schema by `make docs`; do not edit.", ""]
    _page(Run, "", rows)
    return "\n".join(rows).rstrip() + "\n"


def _page(section: type[Section], path: str, rows: list[str], within: tuple[type[Section], ...] = ()) -> None:
    """Add a section and those below it. `within`: the enclosing sections, so that a recursive one (a sum of rewards) appears once."""
    title = path.rstrip(".") or "At the top"
    kind = section.fields().get("kind")
    tagged = kind.default if kind and isinstance(kind.checker, f.ChoiceType) and len(kind.checker.choices) == 1 else None
    rows += [f"## {title}" + (f", kind `{tagged}`" if tagged else ""), "", (section.__doc__ or "").strip(), ""]
    docs, below = field_docs(section), []
    table = []
    for name, field in section.fields().items():
        inner = field.checker.item if isinstance(field.checker, f.OptionalType) else field.checker
        if isinstance(inner, (f.SectionType, f.TaggedType)):
            below += [(item, f"{path}{name}.") for item in inner.sections() if not (item._shorthand and len(item.fields()) == 1)]
            if not isinstance(inner, f.TaggedType) or not inner.shorthand:
                continue
        if isinstance(inner, (f.ListType, f.MappingType)):
            star = "NAME" if isinstance(inner, f.MappingType) else "[]"
            below += [(item, f"{path}{name}.{star}.") for item in inner.sections() if len(item.fields()) > 1]
        if name == "kind" and tagged:
            continue
        default = "required" if field.default is MISSING else f"`{scalar(as_data(field.default))}`"
        table.append(f"| `{name}` | {_escape(field.checker.expected)} | {default} | {_escape(docs.get(name, ''))} |")
    if table:
        rows += ["| setting | takes | default | meaning |", "|---|---|---|---|", *table, ""]
    for item, where in below:
        if item not in within:
            _page(item, where, rows, (*within, section))


def dialects_page() -> str:
    """docs/dialects.md: every key of every dialect, and where it goes."""
    rows = [
        "# Dialects",
        "",
        "Files of five earlier programs load unchanged. Each dialect is a table from its keys to Shoal's settings;",
        "`shoal config migrate FILE` rewrites a file with Shoal's keys. Generated from the tables by `make docs`; do not edit.",
        "",
        "This page lists keys. What to type now in place of a program's commands:",
        "",
        "| files of | for | you used to type / now | keys |",
        "|---|---|---|---|",
        *(_old_commands(dialect) for dialect in DIALECTS.values()),
        "",
        "`strategy[syncps].window` is the setting `strategy.window`, which takes effect if `strategy.kind` is `syncps`.",
        "",
    ]
    for dialect in DIALECTS.values():
        rows += [f"## {dialect.name}", "", f"{dialect.title}.", "", "| key | setting | default |", "|---|---|---|"]
        for entry in dialect.rows:
            spellings = [f"`{entry.path}`", *(f"`{path}`" for path in entry.also), *(f"`{path}` (old)" for path in entry.old)]
            default = f"`{scalar(entry.default)}`" if entry.has_default else ""
            note = f" (gives way to `{entry.yields_to}`)" if entry.yields_to else ""
            rows.append(f"| {', '.join(spellings)} | {', '.join(f'`{target}`' for target in entry.to)}{note} | {default} |")
        rows.append("")
    return "\n".join(rows).rstrip() + "\n"


def _old_commands(dialect: Dialect) -> str:
    """A row that leads to the commands and to the keys of an earlier program."""
    pages = " and ".join(f"[{page}]({page})" for page in OLD_COMMANDS[dialect.name])
    return f"| {dialect.name} | {dialect.title} | the table at the top of {pages} | [below](#{dialect.name}) |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
