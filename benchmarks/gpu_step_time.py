"""The time of training steps on a GPU: of several kinds, measured in turn, so that a slow minute of the machine slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Step = Callable[[], Tensor]


def seconds_per_step(step: Step, steps: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        loss = step()
    torch.cuda.synchronize()
    assert float(loss) == float(loss)
    return (time.perf_counter() - start) / steps


def median_seconds(kinds: Mapping[str, Step], steps: int, rounds: int) -> dict[str, float]:
    """The median over the rounds of the seconds that a step of each kind takes."""
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, step in kinds.items():
            taken[name].append(seconds_per_step(step, steps))
    return {name: statistics.median(values) for name, values in taken.items()}
