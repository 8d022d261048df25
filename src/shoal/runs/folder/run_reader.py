"""Reads the folder of a run, during the run and afterwards, without torch and without its coordinator.

Nothing that is read is trusted, since workers may have caused any content: values are checked, cleaned and bounded.
"""

from __future__ import annotations

import math
import os
import re
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shoal.coordinator.durable.lock import was_held
from shoal.errors import ShoalError
from shoal.files import DamagedFileError, JsonFormat, open_to_read, parse_json, read_file

_FRESH_S = 10.0
_LONG_S = 600.0
"""How long a coordinator may write nothing while its process exists: the last evaluation may take this long."""
WAITS_FOR_DATABASE = "waiting for the database"
UNFINISHED_STATES = ("starting", "running", "paused", "ending", "not here", "running or killed", WAITS_FOR_DATABASE)
_MOST_BYTES_AT_ONCE = 8 << 20
_LONGEST_LINE = 1 << 20
_LONGEST_TEXT, _LONGEST_SAMPLE = 1000, 8000
_MOST_ITEMS, _DEEPEST = 5000, 6
_DIRECTING = {"\u061c", "\u200e", "\u200f", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}
"""Characters that change the direction of text, and so can make a text look like another."""
_SAMPLE = re.compile(r"step-(\d{1,12})\.(png|txt)")
_CHECKPOINT = re.compile(r"step-(\d{1,12})")
STATUS = JsonFormat("status", 2, key="schema")
SUMMARY = JsonFormat("summary", 1)
PROVENANCE = JsonFormat("provenance", 1, ("settings",))
INVITATION = JsonFormat("invitation", 1, private=True)
DATA = JsonFormat("data description", 1, ("name", "fingerprint", "image_shape", "num_classes", "vocab_size"))


def clean(value: Any, depth: int = 0) -> Any:
    """The value in a form that is safe to show: finite numbers, bounded texts and lists, no control characters."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    if depth >= _DEEPEST:
        return None
    if isinstance(value, Mapping):
        return {clean_text(str(name)): clean(one, depth + 1) for name, one in list(value.items())[:_MOST_ITEMS]}
    if isinstance(value, (list, tuple)):
        return [clean(one, depth + 1) for one in value[:_MOST_ITEMS]]
    return None


def clean_text(text: str) -> str:
    return "".join(one if _is_plain(one) else "?" for one in text[:_LONGEST_TEXT])


def _is_plain(character: str) -> bool:
    return character not in _DIRECTING and (character == " " or unicodedata.category(character)[0] not in "CZ")


class Tail:
    """Reads a growing file of lines, like `tail -F`: each call yields the complete lines since the last one. A file that was truncated or
    replaced is read from its beginning; `began` counts how often."""

    def __init__(self, path: Path) -> None:
        self.path, self.began = path, 0
        self._at, self._file = 0, -1
        self._rest = b""

    def new_lines(self) -> Iterator[bytes]:
        """The new lines, up to a limit of bytes for one call."""
        try:
            with open_to_read(self.path) as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file or found.st_size < self._at:
                    self._file, self._at, self._rest = found.st_ino, 0, b""
                    self.began += 1
                file.seek(self._at)
                content = file.read(_MOST_BYTES_AT_ONCE)
        except (OSError, ShoalError):
            return
        self._at += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            self._rest = b""
        yield from (line for line in lines if line and len(line) <= _LONGEST_LINE)

    def values(self) -> Iterator[dict[str, Any]]:
        """New lines that hold a JSON object."""
        for line in self.new_lines():
            try:
                value = parse_json(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def read_summary(folder: Path) -> dict[str, Any]:
    """The outcome of the run in a folder; empty where it has not ended, or the file is damaged. Raises ShoalError for another version of
    the format."""
    try:
        found: dict[str, Any] = clean(SUMMARY.read(folder / "summary.json") or {})
    except DamagedFileError:
        return {}
    return found if _is_summary(found) else {}


class StepFile(NamedTuple):
    """A file that a run wrote at a step."""

    step: int
    name: str
    at: float


class RunFolder:
    def __init__(self, path: Path) -> None:
        if not (path / "config.yaml").exists():
            raise ShoalError(f"{path} is no run's folder: it has no config.yaml. `shoal runs` lists the runs that there are")
        self.path = path
        self.damaged: dict[str, str] = {}
        """By the name of a file that cannot be read: what is wrong with it."""

    def _read(self, name: str, form: JsonFormat, fits: Callable[[dict[str, Any]], bool] = lambda found: True) -> dict[str, Any]:
        """The cleaned fields of a file; empty where it is missing or damaged. Raises ShoalError for another version of the format."""
        self.damaged.pop(name, None)
        try:
            found: dict[str, Any] = clean(form.read(self.path / name) or {})
            if not fits(found):
                raise DamagedFileError(f"{self.path / name} is not a valid {form.kind}")
        except DamagedFileError as error:
            self.damaged[name] = str(error)
            return {}
        return found

    @property
    def name(self) -> str:
        return clean_text(self.path.resolve().name)

    @property
    def state_path(self) -> Path:
        """The folder of the coordinator's durable state."""
        elsewhere = self.provenance().get("coordinator.state_path", {}).get("value")
        return Path(elsewhere) if isinstance(elsewhere, str) and elsewhere else self.path / "coordinator"

    def status(self) -> dict[str, Any]:
        """The status of the run, cleaned. That of a run without a coordinator is derived from its records."""
        found = self._read("status.json", STATUS, _is_status)
        status: dict[str, Any] = found if found.get("members") is not None else self._alone()
        state = self._state(status)
        if state not in UNFINISHED_STATES:  # the last status was written while workers were still here
            status["members"] = [row | {"state": "left"} for row in status.get("members", ())]
        if self._has_ended():
            status |= self._outcome(status)
        more = {"state": state, "folder": clean_text(str(self.path)), "damaged": [clean_text(text) for text in self.damaged.values()]}
        return _DEFAULTS | status | more

    def _alone(self) -> dict[str, Any]:
        records = [record for record in Tail(self.path / "metrics.jsonl").values() if "step" in record]
        latest: dict[str, dict[str, Any]] = {
            split: next((one for one in reversed(records) if one.get("split") == split), {}) for split in ("train", "eval")
        }
        last = clean(records[-1]) if records else {}
        figures = {split: {name: value for name, value in clean(one).items() if is_figure(name)} for split, one in latest.items()}
        events = [clean(one) for one in Tail(self.path / "events.jsonl").values()][-50:]
        known = {"samples": last.get("samples", 0), "wall_s": last.get("wall_s", 0.0), "at": _changed_at(self.path / "metrics.jsonl")}
        strategy = self.provenance().get("strategy.kind", {}).get("value") if self.is_coordinated() else None
        known |= {"strategy": str(strategy)} if strategy else {}
        return {"run": self.name, "version": last.get("step", 0), "figures": figures, "events": events, **known}

    def _outcome(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """What happened after the last status: the last evaluation, and workers that left."""
        summary = self._summary()
        last = {split: figures for split, figures in summary.get("metrics", {}).items() if figures}
        known = {name: summary[name] for name in ("samples", "wall_s", "contributions") if summary.get(name)}
        events = [clean(one) for one in Tail(self.path / "events.jsonl").values()][-50:]
        return {**known, "figures": {**status.get("figures", {}), **last}, "events": events or status.get("events", []), "eta_s": None}

    def is_coordinated(self) -> bool:
        """Whether the run has a coordinator, even if it has not written a status yet."""
        return (self.path / "owner.json").exists()

    def _state(self, status: Mapping[str, Any]) -> str:
        """The state of the run: how it ended, or whether a process still runs it."""
        if self._has_ended():
            return str(self._summary().get("status", "ended"))
        written = self._written_at()
        if not written and self.is_coordinated():
            return "ended before it began" if was_held(self.path) else "starting"
        age_s = time.time() - written
        if age_s < _FRESH_S or (age_s < _LONG_S and _is_running(status.get("pid"))):
            return str(status.get("state") or "running")
        return "not here" if "pid" in status or status.get("members") else "running or killed"

    def _written_at(self) -> float:
        return _changed_at(self.path / "status.json") or _changed_at(self.path / "metrics.jsonl")

    def _summary(self) -> dict[str, Any]:
        return self._read("summary.json", SUMMARY, _is_summary)

    def _has_ended(self) -> bool:
        """Whether the summary is newer than the status, which a resumed run writes again."""
        ended = _changed_at(self.path / "summary.json")
        return bool(ended and ended >= self._written_at() - 1.0)

    def provenance(self) -> dict[str, Any]:
        """Every setting with its value and its source."""
        return self._read("provenance.json", PROVENANCE, _is_provenance).get("settings", {})

    def samples(self) -> list[StepFile]:
        """The samples of the model, in the order of their steps."""
        return _seen(self.path / "samples", _SAMPLE)

    def checkpoints(self) -> list[StepFile]:
        return _seen(self.path / "checkpoints", _CHECKPOINT)

    def sample(self, name: str) -> bytes | str | None:
        """An image, or a cleaned text, by its file name; None where it does not exist."""
        if _SAMPLE.fullmatch(name) is None:
            return None
        try:
            content = read_file(self.path / "samples" / name)
        except ShoalError:
            return None
        if content is None:
            return None
        if name.endswith(".png"):
            return content
        text = content[:_LONGEST_SAMPLE].decode("utf-8", "replace")
        return "\n".join(clean_text(line) for line in text.splitlines())

    def invitation(self) -> dict[str, Any]:
        """The content of invitation.json; empty where workers cannot join."""
        return self._read("invitation.json", INVITATION)


_ABOUT = (
    "step",
    "split",
    "wall_s",
    "samples",
    "epoch",
    "samples_per_s",
    "tokens_per_s",
    "mfu",
    "memory_bytes",
    "received_bytes",
    "sent_bytes",
)
"""Fields of a record that are not figures of what was learned."""
SECONDS = "seconds/"
"""Prefix of the fields of a record that say how long a phase of a step takes."""
PHASES = ("data", "forward_backward", "communication", "optimizer", "sending", "waiting", "evaluation", "checkpoint")
_DEFAULTS: dict[str, Any] = {
    STATUS.key: STATUS.version,
    "run": "",
    "strategy": "",
    "scheduler": "none",
    "transport": "",
    "version": 0,
    "of": None,
    "step_name": "step",
    "wall_s": 0.0,
    "samples": 0,
    "progress": None,
    "eta_s": None,
    "figures": {"train": {}, "eval": {}},
    "contributions": {},
    "refused": {},
    "received_bytes": 0,
    "sent_bytes": 0,
    "privacy": None,
    "members": [],
    "members_left_out": 0,
    "gone": [],
    "tasks": [],
    "events": [],
    "at": 0.0,
    "damaged": [],
}
_NUMBERS = ("of", "progress", "eta_s", "wall_s", "at")
_OF_A_WORKER = {
    *("lag", "accepted", "rejected", "bytes", "since", "heard_s", "rate", "computing_s", "waiting_s", "sending_s", "memory_bytes"),
    *("data_s", "forward_backward_s", "communication_s", "optimizer_s", "tokens_per_s", "mfu"),
}
"""Fields of a worker that are numbers."""


def is_figure(name: str) -> bool:
    """Whether a field of a record is a figure of what was learned, and not of how fast."""
    return name not in _ABOUT and not name.startswith(SECONDS)


def _is_status(found: Mapping[str, Any]) -> bool:
    """Whether the fields of a status have the types that its readers expect. Missing fields have defaults."""
    known = {name: value for name, value in found.items() if name in _DEFAULTS and value is not None}
    numbers = {name for name in known if name in _NUMBERS or isinstance(_DEFAULTS[name], (int, float))}
    return (
        all(_is_number(known[name]) for name in numbers)
        and all(isinstance(known[name], dict if _DEFAULTS[name] is None else type(_DEFAULTS[name])) for name in known.keys() - numbers)
        and all(isinstance(row, dict) and _is_worker(row) for name in ("members", "gone") for row in known.get(name, ()))
        and all(isinstance(row, dict) for name in ("tasks", "events") for row in known.get(name, ()))
        and all(_is_number(row.get("at", 0)) for row in known.get("events", ()))
        and all(isinstance(figures, dict) for figures in known.get("figures", {}).values())
    )


def _is_worker(row: Mapping[str, Any]) -> bool:
    needed = {"worker", "state", "lag", "accepted", "rejected", "bytes"} <= row.keys()
    return needed and all(_is_number(row[name]) for name in _OF_A_WORKER & row.keys() if row[name] is not None)


def _is_summary(found: Mapping[str, Any]) -> bool:
    return isinstance(found.get("metrics", {}), dict) and isinstance(found.get("contributions", {}), dict)


def _is_provenance(found: Mapping[str, Any]) -> bool:
    settings = found.get("settings", {})
    return isinstance(settings, dict) and all(isinstance(entry, dict) and "value" in entry for entry in settings.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def complete_status(status: Any) -> dict[str, Any]:
    """An untrusted status, cleaned, with defaults for missing fields."""
    found = clean(status)
    return _DEFAULTS | (found if isinstance(found, dict) else {})


def newest_run(folder: Path) -> RunFolder:
    """The most recently written run below a folder. Raises ShoalError where there is none."""
    found = [path.parent for path in folder.rglob("provenance.json") if (path.parent / "config.yaml").exists()]
    if not found:
        raise ShoalError(f"there are no runs in {folder}: name a run's folder, or start one (`shoal train`)")
    return RunFolder(
        max(found, key=lambda path: max(_changed_at(path / name) for name in ("status.json", "metrics.jsonl", "provenance.json")))
    )


def _seen(folder: Path, pattern: re.Pattern[str]) -> list[StepFile]:
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except OSError:
        return []
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    return sorted(StepFile(int(match[1]), match[0], _changed_at(folder / match[0])) for match in matches)


def _changed_at(path: Path) -> float:
    """Modification time of a file; 0 where it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_running(pid: Any) -> bool:
    if os.name != "posix":
        return True  # os.kill would end the process on Windows; the age of the file suffices
    if not isinstance(pid, int) or pid <= 1:
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
