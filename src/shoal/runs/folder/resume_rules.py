"""Which settings a resumed run may change. Those that affect its numbers must stay."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal.config import Run
from shoal.config.fields import Secret, as_data
from shoal.config.show import flat, scalar

_OPERATIONAL: tuple[str, ...] = (
    *("name", "output_dir", "log_level", "log_format", "logging", "hub", "serving", "checkpoint", "evaluation"),
    *("transport", "cluster.hosts"),
    *("training.epochs", "training.max_steps", "strategy.rounds", "training.early_stopping"),
    *("strategy.round_timeout_s", "strategy.lease_timeout_s", "strategy.grace_s", "strategy.max_retries"),
    *("coordinator", "strategy.inexact_share", "updates.below_quorum", "data.source.serve", "data.source.download", "simulation"),
    *("data.loader.num_workers", "data.loader.pin_memory", "data.loader.prefetch_factor", "data.loader.persistent_workers"),
)
"""Limits for workers may change, too, so that an owner can resume a run under attack with narrower ones."""
_ENGINE = ("engine", "launch")
"""Another engine computes the same numbers, unless its processes step independently."""
_CUT_OF_A_STEP = ("training.batch_size", "training.gradient_accumulation_steps", "training.global_batch_size")
"""Engines of several processes divide a step's samples differently; the feed resumes at a whole step."""


class SettingChange(NamedTuple):
    path: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.path}: {self.before} before, {self.now} now"


Settings = Mapping[str, Any]
"""The value of every setting by its path, as plain data without secrets, which come from the environment."""


def settings_of(run: Run) -> Settings:
    found = {".".join(path): None if isinstance(value, Secret) else as_data(value, mask=None) for path, value in flat(run)}
    plain: dict[str, Any] = json.loads(json.dumps(found))  # as it is read from a file
    return plain


def changed_settings(before: Settings, now: Settings) -> list[SettingChange]:
    """All settings that differ. One that is null is not set: a later version of Shoal may have a setting that this run's did not."""
    return [
        SettingChange(path, *(scalar(settings[path]) if path in settings else "not set" for settings in (before, now)))
        for path in dict.fromkeys([*before, *now])
        if before.get(path) != now.get(path)
    ]


def forbidden_changes(before: Settings, now: Settings) -> list[SettingChange]:
    """The differences that a resumed run may not have."""
    kinds, free = {before.get("engine.kind"), now.get("engine.kind")}, _OPERATIONAL
    if "collectives" not in kinds:
        free += _ENGINE + (_CUT_OF_A_STEP if kinds != {"single"} else ())
    return [change for change in changed_settings(before, now) if not _is_among(change.path, free)]


def settings_digest(run: Run) -> str:
    """A digest of the engine and of all settings that a resumed run may not change."""
    named = ((".".join(path), value) for path, value in flat(run))
    shaping = [f"{path}: {as_data(value)}" for path, value in named if not _is_among(path, _OPERATIONAL)]
    return hashlib.sha256("\n".join(shaping).encode()).hexdigest()


def _is_among(path: str, settings: tuple[str, ...]) -> bool:
    """Whether a setting is one of these, or in a section of these."""
    return f"{path}.".startswith(_sections(settings))


@functools.cache
def _sections(settings: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{one}." for one in settings)


def format_changes(found: list[SettingChange]) -> str:
    """The changes for the user, one per line."""
    return "".join(f"\n  {change}" for change in found)
