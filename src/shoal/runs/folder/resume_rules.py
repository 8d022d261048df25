"""Which settings a run that goes on may change, and which it may not: those that shape its numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from shoal.config import Run
from shoal.config.fields import as_data
from shoal.config.show import flat, scalar

_OPERATIONAL = (
    *(
        "name",
        "output_dir",
        "log_level",
        "log_format",
        "logging",
        "hub",
        "serving",
        "checkpoint",
        "evaluation",
        "transport",
        "cluster.hosts",
    ),
    *("training.epochs", "training.max_steps", "strategy.rounds", "training.early_stopping"),
    *("strategy.round_timeout_s", "strategy.lease_timeout_s", "strategy.grace_s", "strategy.max_retries"),
    *("coordinator", "strategy.inexact_share", "updates.below_quorum", "data.source.serve", "data.source.download", "simulation"),
    *("data.loader.num_workers", "data.loader.pin_memory", "data.loader.prefetch_factor", "data.loader.persistent_workers"),
)
"""How long the run is, how long anybody waits, what is recorded, judged and kept and where, where workers come in, and what they may do:
whoever finds a run under attack ends it, sets narrower bounds, and lets it go on."""
_ENGINE = ("engine", "launch")
"""Another engine gives the same numbers, unless its processes step by themselves."""
_CUT_OF_A_STEP = ("training.batch_size", "training.gradient_accumulation_steps", "training.global_batch_size")
"""Engines of several processes cut a step's samples up in their own way; the feed sees to it that a run goes on at a whole step."""


class SettingChange(NamedTuple):
    """A setting that is not what it was."""

    path: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.path}: {self.before} before, {self.now} now"


def changed_settings(before: Run, now: Run) -> list[SettingChange]:
    """All settings that differ. Secrets are masked."""
    old, new = (dict(flat(run)) for run in (before, now))
    return [
        SettingChange(".".join(path), *(scalar(as_data(run[path])) if path in run else "not set" for run in (old, new)))
        for path in dict.fromkeys([*old, *new])
        if as_data(old.get(path)) != as_data(new.get(path)) or (path in old) != (path in new)
    ]


def forbidden_changes(before: Run, now: Run) -> list[SettingChange]:
    """Those that a run which goes on may not change."""
    free = tuple(_free(before, now))
    return [change for change in changed_settings(before, now) if not any(_is_below(change.path, prefix) for prefix in free)]


def settings_digest(run: Run) -> str:
    """A digest of the settings that a run which goes on may not change, and of its engine."""
    named = ((".".join(path), value) for path, value in flat(run))
    shaping = [f"{path}: {as_data(value)}" for path, value in named if not any(_is_below(path, prefix) for prefix in _OPERATIONAL)]
    return hashlib.sha256("\n".join(shaping).encode()).hexdigest()


def _free(before: Run, now: Run) -> Iterator[str]:
    kinds = {before.engine.kind, now.engine.kind}
    yield from _OPERATIONAL
    if "collectives" not in kinds:
        yield from _ENGINE
        yield from _CUT_OF_A_STEP if kinds != {"single"} else ()


def _is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}.")


def format_changes(found: list[SettingChange]) -> str:
    """Changes for people, a line each."""
    return "".join(f"\n  {change}" for change in found)
