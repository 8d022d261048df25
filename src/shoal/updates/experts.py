"""Aggregation per expert: contributions to each expert of a mixture are weighted, or compared, separately.

Holds: an expert is a few spans of the vector, one in each stacked tensor of its layer. In no expert does a contribution count more than
`cap` times its share in the plain mean, whatever loads its worker reports.

Shapes: N contributions, L layers, E experts of a layer, X = L · E.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.config.schema import updates as schema
from shoal.updates.fragments import Span
from shoal.updates.rules.aggregation import combine, mean_of_vectors


class ExpertBlocks(NamedTuple):
    """Where the experts are in the parameter vector, and where their statistics are in a worker's report."""

    spans_X: tuple[tuple[Span, ...], ...]
    """The spans of each expert, layer by layer."""
    layers: int
    per_token: int
    """Experts that a token chooses in a layer."""
    loads_at: int | None = None
    """Offset of the loads in a worker's report; None: they are not reported."""
    cap: float | None = None
    """Most that a contribution may count in an expert, relative to its share in the plain mean; None: loads do not count."""
    apart: bool = False
    """Whether a robust rule compares each expert separately."""
    size: int = 0
    """Length of the vector."""
    biases_at: tuple[int, ...] = ()
    """Offsets of each layer's router biases in a worker's report; empty: routers have no biases."""

    @property
    def per_layer(self) -> int:
        """Experts of a layer."""
        return len(self.spans_X) // self.layers

    def loads_of(self, report: Tensor) -> Tensor:
        """The loads in a worker's report, limited to possible values: [X]."""
        assert self.loads_at is not None
        reported_LE = report[self.loads_at : self.loads_at + len(self.spans_X)].view(self.layers, -1)
        return believable(reported_LE, self.per_token).flatten()

    def checked(self, report: Tensor) -> Tensor:
        """A worker's report with its loads limited to possible values."""
        if self.loads_at is not None:
            report[self.loads_at : self.loads_at + len(self.spans_X)] = self.loads_of(report).to(report)
        return report

    def within(self, span: Span | None) -> ExpertBlocks:
        """The same blocks in a vector of this fragment of the weights; fragments are cut between tensors."""
        if span is None:
            return self
        first, last = span
        kept = (tuple((start - first, end - first) for start, end in own if first <= start < last) for own in self.spans_X)
        return self._replace(spans_X=tuple(kept), size=last - first)

    def stretches(self) -> Iterator[tuple[Span, int | None]]:
        """All spans of the vector in order: those of experts with the expert's number, and those between them with None."""
        at = 0
        for (start, end), number in sorted((span, number) for number, own in enumerate(self.spans_X) for span in own):
            if start > at:
                yield (at, start), None
            yield (start, end), number
            at = end
        if at < self.size:
            yield (at, self.size), None


def believable(reported_LE: Tensor, per_token: int) -> Tensor:
    """Reported shares limited to possible ones. A token chooses k different experts, so an expert has at most 1/k of the choices, and all
    experts together at most all of them."""
    share_LE = reported_LE.double().nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0 / per_token)
    return share_LE / share_LE.sum(1, keepdim=True).clamp(min=1.0)


def capped_shares(loads_NX: Tensor, weights_N: Tensor, cap: float) -> Tensor:
    """Each contribution's share in each expert, in proportion to the tokens that the expert saw and `cap` times its plain share at most.

    What the cap leaves over goes to the others in proportion to their tokens; if they saw none, to their plain shares. A cap of 1 is the
    plain mean.
    """
    plain_N1 = (weights_N.double() / weights_N.double().sum())[:, None]
    seen_NX = loads_NX.double() * plain_N1
    most_NX = (cap * plain_N1).expand_as(seen_NX)
    shares_NX = _fill(seen_NX, most_NX, torch.ones_like(seen_NX[0]))
    left_X = (1 - shares_NX.sum(0)).clamp(min=0)
    return shares_NX + _fill(plain_N1.expand_as(seen_NX), most_NX - shares_NX, left_X)


def _fill(wanted_NX: Tensor, room_NX: Tensor, amount_X: Tensor) -> Tensor:
    """Distribute an amount in proportion to `wanted_NX`, to each at most `room_NX`. Each iteration fills at least one, or is the last."""
    given_NX = torch.zeros_like(wanted_NX)
    for _ in range(len(wanted_NX)):
        open_NX = torch.where(given_NX < room_NX, wanted_NX, 0.0)
        left_X = (amount_X - given_NX.sum(0)).clamp(min=0)
        more_NX = open_NX * (left_X / open_NX.sum(0).clamp(min=1e-300))
        given_NX = torch.minimum(given_NX + more_NX, room_NX)
    return given_NX


def mean_by_experts(blocks: ExpertBlocks, vectors: Sequence[Tensor], weights_N: Tensor, loads_NX: Tensor, out: Tensor) -> Tensor:
    """The mean of vectors, in `out`: each expert weighted by the tokens that it saw, everything else by `weights_N`."""
    assert blocks.cap is not None
    shares_NX = capped_shares(loads_NX, weights_N, blocks.cap)
    for (start, end), number in blocks.stretches():
        shares_N = weights_N if number is None else shares_NX[:, number]
        mean_of_vectors([vector[start:end] for vector in vectors], shares_N, out[start:end])
    return out


def combine_apart(
    blocks: ExpertBlocks,
    aggregation: schema.Aggregation,
    mixing: schema.Mixing,
    stack_ND: Tensor,
    weights_N: Tensor,
    state: Tensor | None,
    seed: int,
    dropped: set[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `aggregation.combine`, for each expert separately and for the rest together: a contribution that is false in one expert is
    compared there, and may be chosen elsewhere. `state`, where the rule has one, is as long as the vector. `dropped` gets the contributions
    that were chosen nowhere."""
    update, remembered, left_out = torch.empty_like(stack_ND[0]), None, list[set[int]]()
    rest = tuple(span for span, number in blocks.stretches() if number is None)
    for spans in (own for own in (rest, *blocks.spans_X) if own):
        before = None if state is None else _taken(state, spans)
        left_out.append(set())
        own_update, after = combine(aggregation, mixing, _taken(stack_ND, spans), weights_N, before, seed, left_out[-1])
        _put(update, spans, own_update)
        if after is not None:
            remembered = torch.empty_like(update) if remembered is None else remembered
            _put(remembered, spans, after)
    if dropped is not None:
        dropped.update(set.intersection(*left_out))
    return update, remembered


def _taken(values: Tensor, spans: Sequence[Span]) -> Tensor:
    """The columns of some spans, concatenated."""
    return torch.cat([values[..., start:end] for start, end in spans], dim=-1)


def _put(target_D: Tensor, spans: Sequence[Span], values: Tensor) -> None:
    """The inverse of `_taken`."""
    for (start, end), own in zip(spans, torch.split(values, [end - start for start, end in spans]), strict=True):
        target_D[start:end] = own
