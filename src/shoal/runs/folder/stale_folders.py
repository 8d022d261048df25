"""Finds and clears the folders of runs that were killed before their first step, so that the next run can use them."""

from __future__ import annotations

import shutil
from pathlib import Path

from shoal.coordinator.durable.journal import journals, path_of
from shoal.coordinator.durable.lock import was_held
from shoal.coordinator.durable.records import JournalReader
from shoal.errors import ShoalError
from shoal.runs.folder.run_reader import PROVENANCE

_SIGNS_OF_LEARNING = ("summary.json", "metrics.jsonl", "checkpoints", "coordinator/ledger.jsonl")
_MAY_HOLD_MORE = ("invitation.json", "postgres")
"""Others may know how to join, or a database may be running: only the owner resumes such a run."""
_OF_A_BEGINNING = (
    *("config.yaml", "provenance.json", "plugins.json", "changes.jsonl", "events.jsonl", "data.json", "tokenizer", "start.safetensors"),
    *("status.json", "history.jsonl", "owner.json", "samples", "coordinator", "workers"),
)
"""Files that a run writes up to its first step. Other files stay."""
_NOTHING_LEARNED = ("seated", "opened")
"""Kinds of journal records that contain no contribution."""


def is_abandoned(path: Path) -> bool:
    """Whether the run in a folder took no step and its process has ended; False where that is not certain."""
    if not was_held(path) or any((path / name).exists() for name in (*_SIGNS_OF_LEARNING, *_MAY_HOLD_MORE)):
        return False
    try:
        settings = (PROVENANCE.read(path / "provenance.json") or {})["settings"]
        elsewhere = settings["coordinator.state_path"]["value"] is not None or settings["transport.kind"]["value"] == "postgres"
        return not elsewhere and all(record["kind"] in _NOTHING_LEARNED for record in _records(path / "coordinator"))
    except (OSError, ValueError, KeyError, TypeError, ShoalError):
        return False


def _records(folder: Path) -> list[dict[str, object]]:
    return [record for number in sorted(journals(folder)) for record, _ in JournalReader(path_of(folder, number))]


def clear(path: Path) -> None:
    """Remove the files of the run."""
    for one in (path / name for name in _OF_A_BEGINNING):
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one, ignore_errors=True)
        else:
            one.unlink(missing_ok=True)
