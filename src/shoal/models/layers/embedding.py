"""Token embedding that may be tied to the output matrix, with one gradient tensor for both uses.

By itself autograd makes a dense gradient for the lookup, almost all zeros, beside that of the output matrix, and adds the two. Here the
lookup also returns the matrix, the output layer uses that, and the backward pass adds the few rows of the tokens to its gradient in place:
one matrix less in memory, and less to write. The sums are the same.

Shapes: B batch, L tokens, D width, V vocabulary, U tokens that differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class TokenEmbedding(nn.Embedding):
    """An embedding that can return its matrix together with the looked-up rows."""

    may_lend = True
    """False switches this off; torch.func does not support it."""

    def forward(self, input_ids_BL: Tensor, lends: bool = False) -> Any:
        """The rows of the tokens. With `lends` also the matrix, to be used once as the output matrix in the same pass."""
        if not lends:
            return super().forward(input_ids_BL)
        return LentLookup.apply(self.weight, input_ids_BL)  # type: ignore[no-untyped-call]

    @property
    def can_lend(self) -> bool:
        """Only in training on the CPU: GPUs have fast kernels for the dense gradient, and the compiler handles the plain lookup."""
        learns = torch.is_grad_enabled() and self.weight.requires_grad
        return self.may_lend and learns and self.weight.device.type == "cpu" and not torch.compiler.is_compiling()


class LentLookup(torch.autograd.Function):
    """Rows of a matrix, and the matrix itself."""

    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids_BL)
        ctx.size = len(weight_VD)
        return nn.functional.embedding(ids_BL, weight_VD), weight_VD.detach()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, None]:
        (ids_BL,), (rows_BLD, weight_VD) = ctx.saved_tensors, slopes
        if rows_BLD is None:
            return weight_VD, None
        if weight_VD is None:
            return torch.ops.aten.embedding_dense_backward(rows_BLD, ids_BL, ctx.size, -1, False), None
        ids_U, places_BL = ids_BL.unique(return_inverse=True)
        rows_UD = rows_BLD.new_zeros(len(ids_U), rows_BLD.shape[-1]).index_add_(0, places_BL.flatten(), rows_BLD.flatten(0, 1))
        return weight_VD.index_add_(0, ids_U, rows_UD.to(weight_VD.dtype)), None
