"""Rules for optimizers of torch.optim and their settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shoal.config.layers import Settings
from shoal.config.rules.rule import SHARDING, changed, rule
from shoal.config.schema.strategy import OuterOptimizer
from shoal.config.schema.training import KEYWORDS, Optimizer, PlayerOptimizer, RateScheduler, Schedule, TorchOptimizer

_KEYWORDS_OF = {"weight_decay": "weight_decay", "eps": "eps", "momentum": "momentum", "beta1": "betas", "beta2": "betas"}
"""Settings, and the keyword argument that each becomes."""


@rule("training.optimizer", "training.players")
def optimizers_take_their_settings(settings: Settings, optimizer: Optimizer, players: Mapping[str, PlayerOptimizer]) -> None:
    reported: set[str] = set()
    if not isinstance(optimizer, TorchOptimizer):
        for path in _set_by_network(players):
            message = "it is for optimizers of torch.optim, and a function or a plugin makes this one for each network"
            settings.report("optimizer", message, path, "training.optimizer.kind", help="leave it out")
        return
    for prefix, name in _chosen(optimizer, players).items():
        own = players.get(prefix.rpartition(".")[2])
        for path, keyword in (*_given(optimizer, "training.optimizer"), *(_given(own, prefix) if own else ())):
            if keyword not in KEYWORDS[name] and path not in reported:
                reported.add(path)
                _refuse(settings, name, path, f"{prefix if own and own.name else 'training.optimizer'}.name")


def _set_by_network(players: Mapping[str, PlayerOptimizer]) -> Iterator[str]:
    """The settings of networks that replace those of the common optimizer."""
    for name, player in players.items():
        yield from (f"training.players.{name}.{field}" for field in player.fields() if getattr(player, field) is not None)


def _chosen(optimizer: TorchOptimizer, players: Mapping[str, PlayerOptimizer]) -> dict[str, str]:
    """The optimizers in use, by section. If both networks of a pair have own optimizers, the common one is unused."""
    own: dict[str, str] = {f"training.players.{name}": player.name or optimizer.name for name, player in players.items()}
    all_chose = len(players) == 2 and all(player.name for player in players.values())
    return own if all_chose else {"training.optimizer": optimizer.name} | own


def _given(section: TorchOptimizer | PlayerOptimizer, prefix: str) -> Iterator[tuple[str, str]]:
    """The settings of a section that become keyword arguments, by keyword."""
    for name, keyword in _KEYWORDS_OF.items():
        if getattr(section, name, None) is not None:
            yield f"{prefix}.{name}", keyword
    if isinstance(section, TorchOptimizer):
        yield from ((f"{prefix}.kwargs.{name}", name) for name in section.kwargs if name != "lr")


def _refuse(settings: Settings, chosen: str, path: str, name: str) -> None:
    message = f"{chosen} takes no `{settings.spelling(path).rpartition('.')[2]}`"
    settings.report("optimizer", message, path, name, help=f"it takes {', '.join(KEYWORDS[chosen])}")


@rule("training.optimizer")
def keywords_stand_once(settings: Settings, optimizer: Optimizer) -> None:
    if not isinstance(optimizer, TorchOptimizer):
        return
    own = {keyword: path for path, keyword in _given(optimizer.replace(kwargs={}), "training.optimizer")}
    for name in sorted(own.keys() & optimizer.kwargs.keys()):
        message = f"`{name}` is given twice, here and as `{settings.spelling(own[name])}`"
        settings.report("optimizer", message, f"training.optimizer.kwargs.{name}", own[name])


@rule("training.optimizer", "training.players")
def nesterov_needs_momentum(settings: Settings, optimizer: Optimizer, players: Mapping[str, PlayerOptimizer]) -> None:
    if isinstance(optimizer, TorchOptimizer) and "SGD" in _chosen(optimizer, players).values():
        _check_nesterov(settings, {"momentum": optimizer.momentum} | dict(optimizer.kwargs), "training.optimizer")


@rule("training.optimizer.kind", "training.scheduler", "engine.kind")
def optimizers_of_ones_own_step_whole_networks(settings: Settings, kind: str, scheduler: RateScheduler | None, engine: str) -> None:
    path = "training.optimizer.kind" if kind != "torch" else "training.scheduler.kind"
    if (kind != "torch" or scheduler is not None) and engine in (*SHARDING, "pipeline"):
        message = f"it is made for a whole network, and the engine {engine} gives each process a part"
        settings.report("engine", message, path, "engine.kind", help="take the engine ddp, or an optimizer of torch.optim by name")


@rule("training.scheduler", "training.schedule")
def one_of_them_sets_the_rates(settings: Settings, scheduler: RateScheduler | None, schedule: Schedule) -> None:
    for name in schedule.fields() if scheduler is not None else ():
        if changed(settings, f"training.schedule.{name}"):
            settings.warn_no_effect(f"training.schedule.{name}", "training.scheduler sets the learning rates", "training.scheduler.kind")


@rule("strategy.outer")
def outer_optimizer_takes_its_keywords(settings: Settings, outer: OuterOptimizer) -> None:
    for name in outer.kwargs:
        if name not in KEYWORDS[outer.name]:
            _refuse(settings, outer.name, f"strategy.outer.kwargs.{name}", "strategy.outer.name")
    if outer.name == "SGD":
        _check_nesterov(settings, {"momentum": outer.momentum} | dict(outer.kwargs), "strategy.outer")


def _check_nesterov(settings: Settings, keywords: dict[str, Any], prefix: str) -> None:
    if keywords.get("nesterov") and (not keywords["momentum"] or keywords.get("dampening")):
        message = "SGD looks ahead (nesterov) along its momentum: that must be above 0, without dampening"
        settings.report("optimizer", message, f"{prefix}.kwargs.nesterov", f"{prefix}.momentum")
