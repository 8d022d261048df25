"""Reads YAML 1.2 with the position of every key and value, in time proportional to the input's size.

PyYAML parses events only. Its own tree follows YAML 1.1, where `6e-4` is text and `no` is false, has no positions, and limits neither
depth nor aliases nor repeated keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Union

import yaml

from shoal.config.problems import Label, Problem
from shoal.config.source_span import SourceText, Span

MAX_BYTES = 1 << 20
MAX_DEPTH = 50
MAX_NODES = 100_000

Report = Callable[[Problem], None]
Scalar = Union[str, int, float, bool, None]

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|(?:0|[1-9][0-9]*)(?=[eE]))(?:[eE][-+]?[0-9]+)?")
_WORDS: dict[str, Scalar] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_WORDS |= {f"{sign}.{name}": float(f"{sign}inf") for sign in ("", "+", "-") for name in ("inf", "Inf", "INF")}
_WORDS |= {f".{name}": float("nan") for name in ("nan", "NaN", "NAN")}
_VARIABLE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::([-?])([^}]*))?\})?")
_TAGS = {"tag:yaml.org,2002:" + name: name for name in ("str", "int", "float", "bool", "null", "seq", "map")}


class YamlNode:
    """A value with its position: a dict of YamlEntry, a list of YamlNode, or a Scalar.

    `user_path` is the path in the user's spelling, also after translation from a dialect.
    """

    __slots__ = ("plain", "raw", "span", "user_path", "value")

    def __init__(self, value: Any, span: Span, *, raw: str | None = None, plain: bool = False, user_path: str = "") -> None:
        self.value = value
        self.span = span
        self.raw = raw
        self.plain = plain
        self.user_path = user_path

    def replaced(self, value: Any) -> YamlNode:
        """Another value at the same position."""
        return YamlNode(value, self.span, raw=self.raw, user_path=self.user_path)

    def get(self, key: str) -> YamlNode | None:
        entry = self.value.get(key) if isinstance(self.value, dict) else None
        return entry.value if entry else None


class YamlEntry(NamedTuple):
    """A key of a mapping with its position, and its value."""

    key: Span
    value: YamlNode


def data_of(node: YamlNode) -> Any:
    """The plain Python value of a node."""
    if isinstance(node.value, dict):
        return {key: data_of(entry.value) for key, entry in node.value.items()}
    if isinstance(node.value, list):
        return [data_of(item) for item in node.value]
    return node.value


def node_of(data: Any, span: Span, user_path: str = "") -> YamlNode:
    """A node for plain Python data, all at one position."""
    if isinstance(data, Mapping):
        entries = {str(key): YamlEntry(span, node_of(value, span, f"{user_path}.{key}".lstrip("."))) for key, value in data.items()}
        return YamlNode(entries, span, user_path=user_path)
    if isinstance(data, (list, tuple)):
        return YamlNode([node_of(item, span, f"{user_path}[{i}]") for i, item in enumerate(data)], span, user_path=user_path)
    return YamlNode(data, span, user_path=user_path)


def python_node(data: Mapping[str, Any], name: str, user_path: str = "", key_style: str = '["{}"]') -> YamlNode:
    """A node for a mapping from Python; positions are expressions such as `config["training"]["epochs"]`."""
    entries: dict[str, YamlEntry] = {}
    for key, value in data.items():
        place, path = name + key_style.format(key), f"{user_path}.{key}".lstrip(".")
        span = SourceText(place, kind="python").whole()
        entries[str(key)] = YamlEntry(span, python_node(value, place, path) if isinstance(value, Mapping) else node_of(value, span, path))
    return YamlNode(entries, SourceText(name, kind="python").whole(), user_path=user_path)


def read(path: str, report: Report, *, name: str = "", layer: str = "", order: int = 0) -> YamlNode | None:
    """The tree of a file; None after a reported problem that makes it unreadable."""
    source = SourceText(name or path, layer=layer, order=order)

    def refuse(code: str, message: str, help: str = "") -> YamlNode | None:
        report(Problem(code, message, (Label(source.whole()),), help=help))
        return None

    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return refuse("missing-file", f"there is no file `{path}`", _near(path))
    except IsADirectoryError:
        inside = sorted(name for name in os.listdir(path) if name.endswith((".yaml", ".yml")))
        return refuse(
            "not-a-file", f"`{path}` is a directory", f"name a file in it: {', '.join(inside[:6])}" if inside else "name a YAML file"
        )
    except (OSError, ValueError) as error:
        return refuse(
            "unreadable-file", f"cannot read `{path!r}`: {getattr(error, 'strerror', None) or error}".replace("`'", "`").replace("'`", "`")
        )
    if len(content) > MAX_BYTES:
        return refuse("too-large", f"`{path}` is larger than {MAX_BYTES >> 20} MiB, which no configuration is", "is this a data file?")
    if b"\0" in content:
        return refuse("binary-file", f"`{path}` is not text", "a configuration is YAML text in UTF-8")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line = before.count(b"\n") + 1
        source.lines = content.decode("utf-8", "replace").split("\n")
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8", "replace")) + 1
        message = f"`{path}` is not UTF-8: byte 0x{content[error.start]:02x}"
        report(Problem("not-utf8", message, (Label(Span(source, line, column, 1)),), help="save the file as UTF-8"))
        return None
    source.lines = text.split("\n")
    return parse(text, source, report)


def parse(text: str, source: SourceText, report: Report) -> YamlNode | None:
    """The tree of a text; None after a reported problem."""
    try:
        root = _Composer(text, source, report).document()
    except _StopError as stop:
        report(stop.problem)
        return None
    except yaml.YAMLError as error:
        report(_syntax(error, source))
        return None
    except (ValueError, UnicodeError, RecursionError) as error:  # libyaml's reader, on characters that YAML does not allow
        report(Problem("syntax", f"not YAML: {error}", (Label(source.whole()),)))
        return None
    if root is None or root.value is None:
        message, help = f"`{source.name}` holds no settings", "`shoal init` writes a file to start from"
        report(Problem("empty-file", message, (Label(source.whole()),), help=help))
        return None
    if not isinstance(root.value, dict):
        message = f"a configuration is a mapping of keys to values, this is {describe(root.value)}"
        report(Problem("wrong-type", message, (Label(root.span, "expected `key: value`"),)))
        return None
    return root


def parse_value(text: str, span: Span, report: Report, user_path: str) -> YamlNode:
    """The value of a `key=value` argument or an environment variable, all at one position."""
    problems: list[Problem] = []
    try:
        root = _Composer(text, SourceText(""), problems.append).document()
        if not problems:
            return node_of(data_of(root) if root else None, span, user_path)
    except (_StopError, yaml.YAMLError, ValueError, UnicodeError, RecursionError):
        pass
    return YamlNode(text, span, user_path=user_path)


def resolve(text: str) -> Scalar:
    """The value of a plain (unquoted) scalar in YAML 1.2. `08` and `1_000` stay text."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        if _INT.fullmatch(text):
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
    except ValueError:  # more digits than Python reads
        return text
    return text


def describe(value: object) -> str:
    """A value as shown in messages."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return f"the text `{value[:60]}{'…' if len(value) > 60 else ''}`"
    return f"`{str(value)[:40]}`"


def interpolate(node: YamlNode, environ: Mapping[str, str], report: Report) -> YamlNode:
    """The node with `${VAR}`, `${VAR:-default}` and `${VAR:?why}` replaced in every value. `$${` is a plain `${`."""
    if isinstance(node.value, dict):
        entries = {key: YamlEntry(entry.key, interpolate(entry.value, environ, report)) for key, entry in node.value.items()}
        return node.replaced(entries)
    if isinstance(node.value, list):
        return node.replaced([interpolate(item, environ, report) for item in node.value])
    if not isinstance(node.value, str) or "${" not in node.value:
        return node

    def expand(match: re.Match[str]) -> str:
        name, operator, argument = match.group(1), match.group(2), match.group(3)
        if match.group().startswith("$$"):
            return "${"
        if name is None:
            help = "write ${NAME}, ${NAME:-default} or ${NAME:?why}; for a plain `${` write `$${`"
            report(Problem("bad-variable", "`${` starts a variable that does not end well", (Label(node.span),), node.user_path, help))
            return ""
        value = environ.get(name, "")
        if value or (name in environ and not operator):
            return value
        if operator == "-":
            return argument
        message = f"environment variable `{name}` is not set" + (f": {argument}" if argument else "")
        help = f"export {name}=…, or give a default: ${{{name}:-default}}"
        report(Problem("unset-variable", message, (Label(node.span),), node.user_path, help))
        return ""

    expanded = _VARIABLE.sub(expand, node.value)
    whole = _VARIABLE.fullmatch(node.value) is not None
    return node.replaced(resolve(expanded) if node.plain and (whole or "$" not in expanded) else expanded)


def unescape(node: YamlNode) -> YamlNode:
    """The node with a plain `${` for every `$${`, and nothing else replaced: for settings that another machine has interpolated."""
    if isinstance(node.value, dict):
        return node.replaced({key: YamlEntry(entry.key, unescape(entry.value)) for key, entry in node.value.items()})
    if isinstance(node.value, list):
        return node.replaced([unescape(item) for item in node.value])
    return node.replaced(node.value.replace("$${", "${")) if isinstance(node.value, str) and "$${" in node.value else node


class _StopError(Exception):
    def __init__(self, problem: Problem) -> None:
        self.problem = problem


class _Composer:
    """Builds nodes from PyYAML's events."""

    def __init__(self, text: str, source: SourceText, report: Report) -> None:
        self.source = source
        self.report = report
        self.events: Iterator[Any] = yaml.parse(text, Loader=_Loader)
        self.anchors: dict[str, YamlNode | None] = {}
        self.count = 0

    def document(self) -> YamlNode | None:
        root: YamlNode | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise self.stop(
                        "many-documents", "a second document starts here", event, "keep one document a file, and name the files in order"
                    )
                root = self.node(next(self.events), 0, "")
        return root

    def stop(self, code: str, message: str, event: Any, help: str = "") -> _StopError:
        return _StopError(Problem(code, message, (Label(self.span(event)),), help=help))

    def span(self, event: Any) -> Span:
        start, end = event.start_mark, event.end_mark
        column = start.column + 1
        line = self.source.line(start.line + 1) or ""
        last = end.column if end.line == start.line else len(line)
        return Span(self.source, start.line + 1, column, max(1, last - start.column))

    def node(self, event: Any, depth: int, path: str) -> YamlNode:
        self.count += 1
        if self.count > MAX_NODES:
            raise self.stop(
                "too-many-values", f"more than {MAX_NODES:,} values, aliases counted each time", event, "no configuration is so large"
            )
        if depth > MAX_DEPTH:
            raise self.stop("too-deep", f"nested more than {MAX_DEPTH} levels deep", event)
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, depth, path)
        anchor = event.anchor
        if anchor:
            self.anchors[anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            node = self.scalar(event, path)
        elif isinstance(event, yaml.SequenceStartEvent):
            self.check_tag(event, "seq")
            node = YamlNode([], self.span(event), user_path=path)
            while not isinstance(item := next(self.events), yaml.SequenceEndEvent):
                node.value.append(self.node(item, depth + 1, f"{path}[{len(node.value)}]"))
        else:
            node = self.mapping(event, depth, path)
        if anchor:
            self.anchors[anchor] = node
        return node

    def mapping(self, event: Any, depth: int, path: str) -> YamlNode:
        self.check_tag(event, "map")
        entries: dict[str, YamlEntry] = {}
        merged: list[YamlNode] = []
        while not isinstance(key := next(self.events), yaml.MappingEndEvent):
            if not isinstance(key, yaml.ScalarEvent):
                raise self.stop("bad-key", "a key is a plain word here", key)
            name, span = key.value, self.span(key)
            value = self.node(next(self.events), depth + 1, f"{path}.{name}".lstrip("."))
            if name == "<<" and key.implicit[0]:
                merged += value.value if isinstance(value.value, list) else [value]
            elif name in entries:
                labels = (Label(span, "again here"), Label(entries[name].key, "first here"))
                self.report(Problem("duplicate-key", f"`{name}` stands twice", labels, f"{path}.{name}".lstrip("."), "keep one of them"))
            else:
                entries[name] = YamlEntry(span, value)
        for base in merged:
            if not isinstance(base.value, dict):
                raise _StopError(Problem("bad-key", "`<<` takes a mapping", (Label(base.span),)))
            entries = {**{key: entry for key, entry in base.value.items() if key not in entries}, **entries}
        return YamlNode(entries, self.span(event), user_path=path)

    def alias(self, event: Any, depth: int, path: str) -> YamlNode:
        node = self.anchors.get(event.anchor)
        if node is None:
            why = "is used inside itself" if event.anchor in self.anchors else "names no anchor above it"
            raise self.stop("bad-alias", f"`*{event.anchor}` {why}", event)
        return self.copy(node, depth, path, event)

    def copy(self, node: YamlNode, depth: int, path: str, event: Any) -> YamlNode:
        """A copy for an alias, so that nested aliases count with their expanded size."""
        self.count += 1
        if self.count > MAX_NODES or depth > MAX_DEPTH:
            raise self.stop("too-many-values", f"its aliases make more than {MAX_NODES:,} values", event, "no configuration is so large")
        copied = YamlNode(node.value, node.span, raw=node.raw, plain=node.plain, user_path=path)
        if isinstance(node.value, list):
            copied.value = [self.copy(item, depth + 1, f"{path}[{i}]", event) for i, item in enumerate(node.value)]
        elif isinstance(node.value, dict):
            copied.value = {
                key: YamlEntry(entry.key, self.copy(entry.value, depth + 1, f"{path}.{key}".lstrip("."), event))
                for key, entry in node.value.items()
            }
        return copied

    def scalar(self, event: Any, path: str) -> YamlNode:
        plain, text = event.implicit[0], event.value
        tag = self.check_tag(event, "str", "int", "float", "bool", "null")
        value = resolve(text) if plain or tag not in (None, "str") else text
        return YamlNode(value, self.span(event), raw=text, plain=plain, user_path=path)

    def check_tag(self, event: Any, *allowed: str) -> str | None:
        if event.tag is None or event.tag == "!":
            return None
        name = _TAGS.get(event.tag)
        if name not in allowed:
            raise self.stop(
                "bad-tag", f"the tag `{event.tag.replace('tag:yaml.org,2002:', '!!')}` has no meaning here", event, "remove the tag"
            )
        return name


def _syntax(error: yaml.YAMLError, source: SourceText) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    message = " ".join(
        part for part in (getattr(error, "context", None), getattr(error, "problem", None) or getattr(error, "reason", None)) if part
    )
    span = Span(source, mark.line + 1, mark.column + 1, 1) if mark else source.whole()
    line = source.line(span.line) or ""
    help = ""
    if "\t" in line[: len(line) - len(line.lstrip())] or (line[span.column - 1 : span.column] == "\t"):
        message, help = "a tab indents this line", "YAML indents with spaces only"
    elif "mapping values are not allowed" in message:
        help = "quote a value that has `: ` in it, or mend the indentation"
    elif "could not find expected ':'" in message:
        help = "a key ends with a colon and a space"
    return Problem("syntax", f"not YAML: {message or str(error).splitlines()[0]}", (Label(span),), help=help)


def _near(path: str) -> str:
    from difflib import get_close_matches

    folder, name = os.path.split(path)
    try:
        names = [entry for entry in os.listdir(folder or ".") if entry.endswith((".yaml", ".yml"))]
    except OSError:
        return f"there is no folder `{folder}` either"
    close = get_close_matches(name, names, 1, 0.5)
    return f"did you mean `{os.path.join(folder, close[0])}`?" if close else "`shoal init` writes a file to start from"
