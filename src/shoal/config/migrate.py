"""Rewrites a dialect file as a native one, with its comments."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from shoal.config import derived_values
from shoal.config.dialects import DIALECTS, NATIVE
from shoal.config.dialects.table import WrittenKeys
from shoal.config.fields import as_data
from shoal.config.layers import Assignment, Key, Layer, Settings, default_at, section_at
from shoal.config.load import ConfigFile, _Loader
from shoal.config.problems import ConfigError, errors
from shoal.config.show import is_secret, scalar
from shoal.config.source_span import SourceText
from shoal.config.text import YamlNode, data_of

_TRAILING = re.compile(r"""(?:^|\s)#\s?(.*)$""")


class _OutputLine(NamedTuple):
    value: str
    above: list[str]
    trailing: str


def migrate(path: str, dialect: str | None = None) -> str:
    """The native text of a file or preset. Raises ConfigError."""
    loader = _Loader({}, dialect)
    root = loader.read(ConfigFile(path), 0)
    files = loader.in_dialects([root]) if root else []
    if errors(loader.problems):
        raise ConfigError(loader.problems)
    root, layer = files[0]
    if layer.dialect == NATIVE:
        return "\n".join(root.span.source.lines)
    seen = loader.seen.setdefault(layer.dialect, WrittenKeys())
    written = loader.translate(root, layer)
    unwritten = list(DIALECTS[layer.dialect].unwritten(seen, Layer("dialect", 0, layer.dialect), loader.report))
    if errors(loader.problems):
        raise ConfigError(loader.problems)
    settings = Settings([*written, *unwritten])
    derived_values.derive(settings)
    return _Writer(settings, root.span.source, layer.dialect).text()


class _Writer:
    def __init__(self, settings: Settings, source: SourceText, dialect: str) -> None:
        self.settings = settings
        self.source = source
        self.dialect = dialect
        self.comments = _comments(settings, source)

    def text(self) -> str:
        rows = [f"# {comment}".rstrip() for comment in self.comments.pop(0, [])]
        rows += [f"# Rewritten from {self.source.name} ({self.dialect}).", "", "dialect: shoal"]
        self.section(self.tree(), (), rows)
        unused = [dropped for dropped in self.settings.dropped if dropped.assignment.node.span.source.kind == "file"]
        if unused:
            rows += ["", "# Without effect in the original:"]
            rows += [f"#   {old.node.user_path}: {scalar(data_of(old.node))}  ({reason})" for old, reason, _ in unused]
        return "\n".join(rows) + "\n"

    def tree(self) -> dict[str, Any]:
        """The settings to write: those of the file, and the dialect's defaults that differ from the native ones."""
        tree: dict[str, Any] = {}
        for path, history in self.settings.history.items():
            assignment = self.chosen(history)
            if assignment is None or self.needless(path, assignment):
                continue
            branch = tree
            for name in path[:-1]:
                branch = branch.setdefault(name, {})
            branch[path[-1]] = self.line(path, assignment)
        return tree

    @staticmethod
    def chosen(history: list[Assignment]) -> Assignment | None:
        """The assignment to write; a derived value only if it corrects one of the file."""
        by_hand = [assignment for assignment in history if assignment.layer.name != "derived"]
        corrected = by_hand and by_hand[-1].node.value is not None and by_hand[-1].node.span.source.kind == "file"
        return history[-1] if corrected else (by_hand[-1] if by_hand else None)

    def needless(self, path: Key, assignment: Assignment) -> bool:
        if assignment.node.span.source.kind == "file":
            return False
        return bool(as_data(default_at(path, self.settings.kinds)) == data_of(assignment.node))

    def line(self, path: Key, assignment: Assignment) -> _OutputLine:
        above, trailing = self.comments.get(assignment.key.line, []), ""
        if assignment.node.span.source.kind == "file":
            match = _TRAILING.search(_unquoted(self.source.line(assignment.key.line) or ""))
            trailing = match.group(1) if match else ""
            self.comments.pop(assignment.key.line, None)
        value = _text(assignment.node)
        if is_secret(path, self.settings) and not value.startswith("${") and data_of(assignment.node):
            value = "${" + {"password": "DB_PASSWORD", "token": "HF_TOKEN"}.get(path[-1], path[-1].upper()) + "}"
            trailing = "was in the file; keep secrets in the environment"
        return _OutputLine(value, above if assignment.node.span.source.kind == "file" else [], trailing)

    def section(self, tree: dict[str, Any], path: Key, rows: list[str]) -> None:
        indent = "  " * len(path)
        for name in sorted(tree, key=lambda name: _order(path, name, self.settings)):
            value = tree[name]
            if isinstance(value, dict):
                rows += [""] * (not path) + [f"{indent}{scalar(name)}:"]
                self.section(value, (*path, name), rows)
            else:
                rows += [f"{indent}# {comment}".rstrip() for comment in value.above]
                rows.append(f"{indent}{scalar(name)}: {value.value}" + (f"  # {value.trailing}" if value.trailing else ""))


def _order(path: Key, name: str, settings: Settings) -> int:
    """The schema's order of a section's settings."""
    section = section_at(path, settings.kinds)
    names = list(section.fields()) if section else []
    return names.index(name) if name in names else len(names)


def _text(node: YamlNode) -> str:
    if isinstance(node.value, str) and "${" in node.value and node.plain and " #" not in node.value and ": " not in node.value:
        return node.value
    return scalar(data_of(node))


def _comments(settings: Settings, source: SourceText) -> dict[int, list[str]]:
    """The comment lines above each line with a setting; those at the top of the file under 0."""
    lines = sorted({a.key.line for history in settings.history.values() for a in history if a.node.span.source is source})
    found: dict[int, list[str]] = {}
    previous = 0
    for line in lines:
        rows = [(source.line(number) or "").strip() for number in range(previous + 1, line)]
        block = [row[1:].removeprefix(" ") for row in rows if row.startswith("#")]
        found[line] = block
        previous = line
    if lines and (first := found[lines[0]]):
        found[0], found[lines[0]] = first, []
    return found


def _unquoted(line: str) -> str:
    """The line with quoted text blanked out, so that a # in it does not start a comment."""
    return re.sub(r""""(?:[^"\\]|\\.)*"|'[^']*'""", lambda match: "x" * len(match.group()), line)
