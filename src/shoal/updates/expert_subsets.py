"""Workers that hold a subset of the experts: their part of the parameter vector, and the mean of their contributions.

Holds: a holder's vector is the whole one without the spans of experts that it does not hold. The trunk is the mean over all contributions,
an expert the mean over those of its holders; an expert without holders is not changed.

Shapes: N contributions, E experts of a layer, X experts of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.updates.experts import ExpertBlocks, capped_shares
from shoal.updates.rules.aggregation import mean_of_vectors

ExpertIds = tuple[int, ...]
"""Numbers of experts, the same in every layer, in ascending order; empty: all of them."""


class HolderVector(NamedTuple):
    """The vector of a contribution, and the experts that its worker holds."""

    vector: Tensor
    experts: ExpertIds


def why_not_held(blocks: ExpertBlocks, experts: Sequence[int]) -> str:
    """Why a worker cannot hold these experts; empty: it can."""
    if list(experts) != sorted(set(experts)) or not experts:
        return "experts are named by their numbers, each once and in ascending order"
    if experts[0] < 0 or experts[-1] >= blocks.per_layer:
        return f"the experts of this run have the numbers 0 to {blocks.per_layer - 1}"
    if len(experts) < blocks.per_token:
        return f"each token visits {blocks.per_token} experts: a worker must hold as many at least"
    return ""


def size_of(blocks: ExpertBlocks, experts: ExpertIds) -> int:
    """Length of the vector of a worker with these experts."""
    return sum(end - start for (start, end), number in blocks.stretches() if _has(blocks, experts, number))


def part_of(blocks: ExpertBlocks, vector: Tensor, experts: ExpertIds) -> Tensor:
    """The part of a whole vector that a worker with these experts has."""
    return torch.cat([vector[start:end] for (start, end), number in blocks.stretches() if _has(blocks, experts, number)])


def mean_over_holders(
    blocks: ExpertBlocks, parts: Sequence[HolderVector], weights_N: Tensor, out: Tensor, loads_NX: Tensor | None = None
) -> Tensor:
    """The mean of contributions, in `out`, which is not changed where an expert has no holder. With loads, each expert is weighted by the
    tokens that it saw, as in `mean_by_experts`, among its holders."""
    shares_NX = None if loads_NX is None else _shares_of_holders(blocks, parts, weights_N, loads_NX)
    at = [0] * len(parts)
    for (start, end), number in blocks.stretches():
        holders = [i for i, part in enumerate(parts) if _has(blocks, part.experts, number)]
        if holders:
            vectors = [parts[i].vector[at[i] : at[i] + end - start] for i in holders]
            shares_N = weights_N[holders] if number is None or shares_NX is None else shares_NX[holders, number]
            mean_of_vectors(vectors, shares_N, out[start:end])
        for i in holders:
            at[i] += end - start
    return out


def mean_of_reports(blocks: ExpertBlocks, reports_NB: Tensor, weights_N: Tensor, held: Sequence[ExpertIds]) -> Tensor:
    """The mean of the reports beside the updates. The router bias of an expert is averaged over its holders alone."""
    weights_N = weights_N.double()
    mean_B = (weights_N @ reports_NB.double()) / weights_N.sum()
    holds_NE = torch.tensor([[_has(blocks, experts, number) for number in range(blocks.per_layer)] for experts in held])
    shares_NE = weights_N[:, None] * holds_NE
    shares_NE = shares_NE / shares_NE.sum(0).clamp(min=1e-300)
    for start in blocks.biases_at:
        mean_B[start : start + blocks.per_layer] = (shares_NE * reports_NB[:, start : start + blocks.per_layer]).sum(0)
    return mean_B.to(reports_NB.dtype)


def format_expert_ids(experts: Sequence[int]) -> str:
    """Expert numbers as text: `0–3, 8`."""
    runs = list[list[int]]()
    for number in experts:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _has(blocks: ExpertBlocks, experts: ExpertIds, number: int | None) -> bool:
    """Whether a holder of these experts has a span: of the trunk (None), or of an expert numbered over all layers."""
    return number is None or not experts or number % blocks.per_layer in experts


def _shares_of_holders(blocks: ExpertBlocks, parts: Sequence[HolderVector], weights_N: Tensor, loads_NX: Tensor) -> Tensor:
    assert blocks.cap is not None
    shares_NX = torch.zeros_like(loads_NX, dtype=torch.float64)
    for number in range(blocks.per_layer):
        holders = [i for i, part in enumerate(parts) if _has(blocks, part.experts, number)]
        if holders:
            own_HL = loads_NX[holders, number :: blocks.per_layer]
            shares_NX[holders, number :: blocks.per_layer] = capped_shares(own_HL, weights_N[holders], blocks.cap)
    return shares_NX
