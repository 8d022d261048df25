"""Problems in a configuration, rendered as text, JSON or GitHub annotations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from shoal.config.source_span import Span
from shoal.errors import ShoalError, masked

Severity = Literal["error", "warning"]
Style = Literal["text", "json", "github"]


class Label(NamedTuple):
    """A place in a source, with a note."""

    span: Span
    text: str = ""


class Problem(NamedTuple):
    """An error or warning in the configuration. The first label is its place; the others are its causes."""

    code: str
    message: str
    labels: tuple[Label, ...] = ()
    path: str = ""
    help: str = ""
    severity: Severity = "error"


class ConfigError(ShoalError):
    """The configuration is invalid; `problems` has every reason."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__(render(self.problems))


def errors(problems: Iterable[Problem]) -> list[Problem]:
    """The problems that prevent a start."""
    return [problem for problem in problems if problem.severity == "error"]


def render(problems: list[Problem], style: Style = "text", *, colour: bool = False) -> str:
    """All problems, ordered by file and line."""
    ordered = sorted(problems, key=_position)
    if style == "json":
        import json

        return json.dumps([_as_dict(problem) for problem in ordered], indent=2, ensure_ascii=False)
    if style == "github":
        return "\n".join(_github(problem) for problem in ordered)
    return "\n\n".join([*(_text(problem, colour) for problem in ordered), _summary(ordered)])


def _position(problem: Problem) -> tuple[int, int, int]:
    if not problem.labels:
        return (-1, 0, 0)
    span = problem.labels[0].span
    return (span.source.order, span.line, span.column)


def _text(problem: Problem, colour: bool) -> str:
    def paint(code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if colour and text else text

    tone = "1;31" if problem.severity == "error" else "1;33"
    rows = [f"{paint(tone, f'{problem.severity}[{problem.code}]')}{paint('1', f': {problem.message}')}"]
    numbered = [label.span.line for label in problem.labels if label.span.line and label.span.source.kind == "file"]
    gutter = len(str(max(numbered, default=1)))
    for number, (span, note) in enumerate(problem.labels):
        arrow = "-->" if number == 0 else ":::"
        layer = f"  ({span.source.layer} layer)" if span.source.layer and span.source.kind == "file" else ""
        rows.append(f"{' ' * gutter}{paint('1;34', arrow)} {masked(str(span))}{layer}")
        line = span.source.line(span.line)
        if line is None:
            continue
        shown, column, length = _window(masked(line), span.column, span.length)
        in_file = str(span.line) if span.source.kind == "file" else " "
        caret = "^" if number == 0 else "-"
        bar = paint("1;34", "|")
        rows += [
            f"{' ' * gutter} {bar}",
            f"{paint('1;34', in_file.rjust(gutter))} {bar} {shown}",
            f"{' ' * gutter} {bar} {' ' * (column - 1)}{paint(tone if number == 0 else '1;34', f'{caret * length} {note}'.rstrip())}",
        ]
    rows += [f"{' ' * gutter} {paint('1;34', '=')} help: {line}" for line in problem.help.splitlines()]
    return "\n".join(rows)


def _window(line: str, column: int, length: int, width: int = 160) -> tuple[str, int, int]:
    """The part of a long line around the column, with control characters replaced."""
    line = "".join(character if character.isprintable() else ("    " if character == "\t" else "�") for character in line[: column + width])
    start = max(0, column - width // 2) if len(line) > width else 0
    shown = ("…" if start else "") + line[start : start + width]
    column = column - start + (1 if start else 0)
    return shown, column, max(1, min(length, len(shown) - column + 1))


def _summary(problems: list[Problem]) -> str:
    wrong = errors(problems)
    odd = len(problems) - len(wrong)
    warnings = f"{odd} warning{'s' * (odd != 1)}" if odd else ""
    if not wrong:
        return f"{warnings}."
    files = {problem.labels[0].span.source.name for problem in wrong if problem.labels and problem.labels[0].span.source.kind == "file"}
    where = f" in {len(files)} file{'s' * (len(files) != 1)}" if files else ""
    count = f"{len(wrong)} problem{'s' * (len(wrong) != 1)}{where}"
    return f"{count}{f', {warnings}' if warnings else ''}; nothing was started."


def _as_dict(problem: Problem) -> dict[str, object]:
    span = problem.labels[0].span if problem.labels else None
    return {
        "severity": problem.severity,
        "code": problem.code,
        "message": problem.message,
        "file": span.source.name if span else None,
        "line": span.line or None if span else None,
        "column": span.column if span and span.line else None,
        "path": problem.path or None,
        "help": problem.help or None,
    }


def _github(problem: Problem) -> str:
    def escape(text: str) -> str:
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    def escape_property(text: str) -> str:
        return escape(text).replace(":", "%3A").replace(",", "%2C")

    where = ""
    if problem.labels:
        span = problem.labels[0].span
        where = f"file={escape_property(span.source.name)},line={max(1, span.line)},col={max(1, span.column)},"
    message = problem.message + (f"\n{problem.help}" if problem.help else "")
    return f"::{problem.severity} {where}title={escape_property(problem.code)}::{escape(message)}"
