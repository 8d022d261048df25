"""For plugins: parts of your own, in a file or a package of your own. docs/extending.md has an example of each.

    from typing import Literal
    from shoal.plugins import Codec, builds

    class Sign(Codec):
        '''Only signs, and one scale.'''
        kind: Literal["sign"] = "sign"

    @builds(Sign)
    def coder(settings: Sign) -> SignCoder: ...

`shoal train config.yaml --plugin my_parts.py` imports it; in Python, `shoal.plugins.load("my_parts.py")`.
"""

from shoal.config.fields import (
    Decay,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Secret,
    Section,
    Share,
)
from shoal.config.parts import builds
from shoal.config.plugins import Plugin, load
from shoal.config.schema.cluster import Transport
from shoal.config.schema.data import DataSource
from shoal.config.schema.engine import Engine
from shoal.config.schema.model import Model
from shoal.config.schema.output import Sink
from shoal.config.schema.rlhf import Reward
from shoal.config.schema.run import Run
from shoal.config.schema.strategy import Strategy
from shoal.config.schema.task import Task
from shoal.config.schema.updates import Aggregation, Codec
from shoal.errors import ShoalError

__all__ = [
    "Aggregation",
    "Codec",
    "DataSource",
    "Decay",
    "Engine",
    "Model",
    "NonNegativeFloat",
    "NonNegativeInt",
    "Plugin",
    "PositiveFloat",
    "PositiveInt",
    "PositiveShare",
    "Reward",
    "Run",
    "Secret",
    "Section",
    "Share",
    "ShoalError",
    "Sink",
    "Strategy",
    "Task",
    "Transport",
    "builds",
    "load",
]
