"""Reads the settings that another machine sent, and applies the table of limits to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from shoal.config.environment import usable_cores
from shoal.config.fields import Section
from shoal.config.layers import Key, Settings
from shoal.config.load import LoadedConfig, Override, resolve_received
from shoal.config.parts import Part
from shoal.config.received.limits import Limit, limit_of
from shoal.config.received.permissions import Permissions, is_local, option_for
from shoal.config.schema import Run
from shoal.config.schema.data import Images, Mnist
from shoal.errors import ShoalError, printable

_TOKENIZERS = ("bytes", "bpe", "characters")


def read_received(text: str, overrides: Sequence[Override], permissions: Permissions, sent: Sent | None = None) -> LoadedConfig:
    """The settings that another machine sent, with this machine's own overrides on top.

    Holds: no variable is expanded in the text, and no value of it passes its limit. Raises ShoalError for values that this machine does
    not allow, with the options that would allow them. `sent`: what comes with the settings.
    """
    loaded = resolve_received(text, overrides)
    if loaded.ok:
        loaded.replace_run(limit_run(loaded.run, loaded.settings, permissions, sent))
    return loaded


def limit_run(run: Run, settings: Settings | None, permissions: Permissions, sent: Sent | None = None) -> Run:
    """A run within this machine's limits. `settings`: the origins of its values; None: all values were received. Raises ShoalError."""
    limiter = _Limiter(run, settings, permissions, sent or Sent())
    limited = limiter.section(run, ())
    if limiter.refused:
        options = " ".join(dict.fromkeys(one.option for one in limiter.refused if one.option))
        what = "; ".join(dict.fromkeys(one.why for one in limiter.refused))
        advice = f". If you want to allow it, add {options}" if options else ""
        raise ShoalError(f"the coordinator asks for something that this machine does not allow: {what}{advice}")
    return limited


def hub_names(run: Run) -> set[str]:
    """The names on the hub that a run reads on this machine."""
    return {one.value for one in named_places(run) if one.limit in _ON_HUB and not is_local(one.value)}


def local_paths(run: Run) -> list[str]:
    """The files and folders that a run reads on this machine; what is read only where it is allowed must be there."""
    read = (
        one
        for one in named_places(run)
        if one.limit is not Limit.WRITES and (one.limit is not Limit.READS_IF_ALLOWED or Path(one.value).expanduser().exists())
    )
    return list(dict.fromkeys(one.value for one in read if one.limit not in _ON_HUB or is_local(one.value)))


class NamedPlace(NamedTuple):
    """A setting that names a file, a folder or something on the hub."""

    path: Key
    limit: Limit
    value: str


def named_places(run: Run) -> list[NamedPlace]:
    """Everything outside a run's folder that its settings name on a worker's machine."""
    found: list[NamedPlace] = []

    def note(section: Section, name: str, path: Key, value: Any) -> Any:
        limit = limit_of(type(section), name)
        built_in = limit is Limit.TOKENIZER and value in _TOKENIZERS
        usual = limit is Limit.WRITES and value == section.fields()[name].default
        if isinstance(value, str) and limit in _NAMING and not built_in and not usual:
            found.append(NamedPlace(path, limit, value))
        return value

    _walk(run, (), note)
    return found


def permissions_for(run: Run) -> Permissions:
    """Permissions for workers that this user starts: all that the user's own file names."""
    return Permissions.of(_data_options(run))


def arguments_for(run: Run) -> list[str]:
    """The same as options of `shoal join`."""
    devices = run.launch.devices_per_node
    more = ["--set", f"launch.devices_per_node={devices}"] if devices is not None else []
    return [*(word for value in _data_options(run) for word in ("--data", value)), *more]


def _data_options(run: Run) -> list[str]:
    options: list[str] = []
    for one in named_places(run):
        if one.limit is not Limit.HUB:
            options.append(one.value)
        if one.limit in _ON_HUB and not Path(one.value).is_absolute():
            options.append(f"hub:{one.value}")
    return list(dict.fromkeys(options))


_ON_HUB = (Limit.HUB, Limit.READS_OR_HUB, Limit.TOKENIZER)
_NAMING = (*_ON_HUB, Limit.READS, Limit.READS_IF_ALLOWED, Limit.WRITES)

Visit = Callable[[Section, str, Key, Any], Any]
"""Called with a section, the name of a setting, its path and its value; returns the value to take."""


def _walk(section: Section, path: Key, visit: Visit) -> Section:
    """A section whose settings have passed through `visit`; sections that it leaves unchanged are visited too."""
    values = {}
    for name in section._declared:
        here, value = (*path, name), getattr(section, name)
        taken = visit(section, name, here, value)
        values[name] = _below(value, here, visit) if taken is value else taken
    return section.replace(**values)


def _below(value: Any, path: Key, visit: Visit) -> Any:
    if isinstance(value, Section):
        return _walk(value, path, visit)
    if isinstance(value, tuple):
        return tuple(_below(one, path, visit) for one in value)
    if isinstance(value, Mapping) and any(isinstance(one, Section) for one in value.values()):
        return MappingProxyType({key: _below(one, (*path, key), visit) for key, one in value.items()})
    return value


SENT_IMAGES = "images that the coordinator sends"
"""Path of images that this machine does not allow to be read, where the coordinator sends them: there is nothing at it."""


class Sent(NamedTuple):
    """What a coordinator sends besides its settings, so that it is not read from files."""

    tokenizer: bool = False
    images: bool = False


class _Refused(NamedTuple):
    why: str
    option: str


class _Limiter:
    """Applies the table to one run."""

    def __init__(self, run: Run, settings: Settings | None, permissions: Permissions, sent: Sent) -> None:
        self.run, self.settings, self.permissions, self.sent = run, settings, permissions, sent
        self.refused: list[_Refused] = []

    def section(self, section: Any, path: Key) -> Any:
        return _walk(section, path, self._taken)

    def _taken(self, section: Section, name: str, path: Key, value: Any) -> Any:
        """The value of a setting that this machine takes."""
        if self._is_own(path):
            return value
        match limit_of(type(section), name):
            case Limit.OWN:
                return section.fields()[name].default
            case Limit.WRITES:
                return value if self.permissions.names(value) else section.fields()[name].default
            case Limit.PROCESSES:
                self._check_processes(path, value)
            case Limit.LOADERS:
                return min(value, max(1, usable_cores() // (self.run.launch.devices_per_node or 1)))
            case Limit.READS_IF_ALLOWED:
                return self._if_allowed(path, value)
            case None if isinstance(section, Part):
                self._check_plugin_value(path, value)
            case Limit.READS if isinstance(section, Images) and self.sent.images and not self.permissions.reads(value):
                return SENT_IMAGES
            case limit if isinstance(value, str):
                self._check_name(section, path, value, limit)
        return value

    def _is_own(self, path: Key) -> bool:
        """Whether a value comes from this machine's own options."""
        assignment = self.settings.last(path) if self.settings is not None else None
        return assignment is not None and assignment.node.span.source.kind == "command line"

    def _check_name(self, section: Section, path: Key, value: str, limit: Limit | None) -> None:
        if limit is Limit.TOKENIZER and (self.sent.tokenizer or value in _TOKENIZERS):
            return
        if isinstance(section, Mnist) and value == section.fields()["path"].default:
            return  # four files of one format, which Shoal itself puts there
        if limit is Limit.READS or (limit in (Limit.READS_OR_HUB, Limit.TOKENIZER) and is_local(value)):
            self._check_file(path, value)
        elif limit is Limit.HUB and is_local(value):
            self._refuse(path, f"is {value}, which is no name on the hub", "")

    def _check_file(self, path: Key, value: str) -> None:
        if not self.permissions.reads(value):
            self._refuse(path, f"is {value}, which no option here allows to be read", option_for(value))

    def _if_allowed(self, path: Key, value: str | None) -> str | None:
        if value is None or self.permissions.reads(value):
            return value
        retrieval = getattr(self.run.model, "retrieval", None)
        if path == ("rlhf", "policy") and retrieval is not None and retrieval.enabled:  # its passages are read on every machine
            self._check_file(path, value)
        return None

    def _check_plugin_value(self, path: Key, value: Any) -> None:
        """A setting of a plugin, which this machine's user has loaded: no text in it leads to a file that is not allowed."""
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and is_local(text) and ("/" in text or "\\" in text or Path(text).expanduser().exists()):
                self._check_file(path, text)

    def _check_processes(self, path: Key, value: int | None) -> None:
        if value is not None and value > usable_cores():
            name = ".".join(path)
            self._refuse(path, f"is {value}, and this machine has {usable_cores()} cores", f"--set {name}={value}")

    def _refuse(self, path: Key, why: str, option: str) -> None:
        self.refused.append(_Refused(f"{'.'.join(path)} {printable(why)}", option))
