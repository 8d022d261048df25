"""Adam and AdamW on a network's whole vector. Gradients are read where the backward pass left them. A single pass clips, steps, rounds
the running means as `adam_state.py` describes, and writes the bf16 copy of the weights. On a GPU that pass is a kernel
(`adam_kernels.py`); elsewhere it is plain torch, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from shoal.engines.optim.adam_state import AdamRates, GradientClip, MomentBuffer, span_of
from shoal.errors import ShoalError
from shoal.updates.layout import FlatNetwork

_TAKEN = {"lr", "betas", "eps", "weight_decay"}


class FlatAdam(torch.optim.Optimizer):
    """One group with one parameter: the vector of a network."""

    @staticmethod
    def suits(name: str, keywords: Mapping[str, Any], moments: str, device: torch.device) -> bool:
        """Whether an optimizer with these settings is this one: for means that torch's own cannot keep so, and on GPUs."""
        plain = name in ("Adam", "AdamW") and keywords.keys() <= _TAKEN
        if moments != "fp32" and not plain:
            raise ShoalError(f"training.optimizer.moments: {moments} is for Adam and AdamW without further arguments (kwargs)")
        return plain and (moments != "fp32" or (device.type == "cuda" and find_spec("triton") is not None))

    def __init__(
        self,
        network: FlatNetwork,
        moments: str,
        *,
        decoupled: bool,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
    ) -> None:
        """`decoupled`: weight decay as AdamW has it."""
        self.network, self.moments, self.decoupled = network, moments, decoupled
        self._whole = nn.Parameter(network.vector)
        self._whole.grad = network.gradient
        decay = (0.01 if decoupled else 0.0) if weight_decay is None else weight_decay
        super().__init__([self._whole], {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay})
        self.clip: GradientClip | None = None
        """For the next step alone."""
        self._kernels: Any = None
        if network.vector.is_cuda:
            from shoal.engines.optim.adam_kernels import AdamKernels

            self._kernels = AdamKernels(network.layout, network.vector.device)

    def sources(self) -> list[Tensor | None]:
        """The gradient of every parameter, wherever it is."""
        if self.network.gathered:
            return [*self.network.slopes]
        return [None if one.grad is None else one.grad.contiguous() for one in self.network.parameters]

    def norm(self) -> Tensor:
        """The norm of the whole gradient."""
        if self._kernels is not None:
            return self._kernels.norm(self.sources())
        squares = [gradient.float().square().sum() for gradient in self.sources() if gradient is not None]
        return torch.stack(squares).sum().sqrt() if squares else self.network.vector.new_zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        state = self._state()
        state["step"] += 1
        clip, self.clip = self.clip, None
        rates, seeds = self._rates(int(state["step"])), _seeds(int(state["step"]))
        if self._kernels is not None:
            self._kernels.step(self.network, self.sources(), state["exp_avg"], state["exp_avg_sq"], rates, self.decoupled, clip, seeds)
        elif clip is None or not clip.skip or bool(clip.norm.isfinite()):
            self._step_plainly(state["exp_avg"], state["exp_avg_sq"], rates, clip, seeds)

    def _step_plainly(
        self, first: MomentBuffer, second: MomentBuffer, rates: AdamRates, clip: GradientClip | None, seeds: tuple[int, int]
    ) -> None:
        for number, (slot, gradient) in enumerate(zip(self.network.layout.slots, self.sources(), strict=True)):
            weights = self.network.vector[span_of(slot)]
            slope = torch.zeros_like(weights) if gradient is None else gradient.flatten().to(weights)
            slope = slope if clip is None else slope * clip.factor()
            m, v = adam_(weights, slope, first.read(number), second.read(number), rates, self.decoupled)
            first.write(number, m, seeds[0])
            second.write(number, v, seeds[1])
        self.network.renew_shadow()

    def uncount(self) -> None:
        """The last step was not taken, since its gradient was not finite."""
        self._state()["step"] -= 1

    def _rates(self, step: int) -> AdamRates:
        (group,) = self.param_groups
        first, second = group["betas"]
        shares = 1 - first**step, math.sqrt(1 - second**step)
        return AdamRates(float(group["lr"]), first, second, group["eps"], group["weight_decay"], *shares)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.state[self._whole]
        if not state:
            layout, device = self.network.layout, self.network.vector.device
            state["step"] = torch.zeros(())
            state["exp_avg"] = MomentBuffer(self.moments, layout, device, root=False)
            state["exp_avg_sq"] = MomentBuffer(self.moments, layout, device, root=True)
        return state

    def wide_state(self) -> dict[str, Tensor]:
        """The state as torch's own optimizer has it; nothing before the first step."""
        state = self.state.get(self._whole, {})
        return {key: value.wide() if isinstance(value, MomentBuffer) else value for key, value in state.items()}

    def load_wide_state(self, wide: Mapping[str, Tensor]) -> None:
        self.state.clear()
        if wide:
            state = self._state()
            state["step"].copy_(wide["step"])
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].load(wide[key])


def adam_(weights: Tensor, slope: Tensor, m: Tensor, v: Tensor, rates: AdamRates, decoupled: bool) -> tuple[Tensor, Tensor]:
    """Step the weights in place; the new means of gradients and of their squares."""
    if decoupled:
        weights.mul_(1 - rates.learning * rates.decay)
    else:
        slope = slope + rates.decay * weights
    m = m + (1 - rates.first) * (slope - m)
    v = rates.second * v + (1 - rates.second) * slope * slope
    weights.sub_(rates.learning / rates.first_share * m / (v.sqrt() / rates.second_share + rates.eps))
    return m, v


def _seeds(step: int) -> tuple[int, int]:
    """Of a step: for the mean of gradients and for that of squares."""
    first, second = (step * 2 * 0x9E3779B1) & 0xFFFFFFFF, ((step * 2 + 1) * 0x9E3779B1) & 0xFFFFFFFF
    return first, second
