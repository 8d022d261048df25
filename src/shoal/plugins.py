"""Everything that a plugin imports from Shoal: the only import path that stays the same from version to version.

    from typing import Literal
    from shoal.plugins import Codec, Coder, builds

    class Sign(Codec):
        '''Only signs, and one scale.'''
        kind: Literal["sign"] = "sign"

    @builds(Sign)
    class SignCoder(Coder): ...

`shoal train config.yaml --plugin my_parts.py` imports a plugin; in Python, `shoal.plugins.load("my_parts.py")`. docs/extending.md has an
example for each kind of part. Names whose modules import torch or NumPy are imported on first use, so that checking a configuration
stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.config.fields import Decay as Decay
from shoal.config.fields import NonNegativeFloat as NonNegativeFloat
from shoal.config.fields import NonNegativeInt as NonNegativeInt
from shoal.config.fields import PositiveFloat as PositiveFloat
from shoal.config.fields import PositiveInt as PositiveInt
from shoal.config.fields import PositiveShare as PositiveShare
from shoal.config.fields import Secret as Secret
from shoal.config.fields import Section as Section
from shoal.config.fields import Share as Share
from shoal.config.parts import builds as builds
from shoal.config.plugins import Plugin as Plugin
from shoal.config.plugins import load as load
from shoal.config.schema.cluster import Transport as Transport
from shoal.config.schema.cluster import Zmq as Zmq
from shoal.config.schema.data import DataSource as DataSource
from shoal.config.schema.engine import Engine as Engine
from shoal.config.schema.model import Model as Model
from shoal.config.schema.output import Sink as Sink
from shoal.config.schema.rlhf import Reward as Reward
from shoal.config.schema.run import Run as Run
from shoal.config.schema.strategy import Strategy as Strategy
from shoal.config.schema.task import Task as Task
from shoal.config.schema.training import Optimizer as Optimizer
from shoal.config.schema.training import RateScheduler as RateScheduler
from shoal.config.schema.updates import Aggregation as Aggregation
from shoal.config.schema.updates import Codec as Codec
from shoal.errors import ShoalError as ShoalError

if TYPE_CHECKING:
    from shoal.config.data_shapes import DataShapes as DataShapes
    from shoal.config.data_shapes import DataShapes as TaskInfo
    from shoal.coordinator.round_policies import Barrier as Barrier
    from shoal.coordinator.round_policies import Bounded as Bounded
    from shoal.coordinator.round_policies import Discounted as Discounted
    from shoal.coordinator.round_policies import Every as Every
    from shoal.coordinator.round_policies import Everything as Everything
    from shoal.data.hub.dataset import DataRequest as DataRequest
    from shoal.data.images.samples import Target as ImageTarget
    from shoal.data.images.samples import from_pixels as from_pixels
    from shoal.data.images.samples import image_data as image_data
    from shoal.data.interfaces import Indices as Indices
    from shoal.data.interfaces import Samples as Samples
    from shoal.data.interfaces import SampleStream as SampleStream
    from shoal.data.interfaces import SelectableSamples as SelectableSamples
    from shoal.data.interfaces import StreamReader as StreamReader
    from shoal.data.loaded_data import Data as Data
    from shoal.data.loaded_data import Info as DataInfo
    from shoal.data.text.documents import Document as Document
    from shoal.data.text.documents import InMemoryDocuments as Documents
    from shoal.data.text.documents import TextPart as TextPart
    from shoal.engines.base import Engine as DistributedEngine
    from shoal.engines.single import SingleEngine as SingleEngine
    from shoal.engines.world import World as World
    from shoal.protocol.frames import Frame as Frame
    from shoal.protocol.frames import Frames as Frames
    from shoal.protocol.frames import expect_frames as expect_frames
    from shoal.protocol.frames import frame_of as frame_of
    from shoal.protocol.frames import values_of as values_of
    from shoal.protocol.messages import Message as Message
    from shoal.protocol.messages import Request as Request
    from shoal.runs.monitoring.recorder import Reporter as Reporter
    from shoal.runs.rlhf.rewards.interface import Answer as Answer
    from shoal.runs.rlhf.rewards.interface import Score as Score
    from shoal.strategies.policy_set import Policies as Policies
    from shoal.strategies.run_length import in_rounds as in_rounds
    from shoal.strategies.run_length import in_updates as in_updates
    from shoal.tasks.base import Batch as Batch
    from shoal.tasks.base import Loss as Loss
    from shoal.tasks.base import StepResult as StepResult
    from shoal.tasks.base import Task as TrainingTask
    from shoal.tasks.classification import Classification as ClassificationTask
    from shoal.tasks.language import LanguageModelling as LanguageModellingTask
    from shoal.transports import zeromq as zeromq
    from shoal.transports.interface import Client as Client
    from shoal.transports.interface import ConnectOptions as ConnectOptions
    from shoal.transports.interface import ListenOptions as ListenOptions
    from shoal.transports.interface import Server as Server
    from shoal.updates.codecs.base import Coder as Coder
    from shoal.updates.parallel_blocks import Floats as Floats
    from shoal.updates.rules.mixing import Contributions as Contributions

_MODULES = {
    "shoal.config.data_shapes": "DataShapes",
    "shoal.coordinator.round_policies": "Barrier Bounded Discounted Every Everything",
    "shoal.data.hub.dataset": "DataRequest",
    "shoal.data.images.samples": "from_pixels image_data",
    "shoal.data.interfaces": "Indices SampleStream Samples SelectableSamples StreamReader",
    "shoal.data.loaded_data": "Data",
    "shoal.data.text.documents": "Document TextPart",
    "shoal.engines.single": "SingleEngine",
    "shoal.engines.world": "World",
    "shoal.protocol.frames": "Frame Frames expect_frames frame_of values_of",
    "shoal.protocol.messages": "Message Request",
    "shoal.runs.monitoring.recorder": "Reporter",
    "shoal.runs.rlhf.rewards.interface": "Answer Score",
    "shoal.strategies.policy_set": "Policies",
    "shoal.strategies.run_length": "in_rounds in_updates",
    "shoal.tasks.base": "Batch Loss StepResult",
    "shoal.transports": "zeromq",
    "shoal.transports.interface": "Client ConnectOptions ListenOptions Server",
    "shoal.updates.codecs.base": "Coder",
    "shoal.updates.parallel_blocks": "Floats",
    "shoal.updates.rules.mixing": "Contributions",
}
"""Modules that need torch or NumPy, and the names that plugins use of each."""
_IMPORTED_ON_USE = {
    **{name: f"{module}.{name}" for module, names in _MODULES.items() for name in names.split()},
    "ClassificationTask": "shoal.tasks.classification.Classification",
    "DataInfo": "shoal.data.loaded_data.Info",
    "DistributedEngine": "shoal.engines.base.Engine",
    "Documents": "shoal.data.text.documents.InMemoryDocuments",
    "ImageTarget": "shoal.data.images.samples.Target",
    "LanguageModellingTask": "shoal.tasks.language.LanguageModelling",
    "TaskInfo": "shoal.config.data_shapes.DataShapes",
    "TrainingTask": "shoal.tasks.base.Task",
}
"""Public name → where it is defined; the names above that need torch or NumPy."""
# Type checkers find names by `import X as X`; those that are renamed have to be written here.
__all__ = [
    "ClassificationTask",
    "DataInfo",
    "DistributedEngine",
    "Documents",
    "ImageTarget",
    "LanguageModellingTask",
    "TaskInfo",
    "TrainingTask",
]
__all__ += ({name for name in globals() if name[0] != "_"} | _IMPORTED_ON_USE.keys()) - {"Any", "TYPE_CHECKING", "annotations", *__all__}


def __getattr__(name: str) -> Any:
    from pkgutil import resolve_name

    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"shoal.plugins has no {name}")
    globals()[name] = found = resolve_name(_IMPORTED_ON_USE[name])
    return found
