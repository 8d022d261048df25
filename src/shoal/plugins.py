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
from shoal.config.schema.cluster import Transport, Zmq
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
    from shoal.transports.interface import ConnectOptions, ListenOptions
    from shoal.transports.interface import Server as Server
    from shoal.updates.codecs.base import Coder as Coder
    from shoal.updates.parallel_blocks import Floats as Floats
    from shoal.updates.rules.mixing import Contributions as Contributions

__all__ = [
    "Aggregation",
    "Answer",
    "Barrier",
    "Batch",
    "Bounded",
    "ClassificationTask",
    "Client",
    "Codec",
    "Coder",
    "ConnectOptions",
    "Contributions",
    "Data",
    "DataInfo",
    "DataRequest",
    "DataShapes",
    "DataSource",
    "Decay",
    "Discounted",
    "DistributedEngine",
    "Document",
    "Documents",
    "Engine",
    "Every",
    "Everything",
    "Floats",
    "Frame",
    "Frames",
    "ImageTarget",
    "Indices",
    "LanguageModellingTask",
    "ListenOptions",
    "Loss",
    "Message",
    "Model",
    "NonNegativeFloat",
    "NonNegativeInt",
    "Plugin",
    "Policies",
    "PositiveFloat",
    "PositiveInt",
    "PositiveShare",
    "Reporter",
    "Request",
    "Reward",
    "Run",
    "SampleStream",
    "Samples",
    "Score",
    "Secret",
    "Section",
    "SelectableSamples",
    "Server",
    "Share",
    "ShoalError",
    "SingleEngine",
    "Sink",
    "StepResult",
    "Strategy",
    "StreamReader",
    "Task",
    "TaskInfo",
    "TextPart",
    "TrainingTask",
    "Transport",
    "World",
    "Zmq",
    "builds",
    "expect_frames",
    "frame_of",
    "from_pixels",
    "image_data",
    "in_rounds",
    "in_updates",
    "load",
    "values_of",
    "zeromq",
]
_IMPORTED_ON_USE = {
    "Answer": "shoal.runs.rlhf.rewards.interface.Answer",
    "Barrier": "shoal.coordinator.round_policies.Barrier",
    "Batch": "shoal.tasks.base.Batch",
    "Bounded": "shoal.coordinator.round_policies.Bounded",
    "ClassificationTask": "shoal.tasks.classification.Classification",
    "Client": "shoal.transports.interface.Client",
    "Coder": "shoal.updates.codecs.base.Coder",
    "ConnectOptions": "shoal.transports.interface.ConnectOptions",
    "Contributions": "shoal.updates.rules.mixing.Contributions",
    "Data": "shoal.data.loaded_data.Data",
    "DataInfo": "shoal.data.loaded_data.Info",
    "DataRequest": "shoal.data.hub.dataset.DataRequest",
    "DataShapes": "shoal.config.data_shapes.DataShapes",
    "Discounted": "shoal.coordinator.round_policies.Discounted",
    "DistributedEngine": "shoal.engines.base.Engine",
    "Document": "shoal.data.text.documents.Document",
    "Documents": "shoal.data.text.documents.InMemoryDocuments",
    "Every": "shoal.coordinator.round_policies.Every",
    "Everything": "shoal.coordinator.round_policies.Everything",
    "Floats": "shoal.updates.parallel_blocks.Floats",
    "Frame": "shoal.protocol.frames.Frame",
    "Frames": "shoal.protocol.frames.Frames",
    "ImageTarget": "shoal.data.images.samples.Target",
    "Indices": "shoal.data.interfaces.Indices",
    "LanguageModellingTask": "shoal.tasks.language.LanguageModelling",
    "ListenOptions": "shoal.transports.interface.ListenOptions",
    "Loss": "shoal.tasks.base.Loss",
    "Message": "shoal.protocol.messages.Message",
    "Policies": "shoal.strategies.policy_set.Policies",
    "Reporter": "shoal.runs.monitoring.recorder.Reporter",
    "Request": "shoal.protocol.messages.Request",
    "SampleStream": "shoal.data.interfaces.SampleStream",
    "Samples": "shoal.data.interfaces.Samples",
    "Score": "shoal.runs.rlhf.rewards.interface.Score",
    "SelectableSamples": "shoal.data.interfaces.SelectableSamples",
    "Server": "shoal.transports.interface.Server",
    "SingleEngine": "shoal.engines.single.SingleEngine",
    "StepResult": "shoal.tasks.base.StepResult",
    "StreamReader": "shoal.data.interfaces.StreamReader",
    "TaskInfo": "shoal.config.data_shapes.DataShapes",
    "TextPart": "shoal.data.text.documents.TextPart",
    "TrainingTask": "shoal.tasks.base.Task",
    "World": "shoal.engines.world.World",
    "expect_frames": "shoal.protocol.frames.expect_frames",
    "frame_of": "shoal.protocol.frames.frame_of",
    "from_pixels": "shoal.data.images.samples.from_pixels",
    "image_data": "shoal.data.images.samples.image_data",
    "in_rounds": "shoal.strategies.run_length.in_rounds",
    "in_updates": "shoal.strategies.run_length.in_updates",
    "values_of": "shoal.protocol.frames.values_of",
    "zeromq": "shoal.transports.zeromq",
}
"""Public name → where it is defined; the names above that need torch or NumPy."""


def __getattr__(name: str) -> Any:
    from pkgutil import resolve_name

    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"shoal.plugins has no {name}")
    globals()[name] = found = resolve_name(_IMPORTED_ON_USE[name])
    return found
