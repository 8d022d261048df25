"""Rules between settings. A rule names the settings that it reads and runs if these are valid, even if others are not.

Where the contradiction stands in one layer it is an error; where a later layer brought it into an earlier one (a short test run of a long
config, say) most rules only warn, because the later layer was chosen knowingly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shoal.config.layers import Settings, UnavailableError, default_at
from shoal.config.problems import Severity


class Rule(NamedTuple):
    """A function that checks the values at some paths."""

    paths: tuple[str, ...]
    check: Callable[..., None]


RULES: list[Rule] = []
CUT_INTO_STAGES = ("gpt", "moe", "huggingface")
WITHOUT_BLOCKS = ("lstm", "mlp", "dcgan")
"""Models that have no blocks of a transformer."""
SHARDING = ("fsdp", "deepspeed")
"""Engines that shard matrices over processes."""


def rule(*paths: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(check: Callable[..., None]) -> Callable[..., None]:
        RULES.append(Rule(paths, check))
        return check

    return register


def apply(settings: Settings) -> None:
    for paths, check in RULES:
        try:
            check(settings, *(settings.get(path) for path in paths))
        except UnavailableError:
            continue


def across(settings: Settings, *paths: str) -> Severity:
    """The severity of a contradiction: an error within one layer, a warning across layers and in a run's own file, which has them all."""
    layers = {last.layer for path in paths if (last := settings.last(tuple(path.split("."))))}
    return "error" if len({settings.rank(path) for path in paths}) == 1 and not any(layer.resolved for layer in layers) else "warning"


def changed(settings: Settings, path: str) -> bool:
    """Whether the setting was set to another value than its default."""
    try:
        return settings.given(path) and settings.get(path) != default_at(tuple(path.split(".")), settings.kinds)
    except UnavailableError:
        return False


def names_a_model(settings: Settings) -> bool:
    """Whether a file or an option says which model is trained. A file that does not may be completed by one that does."""
    return any(path[0] == "model" and settings.given(".".join(path)) for path in settings.history)
