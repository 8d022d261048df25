"""Shoal trains one model on every machine you can get, from one YAML file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.config import ConfigError, Run, load
    from shoal.config.trainer_config import TrainerConfig
    from shoal.launch.training import train

__version__ = "0.1.0"
__all__ = ["ConfigError", "Run", "ShoalError", "TrainerConfig", "__version__", "load", "train"]


def __getattr__(name: str) -> Any:
    if name == "TrainerConfig":
        from shoal.config.trainer_config import TrainerConfig

        return TrainerConfig
    if name == "train":
        from shoal.launch.training import train

        return train
    if name in ("ConfigError", "Run", "load"):
        import shoal.config

        return getattr(shoal.config, name)
    raise AttributeError(f"shoal has no {name}")
