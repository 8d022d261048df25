"""Dialects: tables from the keys of an earlier program's files to Shoal's settings, with converters for values.

Targets are written as paths of the schema, with three additions:
    strategy[syncps].window         takes effect only if strategy.kind is syncps (several kinds: `[edp,syncps]`)
    cluster.hosts.*.server_address  `*` stands for the same key as in the source
    cluster.hosts.{name}.memory_gb  `{name}` stands for the item's own `name`, for a source that is a list of mappings
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from shoal.config.fields import did_you_mean
from shoal.config.layers import Assignment, Key, Layer
from shoal.config.problems import Label, Problem
from shoal.config.source_span import SourceText, Span
from shoal.config.text import Report, YamlEntry, YamlNode, data_of, describe, node_of

NOTHING: Any = object()
_STEP = re.compile(r"([^.\[\]]+)(?:\[([^\]]*)\])?")


class RejectError(Exception):
    """Raised by a converter for a value that the dialect does not allow."""

    def __init__(self, message: str, help: str = "", code: str = "wrong-type", paths: tuple[str, ...] = ()) -> None:
        """`paths`: the keys that contradict each other."""
        self.message, self.help, self.code, self.paths = message, help, code, paths


Convert = Callable[[Any], Any]


class Row:
    """One key of a dialect."""

    def __init__(
        self,
        path: str,
        *to: str,
        convert: Convert | None = None,
        default: Any = NOTHING,
        also: tuple[str, ...] = (),
        old: tuple[str, ...] = (),
        yields_to: str = "",
        null: Any = None,
    ) -> None:
        """The key's path in the dialect, and its target settings. `convert` converts its value; null stands for the setting `null`.

        `default` is the dialect's default, if it differs from Shoal's. `also` are other spellings of the key, `old` are old ones, which
        give a warning. `yields_to` is another key that overrides this one, with a warning, if both are given and differ.
        """
        self.path, self.to, self.convert, self.default = path, to, convert, default
        self.also, self.old, self.yields_to = also, old, yields_to
        self.has_default, self.null = default is not NOTHING, null
        self.spellings = (path, *also, *old)


def same(theirs: str, ours: str, names: str) -> tuple[Row, ...]:
    """A row for each name (separated by spaces) that a dialect and Shoal have in common, after their prefixes."""
    return tuple(Row(theirs + name, ours + name) for name in names.split())


class WrittenKeys(dict[str, YamlNode]):
    """The keys that a dialect's files contain, by their path in the table."""

    def value(self, path: str) -> Any:
        return self[path].value if path in self else None

    def any_below(self, prefix: str) -> bool:
        return any(path.startswith(prefix + ".") for path in self)


Implied = dict[str, tuple[Any, str]]
"""Native path → (value, reason)."""


def placement_hint(name: str, paths: Iterable[str], *, section: bool = False) -> str:
    """A hint where a key (`section`: a mapping) of this name belongs among these paths; empty if nowhere."""
    known = [path.replace("[]", "").split(".") for path in paths]
    keys = [steps[:-1] for steps in known if steps[-1] == name]
    sections = [steps[: steps.index(name)] for steps in known if name in steps[:-1]]
    homes = (sections or keys) if section else (keys or sections)
    places = [f"under `{home}`" if home else "at the top level" for home in list(dict.fromkeys(map(".".join, homes)))[:2]]
    return f"it belongs {' or '.join(places)}" if places else ""


class Dialect:
    """The table of one dialect, indexed by path."""

    def __init__(self, name: str, title: str, rows: tuple[Row, ...], imply: Callable[[WrittenKeys], Implied]) -> None:
        self.name = name
        self.title = title
        self.rows = rows
        self.imply = imply
        self.trie = _Trie()
        for entry in rows:
            for path in entry.spellings:
                self.trie.insert(path, entry)

    def knows(self, path: Key) -> bool:
        return self.trie.find(path) is not None

    def paths(self) -> list[str]:
        """Every spelling of every row."""
        return [path for entry in self.rows for path in entry.spellings]

    def translate(self, root: YamlNode, layer: Layer, seen: WrittenKeys, report: Report) -> list[Assignment]:
        """The assignments that a file of this dialect makes."""
        translation = _Translation(self, layer, seen, report)
        translation.walk(root, self.trie, ())
        return _without_conflicts(translation.found, report)

    def unknown(self, name: str, entry: YamlEntry, path: Key, siblings: Iterable[str]) -> Problem:
        where = ".".join(path)
        spelled = self.paths()
        help = placement_hint(name, spelled, section=isinstance(entry.value.value, dict))
        if close := did_you_mean(name, siblings):
            help = f"{close[:-1]}, or {help}?" if help else close
        elif not help:
            help = did_you_mean(name, [known.rpartition(".")[2] for known in spelled])
            help = help or f"this file was read as {self.name}; a line `dialect: NAME` at its top says otherwise"
        message = f"unknown key `{name}`" + (f" in `{where}`" if where else "")
        return Problem("unknown-key", message, (Label(entry.key, "not a setting here"),), f"{where}.{name}".lstrip("."), help)

    # --- what is not written --------------------------------------------------------------------------------

    def unwritten(self, seen: WrittenKeys, layer: Layer, report: Report) -> Iterator[Assignment]:
        """Assignments for the dialect's defaults and for settings that its keys imply."""
        values: list[tuple[str, Any, str]] = []
        for entry in self.rows:
            if entry.has_default:
                converted = entry.convert(entry.default) if entry.convert else entry.default
                values += [(target, converted, f"default of `{entry.path}` in {self.name} files") for target in entry.to]
        try:
            values += [(target, value, why) for target, (value, why) in self.imply(seen).items()]
        except RejectError as reject:
            labels = tuple(Label(seen[path].span) for path in reject.paths)
            report(Problem(reject.code, reject.message, labels, reject.paths[0]))
        for target, value, why in values:
            native, only_for = parse_target(target)
            span = SourceText(why, kind="default").whole()
            for leaf, node, _ in leaves(native, node_of(value, span, ".".join(native)), span):
                yield Assignment(leaf, node, span, layer, only_for, because=why)


class _Translation:
    """Translates one file from a dialect's paths to Shoal's."""

    def __init__(self, dialect: Dialect, layer: Layer, seen: WrittenKeys, report: Report) -> None:
        self.dialect = dialect
        self.layer = layer
        self.seen = seen
        self.report = report
        self.found: list[_Found] = []

    def walk(self, node: YamlNode, trie: _Trie, path: Key) -> None:
        for name, entry in node.value.items():
            below, here = trie.child(name), (*path, name)
            if below is None:
                self.report(self.dialect.unknown(name, entry, path, trie.children))
            elif isinstance(entry.value.value, dict) and below.children and not below.tail:
                self.walk(entry.value, below, here)
            elif below.items and isinstance(entry.value.value, list):
                self.walk_items(entry, below.items, here)
            elif below.row is not None:
                self.emit(below.row, entry, here)
            elif entry.value.value is not None:
                self.wrong(entry.value, "a list" if below.items else "a mapping")

    def wrong(self, node: YamlNode, expected: str) -> None:
        message = f"`{node.user_path}`: expected {expected}, found {describe(node.value)}"
        self.report(Problem("wrong-type", message, (Label(node.span),), node.user_path))

    def emit(self, entry_row: Row, entry: YamlEntry, path: Key) -> None:
        spelling, steps = ".".join(path), entry_row.path.split(".")
        self.seen[entry_row.path] = entry.value
        if spelling in entry_row.old:
            message = f"`{spelling}` is an older spelling of `{entry_row.path}`"
            self.report(Problem("old-spelling", message, (Label(entry.key),), spelling, f"write `{steps[-1]}`", "warning"))
        node = self.converted(entry_row, entry.value)
        if node is None:
            return
        wildcard = path[steps.index("*")] if "*" in steps else "*"
        for target in entry_row.to:
            native, only_for = parse_target(target.replace(".**", ""))
            native = tuple(wildcard if step == "*" else step for step in native)
            for leaf, value, _ in leaves(native, node, entry.key):
                self.found.append(_Found(entry_row, spelling, Assignment(leaf, value, entry.key, self.layer, only_for)))

    def converted(self, entry_row: Row, node: YamlNode) -> YamlNode | None:
        if node.value is None:
            return node if entry_row.null is None else _relocated(entry_row.null, node)
        if entry_row.convert is None:
            return node
        try:
            value = entry_row.convert(data_of(node))
        except RejectError as reject:
            self.report(Problem(reject.code, f"`{node.user_path}`: {reject.message}", (Label(node.span),), node.user_path, reject.help))
            return None
        return None if value is NOTHING else _relocated(value, node)

    def walk_items(self, entry: YamlEntry, trie: _Trie, path: Key) -> None:
        """Translate a list of mappings: each becomes an item of a list, or settings under its name."""
        identity = "name" if trie.child("name") else "id"
        collected: dict[str, YamlNode] = {}
        names: dict[str, YamlNode] = {}
        for item in entry.value.value:
            name = item.get(identity)
            if not isinstance(item.value, dict):
                self.wrong(item, "a mapping")
            elif name is None:
                self.report(Problem("missing-key", f"`{item.user_path}` needs a `{identity}`", (Label(item.span),), item.user_path))
            elif not isinstance(name.value, str):
                self.wrong(name, "text")
            elif name.value in names:
                labels = (Label(name.span, "again here"), Label(names[name.value].span, "first here"))
                self.report(Problem("duplicate-name", f"`{name.value}` stands twice in `{'.'.join(path)}`", labels, item.user_path))
            else:
                names[name.value] = name
                self.item(item, name.value, trie, path, collected)
        any_row = next(child.row for child in trie.children.values() if child.row)
        for target, node in collected.items():
            self.found.append(_Found(any_row, target, Assignment(tuple(target.split(".")), node, entry.key, self.layer)))

    def item(self, item: YamlNode, name: str, trie: _Trie, path: Key, collected: dict[str, YamlNode]) -> None:
        fields: dict[str, dict[str, YamlEntry]] = {}
        for key, entry in item.value.items():
            below = trie.child(key)
            if below is None or below.row is None:
                self.report(self.dialect.unknown(key, entry, path, trie.children))
                continue
            self.seen[below.row.path] = entry.value
            node = self.converted(below.row, entry.value)
            if node is None:
                continue
            for target in below.row.to:
                listed, bracket, rest = target.partition("[]")
                if not bracket:
                    native = tuple(name if step == "{name}" else step for step in target.split("."))
                    self.found.append(_Found(below.row, entry.value.user_path, Assignment(native, node, entry.key, self.layer)))
                elif rest:
                    fields.setdefault(listed, {})[rest.lstrip(".")] = YamlEntry(entry.key, node)
                else:
                    collected.setdefault(listed, YamlNode([], item.span, user_path=".".join(path))).value.append(node)
        for listed, entries in fields.items():
            collected.setdefault(listed, YamlNode([], item.span, user_path=".".join(path))).value.append(item.replaced(entries))


class _Found(NamedTuple):
    """An assignment with its table row and its spelling in the file."""

    row: Row
    spelling: str
    assignment: Assignment


class _Trie:
    __slots__ = ("children", "items", "row", "tail")

    def __init__(self) -> None:
        self.children: dict[str, _Trie] = {}
        self.items: _Trie | None = None
        self.row: Row | None = None
        self.tail = False
        """Whether everything below is passed on unchanged."""

    def insert(self, path: str, entry: Row) -> None:
        trie = self
        for step in path.split("."):
            if step == "**":
                trie.tail = True
                break
            name = step.removesuffix("[]")
            trie = trie.children.setdefault(name, _Trie())
            if name != step:
                trie.items = trie.items or _Trie()
                trie = trie.items
        trie.row = entry

    def child(self, name: str) -> _Trie | None:
        return self.children.get(name) or self.children.get("*")

    def find(self, path: Key) -> _Trie | None:
        trie: _Trie | None = self
        for name in path:
            if trie is not None and trie.tail:
                return trie
            trie = (trie.items or trie).child(name) if trie else None
        return trie


def parse_target(target: str) -> tuple[Key, tuple[tuple[Key, tuple[str, ...]], ...]]:
    """`strategy[edp,syncps].window` → (("strategy", "window"), ((("strategy",), ("edp", "syncps")),))."""
    path: Key = ()
    only_for = []
    for name, kinds in _STEP.findall(target):
        path = (*path, name)
        if kinds:
            only_for.append((path, tuple(kinds.split(","))))
    return path, tuple(only_for)


def leaves(path: Key, node: YamlNode, key: Span) -> Iterator[tuple[Key, YamlNode, Span]]:
    """The settings below a path, with the places of their keys; mappings are entered, lists are not."""
    if isinstance(node.value, dict) and node.value:
        for name, entry in node.value.items():
            yield from leaves((*path, name), entry.value, entry.key)
    else:
        yield path, node, key


def _relocated(value: Any, node: YamlNode) -> YamlNode:
    """A converted value at the position of the original."""
    converted = node_of(value, node.span, node.user_path)
    stack = [converted]
    while stack:
        current = stack.pop()
        current.user_path = node.user_path
        if isinstance(current.value, dict):
            stack += [entry.value for entry in current.value.values()]
        elif isinstance(current.value, list):
            stack += current.value
    return converted


def _without_conflicts(found: list[_Found], report: Report) -> list[Assignment]:
    """One assignment for each setting: two spellings in one file must agree."""
    kept: dict[tuple[Key, Any], _Found] = {}
    reported: set[frozenset[str]] = set()
    for candidate in found:
        entry, spelling, assignment = candidate
        slot = (assignment.path, assignment.only_for)
        if slot not in kept:
            kept[slot] = candidate
            continue
        other, other_spelling, earlier = kept[slot]
        pair = frozenset((spelling, other_spelling))
        same = data_of(assignment.node) == data_of(earlier.node)
        both_spellings = entry is other and bool({spelling, other_spelling} & set(entry.old))
        if same and not both_spellings:
            continue
        if other.yields_to == entry.path:
            kept[slot], (entry, spelling, assignment), (other, other_spelling, earlier) = candidate, kept[slot], candidate
        if pair in reported:
            continue
        reported.add(pair)
        labels = (Label(assignment.node.span), Label(earlier.node.span))
        if entry.yields_to == other.path:
            message = f"`{spelling}` and `{other_spelling}` differ; `{other_spelling}` counts"
            report(Problem("two-values", message, labels, spelling, f"remove `{spelling}`", "warning"))
        else:
            message = f"`{spelling}` and `{other_spelling}` are one setting" + ("" if same else " with two different values")
            report(Problem("two-values", message, labels, spelling, "keep one of them"))
    return [assignment for _, _, assignment in kept.values()]


# --- converters --------------------------------------------------------------------------------


def choice(words: dict[Any, Any]) -> Convert:
    """A converter from the dialect's choices to Shoal's."""

    def convert(value: Any) -> Any:
        if isinstance(value, (str, bool, int)):
            for word, meaning in words.items():
                if type(word) is type(value) and (word == value or (isinstance(word, str) and word.lower() == str(value).lower())):
                    return meaning
        expected = "true or false" if set(words) == {True, False} else "one of " + ", ".join(f"`{word}`" for word in words)
        if isinstance(value, str) and not set(words) == {True, False}:
            raise RejectError(f"{describe(value)} is not {expected}", did_you_mean(value, words), "unknown-choice")
        raise RejectError(f"expected {expected}, found {describe(value)}")

    return convert


def off_at(off: int) -> Convert:
    """A converter for a number of which one value means "off" (null)."""

    def convert(value: Any) -> Any:
        return None if not isinstance(value, bool) and isinstance(value, (int, float)) and value == off else value

    return convert
