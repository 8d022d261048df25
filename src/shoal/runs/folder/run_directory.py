"""The folder of a run.

config.yaml, provenance.json   every setting, and where it came from
manifest.json                  digests of the files that a run writes once: what they hold is what the run wrote
changes.jsonl                  settings that a resumed run changed, one line for each time
plugins.json                   the plugins that the run uses, each with its digest
metrics.jsonl                  figures, one record per line
events.jsonl                   messages, one per line, up to a size limit
status.json, history.jsonl     of a run with workers: its status (replaced each second), and what each worker did (thinned when it is full)
checkpoints/, samples/         weights and state; images or text that the model made
best/                          the weights of the best evaluation, if they are kept
lock                           held by the process that runs here
invitation.json                the command with which workers join (readable by the owner only)
summary.json                   how the run ended, also after a failure
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from shoal.config import Run
from shoal.config.fields import Secret, as_data
from shoal.config.load import ConfigFile, LoadedConfig, resolve
from shoal.config.show import provenance, resolved_text
from shoal.coordinator.durable.journal import journals, path_of
from shoal.coordinator.durable.lock import FolderLock, is_held_elsewhere, was_held
from shoal.coordinator.durable.records import JournalReader
from shoal.data.text.tokenizers.files import saved_files
from shoal.errors import ShoalError
from shoal.files import DamagedFileError, make_folder, open_file, parse_json, read_file, write_file
from shoal.manifest import FILE as MANIFEST
from shoal.manifest import check_manifest, write_manifest
from shoal.runs.folder import plugin_record
from shoal.runs.folder.resume_rules import SettingChange, Settings, changed_settings, forbidden_changes, format_changes, settings_of
from shoal.runs.folder.run_reader import PROVENANCE, SUMMARY

_CONFIG, _PROVENANCE = "config.yaml", "provenance.json"
_WRITTEN_ONCE = (_CONFIG, _PROVENANCE, "data.json", plugin_record.FILE)
_SIGNS_OF_A_RUN = ("summary.json", "metrics.jsonl", "checkpoints", "samples", "workers")
"""Files that show that a run has begun."""
_SIGNS_OF_LEARNING = ("summary.json", "metrics.jsonl", "checkpoints", "coordinator/ledger.jsonl")
_MAY_HOLD_MORE = ("invitation.json", "postgres")
"""Others may know how to join, or a database may be running: only the owner resumes such a run."""
_OF_A_BEGINNING = (
    *("config.yaml", "provenance.json", "plugins.json", "changes.jsonl", "events.jsonl", "data.json", "tokenizer", "start.safetensors"),
    *("manifest.json", "status.json", "history.jsonl", "owner.json", "samples", "coordinator", "workers"),
)
"""Files that a run writes up to its first step. Other files stay."""
_NOTHING_LEARNED = ("seated", "opened")
"""Kinds of journal records that contain no contribution."""

_MOST_EVENT_BYTES, _MOST_METRIC_BYTES = 4 << 20, 16 << 30
_ENDING_S = 10.0
"""How long to wait for another process to end: its children may live a moment longer."""


class RunDirectory:
    def __init__(self, path: Path, fresh: bool = False) -> None:
        """`fresh`: the folder was created for this run, so that everything in it belongs to the run."""
        self.path, self.fresh = path, fresh
        self._metrics: TextIO | None = None
        self._event_bytes: int | None = None
        self._lock = FolderLock(path)

    @classmethod
    def create(cls, run: Run, wanted: str | None = None, warn: Callable[[str], None] = lambda text: None) -> RunDirectory:
        """Create a folder: `wanted`, or one named after the run and the time. `warn`: is called where a killed run is replaced."""
        parent = Path(run.output_dir) / (run.logging.project or "")
        stem = run.name or f"{run.chosen_task.kind}-{run.model.kind}"
        path = Path(wanted) if wanted else parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}"
        number = 1
        while not wanted and path.exists():
            number += 1
            path = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}-{number}"
        if wanted and (path / _CONFIG).exists():
            if not is_abandoned(path):
                help = "add --resume to continue it (in Python resume=True), or choose another --run-dir (run_dir)"
                raise ShoalError(f"{path} holds a run already: {help}")
            _remove([path / name for name in _OF_A_BEGINNING])
            warn(f"{path} held a run that was killed before it had learned anything: it is begun anew")
        fresh = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        return cls(make_folder(path), fresh).occupied()

    def wait_until_free(self, warn: Callable[[str], None]) -> None:
        """Wait until another process that uses the folder ends. Raises ShoalError where it does not."""
        until = time.monotonic() + _ENDING_S
        if is_held_elsewhere(self.path):
            warn(f"another process is at work in {self.path}: waiting for it to end")
        while is_held_elsewhere(self.path):
            if time.monotonic() > until:
                raise ShoalError(f"another process is at work in {self.path}: end it first, or choose another --run-dir")
            time.sleep(0.1)

    def occupied(self) -> RunDirectory:
        """The same folder, locked by this process, which may have locked it before. Raises ShoalError where another process has."""
        try:
            self._lock.take()
        except ShoalError:
            if is_held_elsewhere(self.path):
                raise
        return self

    @contextmanager
    def kept_if_begun(self) -> Iterator[None]:
        """Removes the folder where the run fails before it has begun."""
        try:
            yield
        except BaseException:
            self.close()
            if self.fresh and not any((self.path / name).exists() for name in _SIGNS_OF_A_RUN):
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def forget(self) -> None:
        """Delete a run that failed before its first step, except the workers' logs, which contain the reason. A folder that was not
        empty before the run is left unchanged."""
        self.close()
        for path in list(self.path.iterdir()) if self.fresh else ():
            if path.name == "workers":
                _remove([one for one in path.iterdir() if one.suffix != ".log"])
            else:
                _remove([path])
        for path in (self.path / "workers", self.path) if self.fresh else ():
            with suppress(OSError):  # there are logs, or it is gone
                path.rmdir()

    def config(self) -> Run:
        """The settings of the run. Raises ShoalError where this version cannot read them."""
        read_file(self.path / _CONFIG)  # a file that can be read, and no pipe
        return resolve([ConfigFile(str(self.path / _CONFIG))], dialect="shoal", resolved=True).run

    def check_files(self) -> None:
        """Check the files that the run wrote once, except the settings. Raises ShoalError where one is damaged."""
        check_manifest(self.path, lambda name: name not in (_CONFIG, _PROVENANCE))

    def recorded_settings(self, warn: Callable[[str], None]) -> Settings:
        """The settings that the run wrote last, even if config.yaml was edited or damaged since then."""
        try:
            check_manifest(self.path, lambda name: name == _PROVENANCE)
            found = recorded_settings(self.path)
        except DamagedFileError as error:
            warn(f"{error}. The settings are taken from {_CONFIG}")
            found = None
        return settings_of(self.config()) if found is None else found

    def config_as_written(self, warn: Callable[[str], None]) -> Run:
        """The settings of config.yaml. Raises ShoalError where an edit by hand changed what shapes the run's numbers; warns of other edits.
        An edit that the manifest knows counts as written by the run."""
        self.check_files()
        run = self.config()
        if self._lists_config():
            return run
        before, now = self.recorded_settings(warn), settings_of(run)
        edited = f"{self.path / _CONFIG} was edited or damaged since the run wrote it"
        if different := forbidden_changes(before, now):
            raise ShoalError(
                f"{edited}: put back what was before; or, if the edit is meant, let `shoal manifest {self.path} --write` take the file as "
                f"it is:{format_changes(different)}"
            )
        if edits := changed_settings(before, now):
            warn(f"{edited}:{format_changes(edits)}")
        return run

    def _lists_config(self) -> bool:
        """Whether config.yaml is as the manifest says."""
        try:
            return check_manifest(self.path, lambda name: name == _CONFIG) is not None
        except DamagedFileError:
            return False

    def write_manifest(self) -> None:
        """Write the digests of the files that the run writes once."""
        write_manifest(self.path, unchanging_files(self.path))

    def write_config(self, loaded: LoadedConfig) -> list[SettingChange]:
        """Write the settings. Return what a resumed run changes; changes.jsonl records that."""
        begun = (self.path / _CONFIG).exists()
        changed = changed_settings(self.recorded_settings(lambda text: None), settings_of(loaded.run)) if begun else []
        with self._reporting(MANIFEST):
            (self.path / MANIFEST).unlink(missing_ok=True)  # it is written again when all files are
        if changed:
            line = {"at": time.strftime("%Y-%m-%d %H:%M:%S"), "changed": {one.path: one[1:] for one in changed}}
            with self._reporting("changes.jsonl"), open_file(self.path / "changes.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
        PROVENANCE.write(self.path / _PROVENANCE, {"settings": provenance(loaded)}, indent=2)
        plugin_record.write(self.path, loaded.run)
        write_file(self.path / _CONFIG, settings_text(loaded.run))
        return changed

    @contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        """Turns an error of the disk into one that names the file."""
        try:
            yield
        except OSError as error:
            raise ShoalError(f"cannot write {self.path / name}: {error.strerror or error}") from None

    def record(self, record: dict[str, Any]) -> None:
        """Append to metrics.jsonl."""
        finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}
        with self._reporting("metrics.jsonl"):
            if self._metrics is None:
                self._metrics = open_file(self.path / "metrics.jsonl", "a")
            self._metrics.write(json.dumps(finite) + "\n")
            self._metrics.flush()

    def forget_after(self, step: int) -> None:
        """Delete the records of steps that a resumed run repeats."""
        if lines := self._metric_lines():
            kept = [line for line in lines if _step_of(line) <= step]
            write_file(self.path / "metrics.jsonl", "".join(line + "\n" for line in kept))

    def metrics(self) -> list[dict[str, Any]]:
        return [parse_json(line) for line in self._metric_lines() if _step_of(line) < sys.maxsize]

    def _metric_lines(self) -> list[str]:
        content = read_file(self.path / "metrics.jsonl", _MOST_METRIC_BYTES) or b""
        return content.decode("utf-8", "replace").splitlines()

    def record_event(self, event: dict[str, Any]) -> None:
        """Append a message to events.jsonl, up to its size limit. Errors of the disk are ignored."""
        path = self.path / "events.jsonl"
        with suppress(OSError, ShoalError):
            if self._event_bytes is None:
                self._event_bytes = path.stat().st_size if path.exists() else 0
            line = json.dumps(event) + "\n"
            if self._event_bytes > _MOST_EVENT_BYTES:
                return
            self._event_bytes += len(line)
            with open_file(path, "a") as file:
                file.write(line)

    def write_summary(self, summary: dict[str, Any]) -> None:
        SUMMARY.write(self.path / "summary.json", summary, indent=2)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self._lock.release()


class ReadOnlyDirectory(RunDirectory):
    """The folder of a run for processes that must not write it: the first process does."""

    def write_config(self, loaded: LoadedConfig) -> list[SettingChange]:
        return []

    def record(self, record: dict[str, Any]) -> None:
        pass

    def forget_after(self, step: int) -> None:
        pass

    def record_event(self, event: dict[str, Any]) -> None:
        pass

    def write_summary(self, summary: dict[str, Any]) -> None:
        pass


def recorded_settings(folder: Path) -> Settings | None:
    """The settings in provenance.json; None where there is no such file. Raises DamagedFileError."""
    found = PROVENANCE.read(folder / _PROVENANCE)
    try:
        return found and {path: None if entry["value"] == Secret.MASK else entry["value"] for path, entry in found["settings"].items()}
    except (AttributeError, KeyError, TypeError):
        raise DamagedFileError(f"{folder / _PROVENANCE} is not a valid {PROVENANCE.kind}") from None


def unchanging_files(folder: Path) -> list[str]:
    """The names of the files that the run in a folder writes once: settings, data description, plugins and tokenizer."""
    tokenizer = (f"tokenizer/{name}" for name in saved_files(folder / "tokenizer"))
    return [*(name for name in _WRITTEN_ONCE if (folder / name).exists()), *tokenizer]


def settings_text(run: Run) -> str:
    """All settings of a run as a configuration file, without secrets, which come from the environment."""
    return resolved_text(as_data(run, mask=None))


def is_abandoned(path: Path) -> bool:
    """Whether the run in a folder took no step and its process has ended; False where that is not certain."""
    if not was_held(path) or any((path / name).exists() for name in (*_SIGNS_OF_LEARNING, *_MAY_HOLD_MORE)):
        return False
    folder = path / "coordinator"
    try:
        settings = (PROVENANCE.read(path / "provenance.json") or {})["settings"]
        elsewhere = settings["coordinator.state_path"]["value"] is not None or settings["transport.kind"]["value"] == "postgres"
        records = [record for number in sorted(journals(folder)) for record, _ in JournalReader(path_of(folder, number))]
        return not elsewhere and all(record["kind"] in _NOTHING_LEARNED for record in records)
    except (OSError, ValueError, KeyError, TypeError, ShoalError):
        return False


def _remove(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _step_of(line: str) -> int:
    """The step of a record; a line that a crash cut short counts as later than all others."""
    try:
        return int(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return sys.maxsize
