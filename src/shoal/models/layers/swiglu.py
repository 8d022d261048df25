"""SwiGLU on a CPU that keeps its input alone for the backward pass, which computes SiLU of the gate again: autograd would keep that, too, a
quarter of what a block of a small Llama keeps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(inner: Tensor) -> Tensor:
    """SiLU of the first half of the columns, the gate, times the second half."""
    learns = torch.is_grad_enabled() and inner.requires_grad
    if learns and inner.device.type == "cpu" and not torch.compiler.is_compiling():
        return _SwiGlu.apply(inner)  # type: ignore[no-untyped-call]
    gate, content = inner.chunk(2, dim=-1)
    return F.silu(gate) * content


class _SwiGlu(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(inner: Tensor) -> Tensor:
        gate, content = inner.chunk(2, dim=-1)
        return F.silu(gate).mul_(content)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (inner,) = ctx.saved_tensors
        gate, content = inner.chunk(2, dim=-1)
        return torch.cat([torch.ops.aten.silu_backward(slope * content, gate), F.silu(gate) * slope], dim=-1)
