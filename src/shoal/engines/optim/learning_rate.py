"""The learning rate over the run: a pure function of the step."""

from __future__ import annotations

import math

from shoal.config.schema.training import Schedule

_TIMESCALE = 10_000
"""Of the inverse square root without a warm-up, as in Transformers."""


def learning_rate(settings: Schedule, peak: float, step: float, total: int) -> float:
    """The learning rate of a step (counted from 0) in a run of `total` steps."""
    warmup = settings.warmup_steps
    if step < warmup:
        risen = (step + 1) / warmup
        return peak * (risen if settings.warmup == "linear" else 0.5 * (1 - math.cos(math.pi * risen)))
    return settings.end_learning_rate + (peak - settings.end_learning_rate) * _left(settings, step, total)


def decay_steps(settings: Schedule, total: int) -> int:
    """The steps of the decay of a run of `total` steps: at most those after the warm-up."""
    wanted = max(1, round(total / 10)) if settings.decay_steps is None else settings.decay_steps
    return min(wanted, max(1, total - settings.warmup_steps))


def _left(settings: Schedule, step: float, total: int) -> float:
    """What is left of the way from the end's rate to the peak, after the warm-up: 1 at its end."""
    if settings.kind == "constant":
        return 1.0
    if settings.kind == "inverse-sqrt":
        timescale = settings.timescale or settings.warmup_steps or _TIMESCALE
        return math.sqrt(timescale / (timescale + step - settings.warmup_steps))
    if settings.kind == "wsd":
        decay = decay_steps(settings, total)
        return _decayed(settings, min(1.0, max(0.0, (step - (total - decay)) / decay)))
    done = min(1.0, (step - settings.warmup_steps) / max(1, total - settings.warmup_steps))
    if settings.kind == "cosine-restarts":
        return 0.0 if done == 1 else _cosine(done * settings.cycles % 1)
    return {"cosine": _cosine(done), "linear": 1 - done, "polynomial": (1 - done) ** settings.power}[settings.kind]


def _decayed(settings: Schedule, done: float) -> float:
    return {"linear": 1 - done, "1-sqrt": 1 - math.sqrt(done), "cosine": _cosine(done)}[settings.decay]


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))
