"""Shoal trains one model on every machine you can get, from one YAML file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError
from shoal.version import __version__

if TYPE_CHECKING:
    from shoal.config import ConfigError, Run, load
    from shoal.config.trainer_config import TrainerConfig
    from shoal.python.result import Result
    from shoal.python.train import train
    from shoal.runs.monitoring.recorder import Reporter

__all__ = ["ConfigError", "Reporter", "Result", "Run", "ShoalError", "TrainerConfig", "__version__", "load", "train"]
_HOMES = {
    "ConfigError": "shoal.config",
    "Reporter": "shoal.runs.monitoring.recorder",
    "Result": "shoal.python.result",
    "Run": "shoal.config",
    "TrainerConfig": "shoal.config.trainer_config",
    "load": "shoal.config",
    "train": "shoal.python.train",
}
"""Public name → module; imported on first use, since some need torch."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"shoal has no {name}")
    return getattr(import_module(_HOMES[name]), name)
