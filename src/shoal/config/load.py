"""Loads files, environment variables and command-line options into one frozen `Run`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from shoal.config import derived_values, rules
from shoal.config.dialects import DIALECTS, NAMES, NATIVE, candidates, native_knows, native_paths
from shoal.config.dialects.table import WrittenKeys, leaves, parse_target, placement_hint
from shoal.config.fields import INVALID, Fault, Faults, SectionType, did_you_mean
from shoal.config.layers import Assignment, Key, Layer, Settings, UnavailableError
from shoal.config.presets import find as find_preset
from shoal.config.problems import ConfigError, Label, Problem, errors
from shoal.config.ranks import process_count
from shoal.config.schema import Run
from shoal.config.source_span import SourceText, Span
from shoal.config.text import MAX_BYTES, YamlEntry, YamlNode, interpolate, parse, parse_value, python_node, read, unescape

VARIABLES = {
    "DB_PASSWORD": "transport[postgres].password",
    "HF_TOKEN": "hub.token",
    "SHOAL_API_KEY": "serving.api_key",
    "SHOAL_ALERT_WEBHOOK": "alerts.webhook",
    "SMTP_PASSWORD": "alerts.email.password",
    "TELEMETRY_ALPHA": "coordinator.telemetry_alpha",
    "LOG_LEVEL": "log_level",
    "LOG_FORMAT": "log_format",
}
_SECRET_VARIABLES = ("DB_PASSWORD", "HF_TOKEN", "SHOAL_API_KEY", "SHOAL_ALERT_WEBHOOK", "SMTP_PASSWORD")
LOG_VARIABLES = ("LOG_LEVEL", "LOG_FORMAT")
"""Variables that say what this machine prints, whatever run it takes part in."""
DEFAULT_FILE = "config.yaml"

_OPTIONS_OF_EVERY_DIALECT = {"num_gpus": "launch.devices_per_node"}
"""Options that files of every dialect know, as those of `shoal up`, and the settings of a resumed run."""


class Override(NamedTuple):
    """A setting from the command line: `--set a.b=c`, or a flag with the name of a setting."""

    path: str
    value: str
    argument: str
    """As it was typed."""
    exact: bool = True
    """Whether `path` is a full path; otherwise its end is enough."""


class ConfigFile(NamedTuple):
    """A file, or a preset, and the name of its layer."""

    path: str
    layer: str = ""


class LoadedConfig:
    """The result of loading: the run if it is valid, the settings with their history, and all problems."""

    def __init__(self, settings: Settings, problems: list[Problem], files: list[_ParsedFile]) -> None:
        self.settings = settings
        self.problems = problems
        self.files = files
        self.misread: list[Problem] = []
        """The problems for which a setting may be missing in `settings`: files that cannot be read, unknown keys."""
        self._run: Run | None = None

    @property
    def ok(self) -> bool:
        return not errors(self.problems)

    @property
    def run(self) -> Run:
        if self._run is None:
            raise ConfigError(self.problems)
        return self._run

    def values(self, *paths: str) -> list[Any]:
        """The values of some settings, for commands that only look at a run or its database: what only training needs may be missing or
        wrong, such as variables and files. Raises ConfigError."""
        try:
            found = [self.settings.get(path) for path in paths]
        except UnavailableError:
            raise ConfigError(self.problems) from None
        used = [history[-1].node.span for path, history in self.settings.history.items() if path[0] in {one.split(".")[0] for one in paths}]
        unset = [one for one in self.misread if one.code == "unset-variable" and one.labels[0].span not in used]
        if wrong := [one for one in errors(self.misread) if one not in unset]:
            raise ConfigError(wrong)
        return found

    def replace_run(self, run: Run) -> None:
        """Take another run, within this machine's limits, in place of the one that the settings describe."""
        self._run = run


class _ParsedFile(NamedTuple):
    root: YamlNode
    layer: Layer


def load(*files: str, overrides: Iterable[str] = (), dialect: str | None = None, environ: Mapping[str, str] | None = None) -> Run:
    """The run that files and presets describe, later ones over earlier ones; `overrides` are `path=value`. Raises ConfigError."""
    settings = [parse_override(text) for text in overrides]
    return resolve([ConfigFile(file) for file in files], settings, dialect=dialect, environ=environ).run


def parse_override(text: str, option: str = "--set") -> Override:
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        source = SourceText("command line", f"{option} {text}", kind="command line")
        raise ConfigError([Problem("bad-override", f"`{text}` is not `path=value`", (Label(source.whole()),))])
    return Override(path.strip(), value, f"{option} {text}")


def resolve(
    files: list[ConfigFile],
    overrides: Iterable[Override] = (),
    *,
    dialect: str | None = None,
    environ: Mapping[str, str] | None = None,
    resolved: bool = False,
) -> LoadedConfig:
    """Read, translate, merge, check, derive. Does not raise for mistakes in the files: `problems` has them.

    `resolved`: Shoal wrote the files from checked settings; rules between settings are not applied again.
    """
    return _Loader(os.environ if environ is None else environ, dialect, resolved=resolved).load(files, list(overrides))


def resolve_received(text: str, overrides: Iterable[Override] = (), *, environ: Mapping[str, str] | None = None) -> LoadedConfig:
    """The settings that another machine sent as native text, with this machine's own `overrides` on top.

    Holds: nothing of this machine's environment gets into a value of the text. Variables set only what this machine prints.
    """
    loader = _Loader(os.environ if environ is None else environ, NATIVE, resolved=True, variables=LOG_VARIABLES)
    return loader.load_text(text, list(overrides))


def resolve_data(
    data: Mapping[str, Any],
    *,
    name: str,
    dialect: str,
    environ: Mapping[str, str] | None = None,
    overrides: Iterable[Override] = (),
    key_style: str = '["{}"]',
) -> LoadedConfig:
    """The same for settings from Python. `name` and `key_style` are how messages show a value's place: `config["a"]["b"]`."""
    loader = _Loader(os.environ if environ is None else environ, dialect)
    root = python_node(data, name, key_style=key_style)
    return loader.finish([_ParsedFile(root, Layer(name, 10, dialect))], list(overrides))


class _Loader:
    def __init__(
        self, environ: Mapping[str, str], dialect: str | None, *, resolved: bool = False, variables: Iterable[str] = VARIABLES
    ) -> None:
        """`variables`: those that are read as settings."""
        self.environ, self.variables = environ, tuple(variables)
        self.dialect = dialect
        self.resolved = resolved
        self.problems: list[Problem] = []
        self.report = self.problems.append
        self.seen: dict[str, WrittenKeys] = {}

    def load(self, files: list[ConfigFile], overrides: list[Override]) -> LoadedConfig:
        if not files:
            files = self.default_files()
        roots = [self.read(file, order) for order, file in enumerate(files)]
        expanded = [interpolate(root, self.environ, self.report) for root in roots if root]
        return self.finish(self.in_dialects(expanded), overrides)

    def load_text(self, text: str, overrides: list[Override]) -> LoadedConfig:
        """The settings of a text that another machine wrote, in which no variable is expanded."""
        source = SourceText("the coordinator's settings", layer="coordinator")
        if len(text.encode()) > MAX_BYTES:
            message = f"the coordinator's settings are larger than {MAX_BYTES >> 20} MiB, which no configuration is"
            self.report(Problem("too-large", message, (Label(source.whole()),)))
            return self.finish([], overrides)
        source.lines = text.split("\n")
        root = parse(text, source, self.report)
        return self.finish(self.in_dialects([unescape(root)] if root else []), overrides)

    def read(self, file: ConfigFile, order: int) -> YamlNode | None:
        preset = None if os.path.exists(file.path) else find_preset(file.path)
        layer = file.layer or os.path.splitext(os.path.basename(file.path))[0]
        return read(preset or file.path, self.report, name=file.path, layer=layer, order=order)

    def default_files(self) -> list[ConfigFile]:
        path = self.environ.get("CONFIG_PATH") or DEFAULT_FILE
        if not os.path.exists(path) and not find_preset(path):
            help = f"name one, set CONFIG_PATH, or let `shoal init` write {DEFAULT_FILE}"
            where = "CONFIG_PATH names a file that is not there" if self.environ.get("CONFIG_PATH") else f"there is no {DEFAULT_FILE} here"
            self.report(Problem("missing-file", f"no configuration file is given, and {where}", help=help))
            return []
        return [ConfigFile(path)]

    # --- which dialect --------------------------------------------------------------------------------

    def in_dialects(self, roots: list[YamlNode]) -> list[_ParsedFile]:
        possible = [self.possible(root) for root in roots]
        sure = [names[0] for names in possible if len(names) == 1]
        files = []
        for root, names in zip(roots, possible, strict=True):
            source = root.span.source
            agreed = names if len(names) == 1 else [name for name in names if name in sure]
            name = self.dialect or (agreed[0] if len(set(agreed)) == 1 else "")
            if not name:
                message = f"`{source.name}` could be written in several dialects: {', '.join(names)}"
                help = f"say which: --dialect NAME, or a line `dialect: {names[0]}` at its top"
                self.report(Problem("ambiguous-dialect", message, (Label(source.whole()),), help=help))
                continue
            files.append(_ParsedFile(root, Layer(source.layer, 10 + source.order, name, name == NATIVE and _is_resolved(root))))
        return files

    def possible(self, root: YamlNode) -> list[str]:
        """The dialects that a file may be written in; removes its `dialect:` line."""
        entry = root.value.pop("dialect", None)
        if entry is None:
            return candidates(root)
        name = entry.value.value
        if name in NAMES:
            return [name]
        help = did_you_mean(str(name), NAMES)
        self.report(
            Problem("unknown-choice", f"no dialect `{name}`: one of {', '.join(NAMES)}", (Label(entry.value.span),), "dialect", help)
        )
        return candidates(root)

    # --- assignments --------------------------------------------------------------------------------

    def finish(self, files: list[_ParsedFile], overrides: list[Override]) -> LoadedConfig:
        assignments: list[Assignment] = []
        for parsed in files:
            assignments += self.translate(parsed.root, parsed.layer)
        used = list(dict.fromkeys(parsed.layer.dialect for parsed in files))
        assignments += self.from_environment()
        for number, override in enumerate(overrides):
            assignments += self.from_override(override, used, number)
        for rank, name in enumerate(name for name in used if name != NATIVE):
            layer = Layer(f"{name} dialect", rank, name)
            assignments += DIALECTS[name].unwritten(self.seen.get(name, WrittenKeys()), layer, self.report)
        return self.check(Settings(assignments, process_count(self.environ)), files)

    def translate(self, root: YamlNode, layer: Layer) -> list[Assignment]:
        if layer.dialect == NATIVE:
            return [Assignment(path, node, key, layer) for path, node, key in leaves((), root, root.span) if path]
        return DIALECTS[layer.dialect].translate(root, layer, self.seen.setdefault(layer.dialect, WrittenKeys()), self.report)

    def from_environment(self) -> list[Assignment]:
        assignments = []
        for name in self.variables:
            text, target = self.environ.get(name), VARIABLES[name]
            if text:
                shown = "********" if name in _SECRET_VARIABLES else text
                source = SourceText(f"environment variable {name}", f"{name}={shown}", kind="environment", order=1000)
                span = Span(source, 1, 1, 1)
                path, only_for = parse_target(target)
                node = YamlNode(text, span, user_path=name) if text is not shown else parse_value(text, span, self.report, name)
                if name == "LOG_LEVEL":
                    node = node.replaced(str(node.value).upper())
                assignments.append(Assignment(path, node, span, Layer("environment", 1000), only_for))
        return assignments

    def from_override(self, override: Override, used: list[str], number: int) -> list[Assignment]:
        source = SourceText("command line", override.argument, kind="command line", layer="command line", order=2000 + number)
        value_at = len(override.argument) - len(override.value)
        span = Span(source, 1, value_at + 1, max(1, len(override.value)))
        key = Span(source, 1, max(1, value_at - len(override.path)), len(override.path))
        layer = Layer("command line", 2000 + number)
        for name in dict.fromkeys((*used, NATIVE)):
            full = self.match(override, name, key)
            if full:
                return self.assign(full, name, override, span, key, layer)
        if full is None:
            usual = None if override.exact else _OPTIONS_OF_EVERY_DIALECT.get(override.path.replace("-", "_"))
            if usual is not None:
                return self.assign(usual, NATIVE, override, span, key, layer)
            self.report(self.unknown_override(override, used, key))
        return []

    def match(self, override: Override, name: str, key: Span) -> str | None:
        """The full path of an override in a dialect; None if there is none, '' if it is ambiguous, which is reported.

        Of several settings with the name, the one nearest to the top wins, then the one in `training`.
        """
        wanted = override.path
        knows = native_knows if name == NATIVE else DIALECTS[name].knows
        if knows(tuple(wanted.split("."))) and ("." in wanted or override.exact or wanted in _paths_of(name)):
            return wanted
        if override.exact:
            return None
        wanted, paths = wanted.replace("-", "_"), _paths_of(name)
        found = {path for path in paths if path == wanted or path.endswith("." + wanted)}
        if not found:
            return None
        depth = min(path.count(".") for path in found)
        nearest = sorted(path for path in found if path.count(".") == depth)
        in_training = [path for path in nearest if path.startswith("training.")]
        for choice in (nearest, in_training):
            if choice and len({self.target(path, name) for path in choice}) == 1:
                return choice[0]
        message = f"`{override.argument.split()[0]}` could mean {' or '.join(f'`{path}`' for path in sorted(found))}"
        self.report(
            Problem("ambiguous-flag", message, (Label(key),), override.path, f"give the full path: --{nearest[0]} {override.value}")
        )
        return ""

    @staticmethod
    def target(path: str, name: str) -> object:
        """The setting that a path sets; two spellings of one setting are not ambiguous."""
        found = None if name == NATIVE else DIALECTS[name].trie.find(tuple(path.split(".")))
        return found.row.to if found and found.row else path

    def assign(self, path: str, name: str, override: Override, span: Span, key: Span, layer: Layer) -> list[Assignment]:
        node = parse_value(override.value, span, self.report, path)
        node = interpolate(node, self.environ, self.report)
        for step in reversed(path.split(".")):
            node = YamlNode({step: YamlEntry(key, node)}, span, user_path=node.user_path.rpartition(".")[0])
        return self.translate(node, layer._replace(dialect=name))

    def unknown_override(self, override: Override, used: list[str], key: Span) -> Problem:
        paths = [path for name in used if name != NATIVE for path in _paths_of(name)] + native_paths()
        leaf = override.path.replace("-", "_").split(".")[-1]
        homes = [path for path in paths if path.split(".")[-1] == leaf]
        if homes:
            help = f"did you mean `{homes[0]}`?"
        else:
            help = did_you_mean(override.path, paths) or did_you_mean(leaf, [path.split(".")[-1] for path in paths])
        what = "setting" if override.exact else "option or setting"
        return Problem("unknown-key", f"no {what} `{override.path}`", (Label(key, "not a setting"),), override.path, help)

    # --- checking --------------------------------------------------------------------------------

    def check(self, settings: Settings, files: list[_ParsedFile]) -> LoadedConfig:
        loaded = LoadedConfig(settings, self.problems, files)
        faults: Faults = []
        loaded.misread += self.problems
        if SectionType(Run).check(settings.tree, (), faults) is INVALID:
            found = [self.problem(fault, settings) for fault in faults]
            self.problems += found
            loaded.misread += [problem for problem in found if problem.code == "unknown-key"]
        self.problems += self.without_effect(settings)
        if not self.resolved:
            derived_values.derive(settings)
            rules.apply(settings)
        self.problems += settings.problems
        if loaded.ok:
            final = SectionType(Run).check(settings.tree, (), faults)
            assert final is not INVALID, faults
            loaded._run = final
        return loaded

    def problem(self, fault: Fault, settings: Settings) -> Problem:
        """The problem for a fault, at its place in the user's file and in the user's spelling."""
        path = tuple(str(step) for step in fault.path)
        if fault.code in ("unknown-key", "missing-key"):
            spans = _key_spans(fault, path, settings)
            note = "not a setting here" if fault.code == "unknown-key" else ""
            home = placement_hint(path[-1], native_paths()) if fault.code == "unknown-key" else ""
            help = f"{fault.help[:-1]}, or {home}?" if home and fault.help.startswith("did you mean") else fault.help or home
            return Problem(fault.code, fault.message, tuple(Label(span, note) for span in spans), ".".join(path), help)
        node = fault.at if isinstance(fault.at, YamlNode) else None
        if node is None:
            below = settings.last(path) or next(
                (history[-1] for known, history in settings.history.items() if known[: len(path)] == path), None
            )
            labels: tuple[Label, ...] = (Label(below.key),) if below else ()
            return Problem(fault.code, f"`{'.'.join(path)}`: {fault.message}", labels, ".".join(path), fault.help)
        spelling = node.user_path or ".".join(path)
        note = "not a choice here" if fault.code == "unknown-choice" else fault.message.split(", found")[0]
        return Problem(fault.code, f"`{spelling}`: {fault.message}", (Label(node.span, note),), spelling, fault.help)

    def without_effect(self, settings: Settings) -> list[Problem]:
        """A warning for each written key that takes effect only with another kind, or that a later layer's kind has replaced."""
        alive = {id(assignment.key) for history in settings.history.values() for assignment in history}
        warnings = []
        for assignment, reason, by in settings.dropped:
            written = assignment.node.span.source.kind not in ("default", "environment")
            own = assignment.only_for or not self.resolved  # a run's own file has every setting of its kinds
            if written and own and id(assignment.key) not in alive:
                labels: tuple[Label, ...] = (Label(assignment.key),)
                if by and by.node.span.source.kind != "default":
                    labels = (*labels, Label(by.node.span, "decided here"))
                spelling = assignment.node.user_path
                warnings.append(Problem("no-effect", f"`{spelling}` has no effect: {reason}", labels, spelling, severity="warning"))
        return warnings


def _is_resolved(root: YamlNode) -> bool:
    """Whether a run wrote a file; removes its `resolved:` line."""
    entry = root.value.get("resolved")
    if entry is None or not isinstance(entry.value.value, bool):
        return False
    return bool(root.value.pop("resolved").value.value)


def _paths_of(dialect: str) -> list[str]:
    return native_paths() if dialect == NATIVE else DIALECTS[dialect].paths()


def _key_spans(fault: Fault, path: Key, settings: Settings) -> list[Span]:
    if isinstance(fault.at, YamlNode) and isinstance(fault.at.value, dict):
        entry = fault.at.value.get(fault.key) if fault.key else None
        return [entry.key if entry else fault.at.span]
    prefix = path if fault.code == "unknown-key" else path[:-1]
    below = [history[-1] for known, history in settings.history.items() if known[: len(prefix)] == prefix]
    if not below:
        return []
    first = min(below, key=lambda assignment: (assignment.layer.rank, assignment.key.line))
    if fault.code == "unknown-key" and first.path != path:
        return [_ancestor_key(first, path)]
    return [first.key]


def _ancestor_key(assignment: Assignment, path: Key) -> Span:
    """The place of a key above a value, searched in the text, since only leaves keep theirs."""
    source, name = assignment.key.source, path[-1]
    for number in range(assignment.key.line, 0, -1):
        line = source.line(number) or ""
        column = line.find(name + ":")
        if column >= 0 and not line[:column].strip(" -{"):
            return assignment.key._replace(line=number, column=column + 1, length=len(name))
    return assignment.key
