"""The learning rate over the run: a pure function of the step."""

from __future__ import annotations

import math

from shoal.config.schema.training import Schedule


def learning_rate(settings: Schedule, peak: float, step: float, total: int) -> float:
    """The learning rate of a step (counted from 0) in a run of `total` steps."""
    warmup = settings.warmup_steps
    if step < warmup:
        risen = (step + 1) / warmup
        return peak * (risen if settings.warmup == "linear" else 0.5 * (1 - math.cos(math.pi * risen)))
    if settings.kind == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    left: float = {
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "polynomial": (1 - done) ** settings.power,
    }[settings.kind]
    return settings.end_learning_rate + (peak - settings.end_learning_rate) * left
