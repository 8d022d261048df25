"""Resolved settings as text: YAML with origins, the history of one value, the difference of two runs."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.config.fields import MISSING, Secret, Section, as_data, did_you_mean, shorthand_of
from shoal.config.layers import DERIVED, Assignment, Key, Settings, checker_at, default_at, section_at, union_at
from shoal.config.load import LoadedConfig
from shoal.config.problems import ConfigError, Problem
from shoal.config.text import data_of
from shoal.config.text import resolve as resolve_scalar
from shoal.errors import masked

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./@+-]*(?: [A-Za-z0-9_./@+-]+)*")


def scalar(value: Any) -> str:
    """A scalar or a list as YAML on one line."""
    if isinstance(value, Secret):
        return Secret.MASK
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and resolve_scalar(value) == value else json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(scalar(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {scalar(item)}' for key, item in value.items())}}}"
    return str(value)


def to_yaml(data: dict[str, Any], comments: dict[Key, str] | None = None) -> str:
    """Nested data as YAML; `comments` are put at the end of the lines of their paths."""
    rows: list[tuple[str, str]] = []
    _rows(data, (), comments or {}, rows)
    width = min(60, max((len(line) for line, comment in rows if comment), default=0))
    return "\n".join(f"{line:<{width}}  # {comment}" if comment else line for line, comment in rows) + "\n"


def _rows(data: dict[str, Any], path: Key, comments: dict[Key, str], rows: list[tuple[str, str]]) -> None:
    indent = "  " * len(path)
    for key, value in data.items():
        here = (*path, str(key))
        name = scalar(str(key))
        if isinstance(value, dict) and value:
            rows.append((f"{indent}{name}:", ""))
            _rows(value, here, comments, rows)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            rows.append((f"{indent}{name}:", comments.get(here, "")))
            rows += [(f"{indent}  - {scalar(item)}", "") for item in value]
        else:
            rows.append((f"{indent}{name}: {scalar(value)}", comments.get(here, "")))


def show(loaded: LoadedConfig, *, origin: bool = False, style: str = "yaml") -> str:
    """The resolved run. Secrets are masked."""
    data = as_data(loaded.run)
    if style == "json":
        return json.dumps(provenance(loaded) if origin else data, indent=2, ensure_ascii=False) + "\n"
    return to_yaml(data, _origins(loaded) if origin else {})


def provenance(loaded: LoadedConfig) -> dict[str, dict[str, Any]]:
    """By setting: its value, and where it came from. Secrets are masked."""
    origins = _origins(loaded)
    return {".".join(path): {"value": as_data(value), "origin": origins[path]} for path, value in flat(loaded.run)}


def _origins(loaded: LoadedConfig) -> dict[Key, str]:
    """The origin of every setting. An argument that sets several may hold a secret beside what it is shown for."""
    secrets = [value.reveal() for _, value in flat(loaded.run) if isinstance(value, Secret) and value.reveal()]
    origins = {path: format_origin(loaded.settings.last(path)) for path, _ in flat(loaded.run)}
    return {path: functools.reduce(lambda text, secret: text.replace(secret, Secret.MASK), secrets, text) for path, text in origins.items()}


def resolved_text(data: dict[str, Any]) -> str:
    """A native file of all settings of a run. What its layers contradicted each other in was warned of, and is only warned of again."""
    return f"dialect: shoal\nresolved: true\n{_without_variables(to_yaml(data))}"


def _without_variables(text: str) -> str:
    """Variables were expanded: what looks like one is plain text from now on."""
    return text.replace("${", "$${")


def brief(loaded: LoadedConfig) -> str:
    """A native file that gives the same run: only settings that are neither defaults nor derived. Secrets are left out; they come from the
    environment again."""
    return f"dialect: shoal\n{_without_variables(to_yaml(_brief(loaded.run, (), loaded.settings)))}"


def _brief(section: Section, path: Key, settings: Settings) -> dict[str, Any]:
    data: dict[str, Any] = {}
    chosen = not _is_derived((*path, "kind"), settings)  # a kind that is written stands for a choice, after which no other is derived
    for name, field in section.fields().items():
        value, here = getattr(section, name), (*path, name)
        if isinstance(value, Section) and not shorthand_of(value):
            if value != field.default and (inner := _brief(value, here, settings)):
                data[name] = inner
        elif name == "kind" or not (isinstance(value, Secret) or value == field.default or (chosen and _is_derived(here, settings))):
            data[name] = _without_defaults(value)
    return data


def _without_defaults(value: Any) -> Any:
    """A value as plain data, without the defaults of sections in lists and mappings."""
    if isinstance(value, Section) and not shorthand_of(value):
        fields = {name: (getattr(value, name), field.default) for name, field in value.fields().items()}
        return {name: _without_defaults(one) for name, (one, default) in fields.items() if name == "kind" or one != default}
    if isinstance(value, tuple):
        return [_without_defaults(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _without_defaults(one) for key, one in value.items()}
    return as_data(value, mask=None)


def _is_derived(path: Key, settings: Settings) -> bool:
    assignment = settings.last(path)
    return assignment is not None and assignment.layer.name == DERIVED


def flat(section: Section, path: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every setting below a section, with its path."""
    for name in section.fields():
        value = getattr(section, name)
        if short := shorthand_of(value):
            yield (*path, name), short
        elif isinstance(value, Section):
            yield from flat(value, (*path, name))
        elif hasattr(value, "items") and value:
            for key, item in value.items():
                if isinstance(item, Section):
                    yield from flat(item, (*path, name, key))
                else:
                    yield (*path, name, key), item
        else:
            yield (*path, name), value


def format_origin(assignment: Assignment | None) -> str:
    """The origin of a value: file and line, option, or reason."""
    return (assignment.because or _where(assignment)) if assignment else "default"


def _where(assignment: Assignment) -> str:
    span = assignment.node.span
    if span.source.kind == "command line":
        return masked(span.source.lines[0])
    return span.source.name if span.source.kind != "file" else f"{span.source.name}:{span.line}:{span.column}"


def explain(loaded: LoadedConfig, dotted: str) -> str:
    """The value of a setting, its origin, the values that it overrides, and its meaning."""
    settings, path = loaded.settings, tuple(dotted.split("."))
    value: Any = loaded.run
    for name in path:
        value = value.get(name) if hasattr(value, "get") else getattr(value, name)
    short = shorthand_of(value)
    if isinstance(value, Section) and not short:
        return to_yaml({dotted: as_data(value)})
    rows = [f"{dotted} = {_quoted(value)}"]
    rows += _history_lines(settings, (*path, "kind") if short else path)
    meaning = description(path, settings)
    rows += [f"  meaning   {meaning}"] if meaning else []
    rows.append(f"  takes     {_takes(path, settings)}")
    return "\n".join(rows) + "\n"


def _takes(path: Key, settings: Settings) -> str:
    """The type of a setting and its default. The `kind` of a union takes any of the union's kinds."""
    union = union_at(path[:-1], settings.kinds) if path[-1] == "kind" else None
    if union is not None:
        return f"one of {', '.join(f'`{kind}`' for kind in union.kinds)}; {_default(default_at(path))}"
    checker = checker_at(path, settings.kinds)
    return f"{checker.expected if checker else 'a value'}; {_default(default_at(path, settings.kinds))}"


def _default(value: Any) -> str:
    return "required" if value is MISSING else f"default {_quoted(value)}"


def _quoted(value: Any) -> str:
    data = as_data(value)
    return json.dumps(data, ensure_ascii=False) if isinstance(data, str) and not isinstance(value, Secret) else scalar(data)


def _history_lines(settings: Settings, path: Key) -> list[str]:
    winner = settings.last(path)
    overridden = [assignment for assignment in settings.history.get(path, []) if assignment is not winner][::-1]
    lines: list[tuple[str, str, str, str]] = []
    if winner is None:
        lines.append(("set by", "default", "", ""))
    elif winner.because:
        lines.append(("set by", winner.layer.name, winner.because, ""))
    else:
        lines.append(("set by", winner.layer.name, _where(winner), _as_written(winner, path)))
    secret = is_secret(path, settings)
    shown = {id(old): Secret.MASK if secret else _quoted(data_of(old.node)) for old in settings.assignments}
    lines += [("overrides", old.layer.name, format_origin(old), f"(was {shown.get(id(old), '')})") for old in overridden]
    for assignment, reason, _ in settings.dropped:
        if assignment.path == path:
            lines.append(("not used", assignment.layer.name, format_origin(assignment), f"({shown[id(assignment)]}: {reason})"))
    width = max(len(layer) for _, layer, _, _ in lines)
    return [f"  {verb:<9} {layer:<{width}}  {where}  {more}".rstrip() for verb, layer, where, more in lines]


def is_secret(path: Key, settings: Settings) -> bool:
    checker = checker_at(path, settings.kinds)
    return checker is None or "secret" in checker.expected


def _as_written(assignment: Assignment, path: Key) -> str:
    spelling = assignment.node.user_path
    return f"(as `{spelling}`)" if spelling and spelling != ".".join(path) else ""


def diff(before: LoadedConfig, after: LoadedConfig) -> str:
    """The settings that differ, with their origins; empty if none does."""
    old, new = dict(flat(before.run)), dict(flat(after.run))
    rows = []
    for path in dict.fromkeys([*old, *new]):
        missing = object()
        left, right = old.get(path, missing), new.get(path, missing)
        if left == right:
            continue
        rows.append(".".join(path))
        if left is not missing:
            rows.append(f"  - {_quoted(left):<24} {format_origin(before.settings.last(path))}")
        if right is not missing:
            rows.append(f"  + {_quoted(right):<24} {format_origin(after.settings.last(path))}")
    return "\n".join(rows) + "\n" if rows else ""


def description(path: Key, settings: Settings) -> str:
    """The description of a setting: its docstring in the schema."""
    from shoal.config.field_docs import field_docs  # it imports inspect, which most commands do without

    section = section_at(path[:-1], settings.kinds)
    return field_docs(section).get(path[-1], "") if section else ""


def find_setting(loaded: LoadedConfig, wanted: str) -> str:
    """The native path of a setting, from a native path, a path of the files' dialects, or the end of either. Raises ConfigError."""
    known = [".".join(path) for path, _ in flat(loaded.run)]
    sections = {".".join(path.split(".")[:depth]) for path in known for depth in range(1, path.count(".") + 1)}
    if wanted in known or wanted in sections:
        return wanted
    spelled = {a.node.user_path: ".".join(path) for path, history in loaded.settings.history.items() for a in history if not a.because}
    if wanted in spelled:
        return spelled[wanted]
    ends = [path for path in known if path.endswith(f".{wanted.replace('-', '_')}")]
    ends += [path for spelling, path in spelled.items() if spelling.endswith(f".{wanted}") and path not in ends]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise ConfigError([Problem("ambiguous-path", f"`{wanted}` could mean {' or '.join(f'`{path}`' for path in ends)}")])
    help = did_you_mean(wanted, known) or did_you_mean(wanted, spelled) or "`shoal config show FILE…` lists them all"
    raise ConfigError([Problem("unknown-key", f"no setting `{wanted}` in this configuration", path=wanted, help=help)])
