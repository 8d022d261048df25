"""Merges layers of settings into one tree and keeps the history of every value.

Mappings merge, lists replace, null is null. Where a later layer changes the `kind` of a union, the earlier layers' settings of the old
kind are dropped. A setting that a dialect meant for one kind (its `only_for`) takes effect only if that kind is chosen, in any layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from shoal.config.fields import INVALID, MISSING, Checker, Faults, MappingType, OptionalType, Section, SectionType, TaggedType, Tree
from shoal.config.problems import Label, Problem, Severity
from shoal.config.schema import Run
from shoal.config.schema.engine import Engine
from shoal.config.source_span import SourceText, Span
from shoal.config.text import YamlNode, node_of

Key = tuple[str, ...]


DERIVED = "derived"
"""Name of the layer of derived values."""


class Layer(NamedTuple):
    """One origin of settings. A higher rank wins."""

    name: str
    rank: int
    dialect: str = "shoal"
    resolved: bool = False
    """Whether a run wrote it, from all of its settings, which were checked from layer to layer."""


class Assignment(NamedTuple):
    """One value for one setting, from one layer."""

    path: Key
    node: YamlNode
    key: Span
    layer: Layer
    only_for: tuple[tuple[Key, tuple[str, ...]], ...] = ()
    """Unions, each with the kinds for which the value takes effect."""
    because: str = ""
    """Reason of a value that no file or option set."""


class Dropped(NamedTuple):
    """An assignment without effect, and why."""

    assignment: Assignment
    reason: str
    by: Assignment | None
    """The assignment that made it ineffective."""


class UnavailableError(Exception):
    """The setting is invalid, or the chosen kind does not have it."""


class Settings:
    """The merged settings, before and while they are checked."""

    def __init__(self, assignments: Iterable[Assignment], processes: int | None = None) -> None:
        """`processes`: number of processes that were started together (torchrun), if known."""
        self.processes = processes
        self.assignments = sorted(map(_expand_shorthand, assignments), key=lambda assignment: assignment.layer.rank)
        self.problems: list[Problem] = []
        self.kinds: dict[Key, str] = {}
        self.history: dict[Key, list[Assignment]] = {}
        self.dropped: list[Dropped] = []
        self.tree: dict[str, Tree] = {}
        self._merge()

    # --- merging --------------------------------------------------------------------------------

    def _merge(self) -> None:
        deciders = {union: self._decide(union) for union in unions()}
        for assignment in self.assignments:
            verdict = self._verdict(assignment, deciders)
            if verdict:
                self.dropped.append(verdict)
            else:
                self._put(assignment)
        for union, kind in self.kinds.items():
            self._name_kind(union, kind)

    def _name_kind(self, union: Key, kind: str) -> None:
        """Add the default kind to a union whose settings are given without a kind."""
        branch: Tree | None = self.tree
        for name in union:
            branch = branch.get(name) if isinstance(branch, dict) else None
        if isinstance(branch, dict) and "kind" not in branch:
            branch["kind"] = YamlNode(kind, SourceText("default", kind="default").whole(), user_path=".".join((*union, "kind")))

    def _decide(self, union: Key) -> Assignment | None:
        """Choose the kind of a union; returns the assignment that chose it."""
        default = default_at(union)
        kind = getattr(default, "kind", None)
        decider = None
        for assignment in self.assignments:
            if assignment.path == (*union, "kind") and isinstance(assignment.node.value, str):
                if assignment.node.value != kind:
                    decider = assignment
                kind = assignment.node.value
            elif assignment.path == union and assignment.node.value is None and default is None:
                kind = None
        if kind is not None:
            self.kinds[union] = kind
        return decider

    def _verdict(self, assignment: Assignment, deciders: dict[Key, Assignment | None]) -> Dropped | None:
        for union, kinds in assignment.only_for:
            if self.kinds.get(union) not in kinds:
                chosen = self.last((*union, "kind")) or deciders.get(union)
                return Dropped(assignment, f"{'.'.join(union)}.kind is {self.kinds.get(union, 'not set')}", chosen)
        guarded = {union for union, _ in assignment.only_for}
        for union, decider in deciders.items():
            inside = assignment.path[: len(union)] == union and len(assignment.path) > len(union) and assignment.path[len(union)] != "kind"
            if inside and union not in guarded and decider and _earlier(assignment, decider):
                return Dropped(assignment, f"a later layer changed {'.'.join(union)}.kind", decider)
        return None

    def _put(self, assignment: Assignment) -> None:
        """Set a value in the tree, and record it in the history."""
        self.history.setdefault(assignment.path, []).append(assignment)
        *parents, last = assignment.path
        value = assignment.node.value
        if value is None and isinstance(checker_at(assignment.path, self.kinds), (SectionType, TaggedType, MappingType)):
            return  # an empty section sets nothing
        branch = self.tree
        for name in parents:
            below = branch.get(name)
            if not isinstance(below, dict):
                below = {}
                branch[name] = below
            branch = below
        if isinstance(value, dict) and not value:
            if not isinstance(branch.get(last), dict):
                branch[last] = {}
            return
        branch[last] = assignment.node

    # --- reading --------------------------------------------------------------------------------

    def last(self, path: Key) -> Assignment | None:
        """The assignment that determined a setting's value; None for a default."""
        path = (*path, "kind") if path in _shorthand_unions() else path
        above = [self.history[path[:length]][-1] for length in range(1, len(path) + 1) if path[:length] in self.history]
        return max(above, key=lambda assignment: assignment.layer.rank, default=None)

    def get(self, dotted: str) -> Any:
        """The value of a setting. Raises UnavailableError if it is invalid, if it is required and absent, or the chosen kind has none."""
        path = tuple(dotted.split("."))
        tree: Tree | None = self.tree
        for name in path:
            tree = tree.get(name) if isinstance(tree, dict) else None
        checker = checker_at(path, self.kinds)
        if checker is None:
            raise UnavailableError(dotted)
        if tree is None:
            default = default_at(path, self.kinds)
            if default is MISSING:
                raise UnavailableError(dotted)
            return default
        faults: Faults = []
        value = checker.check(tree, path, faults)
        if value is INVALID:
            raise UnavailableError(dotted)
        return value

    def given(self, dotted: str) -> bool:
        """Whether a file, option or program set this setting to a value other than null."""
        assignment = self.last(tuple(dotted.split(".")))
        return assignment is not None and assignment.node.value is not None and assignment.node.span.source.kind != "default"

    def in_earlier_layer(self, dotted: str, other: str) -> bool:
        """Whether a setting was given, in an earlier layer than another one."""
        assignment, later = self.last(tuple(dotted.split("."))), self.last(tuple(other.split(".")))
        return self.given(dotted) and assignment is not None and later is not None and _earlier(assignment, later)

    def rank(self, dotted: str) -> int:
        assignment = self.last(tuple(dotted.split(".")))
        return assignment.layer.rank if assignment else -1

    def devices(self) -> int | None:
        """Devices that take separate batches in a single-worker run; None: all devices that the run finds."""
        engine = Engine.kinds[self.get("engine.kind")]
        if engine.reads_whole_batches:
            return 1
        each, nodes = self.get("launch.devices_per_node"), self.get("launch.nodes")
        if each:
            return int(each) * (nodes or 1)
        return self.processes if engine.several_processes else 1

    def labels(self, *dotted: str) -> tuple[Label, ...]:
        """Labels at the places where settings were set; defaults have none."""
        labels = []
        for name in dotted:
            assignment = self.last(tuple(name.split(".")))
            if assignment and assignment.node.span.source.kind != "default":
                labels.append(Label(assignment.node.span, f"`{assignment.node.user_path or name}`"))
        return tuple(labels)

    def spelling(self, dotted: str) -> str:
        """A setting as its author wrote it."""
        assignment = self.last(tuple(dotted.split(".")))
        return (assignment.node.user_path if assignment else "") or dotted

    def report(self, code: str, message: str, *paths: str, help: str = "", severity: Severity = "error") -> None:
        """Report a problem at the places where these settings were set."""
        labels = self.labels(*paths)
        self.problems.append(Problem(code, message, labels, self.spelling(paths[0]), help, severity))

    def warn_no_effect(self, path: str, why: str, *others: str, help: str = "") -> None:
        """Warn that a setting has no effect, unless a run wrote it, as it writes every setting."""
        last = self.last(tuple(path.split(".")))
        if last is not None and last.layer.resolved:
            return
        self.report("no-effect", f"`{self.spelling(path)}` has no effect: {why}", path, *others, help=help, severity="warning")

    def derive(self, dotted: str, value: Any, because: str) -> None:
        """Set a derived value with its reason."""
        source = SourceText(because, kind="default")
        node = node_of(value, source.whole(), dotted)
        self._put(Assignment(tuple(dotted.split(".")), node, node.span, Layer(DERIVED, 1_000_000), because=because))


# --- the schema, asked by path --------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def unions() -> tuple[Key, ...]:
    """Every path of the schema with a union, whose `kind` decides its other settings."""
    return tuple(_unions(Run, ()))


def _unions(section: type[Section], path: Key) -> Iterator[Key]:
    for name, field in section.fields().items():
        checker = _inner(field.checker)
        if isinstance(checker, TaggedType):
            yield (*path, name)
        elif isinstance(checker, SectionType):
            yield from _unions(checker.section, (*path, name))


@lru_cache(maxsize=1)
def _shorthand_unions() -> frozenset[Key]:
    """The unions that may be written as a kind alone."""
    return frozenset(path for path in unions() if (union := union_at(path, {})) and union.shorthand)


def _expand_shorthand(assignment: Assignment) -> Assignment:
    """`task: gan` is short for `task: {kind: gan}`."""
    if isinstance(assignment.node.value, str) and assignment.path in _shorthand_unions():
        return assignment._replace(path=(*assignment.path, "kind"))
    return assignment


def _inner(checker: Checker | None) -> Checker | None:
    return checker.item if isinstance(checker, OptionalType) else checker


def _earlier(assignment: Assignment, decider: Assignment) -> bool:
    """Whether an assignment is in an earlier layer than another. All options of a command line are one layer."""
    same = assignment.node.span.source.kind == decider.node.span.source.kind == "command line"
    return not same and assignment.layer.rank < decider.layer.rank


def checker_at(path: Key, kinds: dict[Key, str]) -> Checker | None:
    """The checker of the setting at a path, given the kinds that were chosen."""
    checker: Checker = SectionType(Run)
    for depth, name in enumerate(path):
        section = _section_of(_inner(checker), kinds.get(path[:depth]))
        if section is not None:
            field = section.fields().get(name)
            if field is None:
                return None
            checker = field.checker
        elif isinstance(mapping := _inner(checker), MappingType):
            checker = mapping.item
        else:
            return None
    return checker


def section_at(path: Key, kinds: dict[Key, str]) -> type[Section] | None:
    """The section at a path, of the kind that was chosen."""
    return _section_of(_inner(checker_at(path, kinds)), kinds.get(path))


def union_at(path: Key, kinds: dict[Key, str]) -> TaggedType | None:
    """The union at a path, if there is one."""
    inner = _inner(checker_at(path, kinds))
    return inner if isinstance(inner, TaggedType) else None


def default_at(path: Key, kinds: dict[Key, str] | None = None) -> Any:
    """The default of the setting at a path."""
    value: Any = _defaults()
    for depth, name in enumerate(path):
        kind = (kinds or {}).get(path[:depth])
        if kind is not None and name != "kind" and getattr(value, "kind", None) != kind:
            section = section_at(path[:depth], kinds or {})
            field = section.fields().get(name) if section else None
            value = field.default if field else None
        else:
            value = getattr(value, name, None)
    return value


@lru_cache
def _defaults() -> Run:
    """A run with all defaults; cached, since reading a file needs it a hundred times."""
    return Run()


def _section_of(checker: Checker | None, kind: str | None) -> type[Section] | None:
    if isinstance(checker, SectionType):
        return checker.section
    return checker.kinds.get(kind or "") if isinstance(checker, TaggedType) else None
