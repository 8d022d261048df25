"""Exchange of rows between the ranks that share the experts of a layer: each rank computes some experts, for the tokens of all.

A rank sends the rows of its tokens to the ranks of their experts, and receives the outputs. Both are all-to-all messages, which run beside
what the rank computes between their beginning and their end; the backward pass sends gradients along the same ways.

Shapes: N ranks, E experts, L experts of a rank, R rows of this rank's tokens sorted by expert, X rows that this rank's experts compute.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shoal.models.compile_rules import not_compiled


class ReceivedRows(NamedTuple):
    """What the experts of this rank compute, sorted by expert."""

    x_XD: Tensor
    gates_X: Tensor
    sizes_L: Tensor
    """Rows of each expert."""


class RankExchange:
    """The ranks that share the experts of a layer. Holds: each of them has the same number of experts, in the order of the ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rows = 0
        """Rows that this rank's experts have computed since the owner last set this to 0."""

    @not_compiled
    def begin(self, x_RD: Tensor, gates_R: Tensor, sizes_E: Tensor) -> SentRows:
        """Begin to send each row to the rank of its expert. All ranks must call it, also those without rows."""
        sent_NL = sizes_E.view(self.group.size(), -1)
        received_NL = torch.empty_like(sent_NL)
        dist.all_to_all_single(received_NL, sent_NL.contiguous(), group=self.group)
        outward, inward = torch.stack([sent_NL.sum(1), received_NL.sum(1)]).tolist()  # read from the device once
        self.rows += sum(inward)
        return SentRows(self.group, received_NL, outward, inward, x_RD, gates_R)


class SentRows:
    """Rows that are on their way to the ranks of their experts."""

    def __init__(
        self, group: dist.ProcessGroup, received_NL: Tensor, outward: list[int], inward: list[int], x_RD: Tensor, gates_R: Tensor
    ) -> None:
        """`outward`, `inward`: rows for and from each rank."""
        self._group, self._outward, self._inward = group, outward, inward
        self._received_NL, self._order_X = received_NL, _by_expert(received_NL, sum(inward))
        self._x, self._gates = (_begun(one, Transfer(group, outward, inward)) for one in (x_RD, gates_R))

    @not_compiled
    def wait(self) -> ReceivedRows:
        """The rows of all ranks for the experts of this one; without any a row of zeros, since few kernels compute nothing."""
        x_XD, gates_X = (_Permuted.apply(_ended(*one), self._order_X, False) for one in (self._x, self._gates))  # type: ignore[no-untyped-call]
        sizes_L = self._received_NL.sum(0)
        if len(x_XD):
            return ReceivedRows(x_XD, gates_X, sizes_L)
        one_L = torch.zeros_like(sizes_L).index_fill_(0, torch.zeros(1, dtype=torch.long, device=sizes_L.device), 1)
        return ReceivedRows(F.pad(x_XD, (0, 0, 0, 1)), F.pad(gates_X, (0, 1)), one_L)

    @not_compiled
    def send_back(self, y_XD: Tensor) -> PendingOutputs:
        """Begin to return the outputs of this rank's experts to the ranks of their tokens."""
        y_XD = _Permuted.apply(y_XD[: len(self._order_X)], self._order_X, True)  # type: ignore[no-untyped-call]
        return PendingOutputs(*_begun(y_XD, Transfer(self._group, self._inward, self._outward)))


class PendingOutputs:
    """Outputs of the experts that are on their way back."""

    def __init__(self, y_RD: Tensor, transfer: Transfer) -> None:
        self._begun = y_RD, transfer

    @not_compiled
    def wait(self) -> Tensor:
        """The outputs of all ranks' experts for the rows of this rank's tokens, in the order in which these were sent."""
        return _ended(*self._begun)


def _by_expert(received_NL: Tensor, rows: int) -> Tensor:
    """The position of each row, once they are sorted by expert, among the rows as they come: by rank, and then by expert."""
    lengths_NL = received_NL
    starts_NL = lengths_NL.flatten().cumsum(0).view_as(lengths_NL) - lengths_NL
    lengths_S, starts_S = lengths_NL.t().flatten(), starts_NL.t().flatten()
    shifts_S = starts_S - (lengths_S.cumsum(0) - lengths_S)
    return torch.arange(rows, device=received_NL.device) + torch.repeat_interleave(shifts_S, lengths_S, output_size=rows)


class _Permuted(torch.autograd.Function):
    """Rows in another order; `back`: the rows in the order before. Each is the backward pass of the other, without a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order_X: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(order_X)
        ctx.back = back
        return _permuted(x, order_X, back)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        (order_X,) = ctx.saved_tensors
        return _permuted(slopes[0], order_X, not ctx.back), None, None


def _permuted(x: Tensor, order_X: Tensor, back: bool) -> Tensor:
    return torch.empty_like(x).index_copy_(0, order_X, x) if back else x[order_X]


class Transfer:
    """One message to all ranks, and in the backward pass the gradients that come back."""

    def __init__(self, group: dist.ProcessGroup, outward: list[int], inward: list[int]) -> None:
        self._group, self._outward, self._inward = group, outward, inward
        self._under_way: tuple[dist.Work, Tensor, Tensor] | None = None

    def begin(self, x: Tensor, back: bool) -> Tensor:
        """Begin to send. The result is filled when `wait` returns: on a GPU, for what is computed from then on."""
        outward, inward = (self._inward, self._outward) if back else (self._outward, self._inward)
        sent, received = x.contiguous(), x.new_empty((sum(inward), *x.shape[1:]))
        work = dist.all_to_all_single(received, sent, inward, outward, group=self._group, async_op=True)
        assert work is not None
        self._under_way = work, sent, received  # memory that the message is read from must stay
        return received

    def wait(self) -> Tensor:
        assert self._under_way is not None
        work, _, received = self._under_way
        self._under_way = None
        work.wait()
        return received


class _Begin(torch.autograd.Function):
    """Begins a transfer. Its backward pass ends the one that the backward pass of `_End` has begun: what is computed between the two in the
    forward pass, has its backward pass between them, too. The gradient is taken from the transfer; autograd's has another shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.begin(x, back=False)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.wait(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, transfer: Transfer) -> Tensor:
        transfer.wait()
        ctx.transfer = transfer
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.begin(slopes[0], back=True)
        return slopes[0], None


def _begun(x: Tensor, transfer: Transfer) -> tuple[Tensor, Transfer]:
    return _Begin.apply(x, transfer), transfer  # type: ignore[no-untyped-call]


def _ended(received: Tensor, transfer: Transfer) -> Tensor:
    return _End.apply(received, transfer)  # type: ignore[no-untyped-call]
