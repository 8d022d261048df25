"""A plugin as somebody else would write it: a strategy, a rule, a codec, a task and a model, in one file."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from shoal.plugins import (
    Aggregation,
    Barrier,
    Batch,
    ClassificationTask,
    Codec,
    Coder,
    Contributions,
    DataShapes,
    Discounted,
    Loss,
    Model,
    Policies,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Run,
    Strategy,
    Task,
    TaskInfo,
    builds,
    expect_frames,
    frame_of,
    in_updates,
    values_of,
)


class Patient(Strategy):
    """All who are there are waited for, and a gradient that came too late for its round counts in the next one, though less."""

    kind: Literal["patient"] = "patient"
    deadline_s: PositiveFloat = 20.0
    """Seconds after the first gradient at which a round closes without the others."""


@builds(Patient)
def patient(run: Run, expected: int) -> Policies:
    assert isinstance(run.strategy, Patient)
    rounds = Barrier(deadline_s=run.strategy.deadline_s, late_count=True)
    return Policies(rounds=rounds, length=in_updates(run, rounds), admission=Discounted())


class Drifting(Aggregation):
    """A running mean of the updates: it remembers the last one."""

    kind: Literal["drifting"] = "drifting"
    pace: PositiveShare = 0.5
    """Share of the new mean in the update."""


@builds(Drifting)
def drifting(rule: Drifting, contributions: Contributions) -> Tensor:
    mean = contributions.rows.mean(0)
    contributions.memory = mean if contributions.memory is None else torch.lerp(contributions.memory.to(mean), mean, rule.pace)
    return contributions.memory.clone()


class Rounded(Codec):
    """Decimal places, as whole numbers of two bytes."""

    kind: Literal["rounded"] = "rounded"
    places: PositiveInt = 3
    """Decimal places that are kept."""
    error_feedback: bool = True
    """What was lost is added to the next update."""


@builds(Rounded)
class RoundedCoder(Coder):
    def __init__(self, settings: Rounded) -> None:
        self.scale = np.float32(10**settings.places)

    def pack(self, values: np.ndarray) -> tuple[memoryview, ...]:
        return (frame_of(np.clip(np.rint(values * self.scale), -32767, 32767).astype("<i2")),)

    def unpack(self, size: int, frames: Sequence[memoryview]) -> np.ndarray:
        expect_frames(len(frames), 1)
        return values_of(frames[0], "<i2", size, "whole numbers").astype(np.float32) / self.scale

    def most_bytes(self, size: int) -> int:
        return 2 * size


class Margin(Task):
    """The right class must score higher than all others by a margin."""

    kind: Literal["margin"] = "margin"
    needs = "labels"
    margin: PositiveShare = 0.5
    """By how much."""


@builds(Margin)
class MarginTask(ClassificationTask):
    def __init__(self, settings: Margin, run: Run, players: dict[str, nn.Module], info: TaskInfo) -> None:
        super().__init__(players)
        self.loss = nn.MultiMarginLoss(margin=settings.margin)

    def losses(self, batch: Batch) -> Iterator[Loss]:
        loss = self.loss(self.players["model"](batch["image"]), batch["label"])
        yield Loss("model", loss, {"loss": loss})


class Waves(Model):
    """One hidden layer of sines."""

    kind: Literal["waves"] = "waves"
    learns = ("margin", "classification")
    width: PositiveInt = 32
    """How many of them."""


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


@builds(Waves)
def waves(settings: Waves, run: Run, shapes: DataShapes) -> dict[str, nn.Module]:
    pixels = int(np.prod(shapes.image_shape))
    layers = (nn.Flatten(), nn.Linear(pixels, settings.width), Sine(), nn.Linear(settings.width, shapes.num_classes))
    return {"model": nn.Sequential(*layers)}
