"""Mixture of activations: a blend of four activations by a learned gate.

Shapes: R rows, I inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (F.relu, F.gelu, F.silu, F.mish)


def blend(x_RI: Tensor, gates_R4: Tensor) -> Tensor:
    """Σ gate · activation, in the type of `x`. The backward pass recomputes one activation after the other from `x` and the gates: saving
    all four would make them the largest tensors of the model."""
    return _Blend.apply(x_RI, gates_R4.to(x_RI.dtype))  # type: ignore[no-untyped-call]


class _Blend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, gates_R4: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, gates_R4)
        y_RI = torch.zeros_like(x_RI)
        for number, activation in enumerate(ACTIVATIONS):
            y_RI.addcmul_(activation(x_RI), gates_R4[..., number : number + 1])
        return y_RI

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, Tensor]:
        x_RI, gates_R4 = ctx.saved_tensors
        (above_RI,) = above
        slope_RI, gate_slopes = torch.zeros_like(x_RI), []
        for number, activation in enumerate(ACTIVATIONS):
            with torch.enable_grad():
                own_RI = x_RI.detach().requires_grad_()
                y_RI = activation(own_RI)
            gate_slopes.append((y_RI.detach() * above_RI).sum(-1))
            (part_RI,) = torch.autograd.grad(y_RI, own_RI, above_RI * gates_R4[..., number : number + 1])
            slope_RI += part_RI
        return slope_RI, torch.stack(gate_slopes, dim=-1)
