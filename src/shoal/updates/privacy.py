"""Differential privacy: noise on a clipped contribution, and the (ε, δ) that a run has spent.

Accounting is that of the Poisson-sampled Gaussian mechanism (Rényi divergences). Batches here are drawn without replacement from a
shuffle; accounting for that in the same way is common practice, but not proved. The noise comes from an ordinary generator of 32-bit
floats: it hides a sample from readers of the updates, not from one who knows the generator's state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Generator, Tensor

from shoal.errors import ShoalError

_BLOCK = 1 << 18


def add_noise_(vector: Tensor, clip_norm: float, noise_multiplier: float, generator: Generator) -> None:
    """Add N(0, (clip_norm · noise_multiplier)²) to each number, in place."""
    buffer = torch.empty(min(_BLOCK, len(vector)), dtype=vector.dtype, device=vector.device)
    for start in range(0, len(vector), _BLOCK):
        block = vector[start : start + _BLOCK]
        noise = buffer[: len(block)]
        noise.normal_(0.0, clip_norm * noise_multiplier, generator=generator)
        block += noise


def sample_level_multiplier(noise_multiplier: float) -> float:
    """The multiplier to account with when a sample is to be hidden, and not a worker.

    A contribution is clipped as a whole, not per sample. Replacing one sample can move it across the clipping ball, by twice the clip norm,
    so the noise is half as large relative to that as the setting says.
    """
    return noise_multiplier / 2


@lru_cache(maxsize=4096)
def epsilon(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> float:
    """ε after `steps` noisy steps, each on a random `sampling_rate` of the data; infinite without noise."""
    if steps == 0:
        return 0.0
    one_step = _one_step(noise_multiplier, sampling_rate)
    from dp_accounting import rdp

    return float(rdp.compute_epsilon(one_step.orders, steps * one_step.rdp, delta)[0])


@dataclass
class Accountant:
    """The steps of each worker, and the ε that follows. Workers hold different samples, so a run has spent the maximum over its workers.

    `steps` is the whole state. Rényi divergences add up, so those of one step are computed once and multiplied.
    """

    noise_multiplier: float
    sampling_rate: float
    delta: float
    steps: dict[str, int] = field(default_factory=dict)

    def record(self, worker: str, steps: int = 1) -> None:
        self.steps[worker] = self.steps.get(worker, 0) + steps

    def spent(self) -> float:
        """ε so far of the worker with the most steps."""
        return epsilon(self.noise_multiplier, self.sampling_rate, max(self.steps.values(), default=0), self.delta)


@lru_cache(maxsize=64)
def _one_step(noise_multiplier: float, sampling_rate: float) -> Any:
    """An accountant of one step, with its Rényi divergences at each order."""
    try:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, rdp
    except ImportError as error:
        raise ShoalError("accounting for privacy needs dp-accounting: pip install 'shoal[privacy]'") from error
    accountant = rdp.RdpAccountant()
    accountant.compose(PoissonSampledDpEvent(sampling_rate, GaussianDpEvent(noise_multiplier)))
    return accountant
