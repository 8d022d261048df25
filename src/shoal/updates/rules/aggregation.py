"""Aggregation rules: pure functions from a stack [N, D] of N contributions to one update.

Some rules compute a weight for each contribution from pairwise distances, which follow from one Gram matrix. Others work column by column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.config.derived_values import default_byzantine, quorum
from shoal.config.schema import updates as schema
from shoal.errors import ShoalError
from shoal.updates.parallel_blocks import BLOCK, Floats, in_blocks, scratch
from shoal.updates.rules.gram_matrix import squared_distances
from shoal.updates.rules.mixing import Contributions
from shoal.updates.rules.sorted_columns import by_sorted_columns, mean_of, nearest_the_median

Doubles = NDArray[np.float64]


def combine(
    aggregation: schema.Aggregation,
    mixing: schema.Mixing,
    stack_ND: Tensor,
    weights_N: Tensor,
    state: Tensor | None,
    seed: int,
    dropped: set[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One update from the contributions of a round, and the rule's state for the next round. `dropped` gets the contributions that the rule
    left out; rules that work column by column never leave one out."""
    contributions = Contributions(stack_ND, mixing, seed, weights_N, state)
    update: Tensor = aggregation.builder()(aggregation, contributions)
    if dropped is not None:
        dropped.update(contributions.dropped)
    return update, contributions.memory


def by_mean(rule: schema.Mean, contributions: Contributions) -> Tensor:
    return contributions.mean(contributions.weights_N)


def by_trimmed_mean(rule: schema.TrimmedMean, contributions: Contributions) -> Tensor:
    return trimmed_mean(contributions.rows, rule.trim_ratio)


def by_median(rule: schema.Median, contributions: Contributions) -> Tensor:
    return median(contributions.rows)


def by_geometric_median(rule: schema.GeometricMedian, contributions: Contributions) -> Tensor:
    return contributions.weighted(geometric_median_weights(contributions.gram, rule.iterations, rule.smoothing))


def by_krum(rule: schema.Krum | schema.MultiKrum, contributions: Contributions) -> Tensor:
    return contributions.weighted(
        krum_weights(contributions.gram, _false(rule, contributions), rule.select if isinstance(rule, schema.MultiKrum) else 1)
    )


def by_bulyan(rule: schema.Bulyan, contributions: Contributions) -> Tensor:
    """Krum chooses N − 2f contributions one by one; of each of their columns, the mean of the values nearest the median."""
    byzantine = _false(rule, contributions)
    chosen = bulyan_choice(contributions.gram, byzantine)
    contributions.choose(chosen)
    if not byzantine:  # all are chosen, and of each column all values count
        return mean(contributions.rows)
    return by_sorted_columns(contributions.rows, lambda block: nearest_the_median(block, len(chosen) - 2 * byzantine), chosen)


def by_centered_clipping(rule: schema.CenteredClipping, contributions: Contributions) -> Tensor:
    centre = centered_clipping(contributions.rows, contributions.memory, rule.radius, rule.iterations)
    contributions.memory = centre.clone()
    return centre


def _false(rule: schema.Krum | schema.MultiKrum | schema.Bulyan, contributions: Contributions) -> int:
    """Number of false contributions that the rule must tolerate."""
    return default_byzantine(rule.kind, len(contributions.stack_ND), contributions.bucket) if rule.byzantine is None else rule.byzantine


def mean(stack_ND: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """The mean, weighted by samples where they are given."""
    count = len(stack_ND)
    weights = torch.full((count,), 1.0 / count) if weights_N is None else weights_N / weights_N.sum()
    return weights.to(stack_ND) @ stack_ND


def mean_of_vectors(vectors: Sequence[Tensor], weights_N: Tensor, out: Tensor) -> Tensor:
    """The weighted mean of separate vectors, in `out`: copying them into a stack would cost several times the arithmetic."""
    rows = [vector.numpy() for vector in vectors]
    shares = (weights_N / weights_N.sum()).to(torch.float32).numpy()
    total: Floats = out.numpy()

    def add_up(start: int, end: int) -> None:
        np.multiply(rows[0][start:end], shares[0], out=total[start:end])
        for row, share in zip(rows[1:], shares[1:], strict=True):
            total[start:end] += np.multiply(row[start:end], share, out=scratch(end - start))

    in_blocks(len(total), add_up)
    return out


def mean_one_by_one(vectors: Iterable[Tensor], weights_N: Tensor, out: Tensor) -> Tensor:
    """The same, bit for bit, with one of the vectors in memory at a time."""
    total: Floats = out.numpy()
    for number, (vector, share) in enumerate(zip(vectors, (weights_N / weights_N.sum()).to(torch.float32).numpy(), strict=True)):
        in_blocks(len(total), partial(_add_block, total, vector.numpy(), share, number == 0))
    return out


def _add_block(total: Floats, row: Floats, share: np.float32, first: bool, start: int, end: int) -> None:
    if first:
        np.multiply(row[start:end], share, out=total[start:end])
    else:
        total[start:end] += np.multiply(row[start:end], share, out=scratch(end - start))


def trimmed_mean(stack_ND: Tensor, trim_ratio: float) -> Tensor:
    """The mean of each column without its extremes: half of `trim_ratio` is dropped at each end, at least one of three or more."""
    count = len(stack_ND)
    dropped = trimmed_at_each_end(count, trim_ratio)
    return by_sorted_columns(stack_ND, lambda block: mean_of(block[:, dropped : count - dropped])) if dropped else mean(stack_ND)


def trimmed_at_each_end(count: int, trim_ratio: float) -> int:
    """Contributions dropped at each end of a column: one at least, where any are to be dropped, and so that one at least is left."""
    return min(max(int(count * trim_ratio / 2 + 1e-9), trim_ratio > 0), (count - 1) // 2)


def median(stack_ND: Tensor) -> Tensor:
    """The middle of each column; the mean of the two middle ones where there are two."""
    low, high = (len(stack_ND) - 1) // 2, len(stack_ND) // 2
    return by_sorted_columns(stack_ND, lambda block: mean_of(block[:, low : high + 1]))


def krum_weights(gram_NN: Tensor, byzantine: int, select: int | None) -> Tensor:
    """Equal weights for the `select` (None: N − f) with the lowest scores: the sums of squared distances to their N − f − 2 nearest."""
    count = len(gram_NN)
    _need("krum", byzantine, count)
    chosen = min(count, count - byzantine if select is None else select)
    order = _scores(squared_distances(gram_NN), count - byzantine - 2).argsort(stable=True)
    return torch.zeros(count, dtype=torch.float64).index_fill_(0, order[:chosen], 1 / chosen)


def bulyan_choice(gram_NN: Tensor, byzantine: int) -> list[int]:
    """The N − 2f contributions that Krum takes, each time from those that are left."""
    _need("bulyan", byzantine, len(gram_NN))
    distances_NN = squared_distances(gram_NN)
    left = list(range(len(distances_NN)))
    chosen = []
    for _ in range(len(distances_NN) - 2 * byzantine):
        among = torch.tensor(left)
        neighbours = max(1, len(left) - byzantine - 2)
        best = int(_scores(distances_NN[among][:, among], neighbours).argmin())
        chosen.append(left.pop(best))
    return chosen


def geometric_median_weights(gram_NN: Tensor, iterations: int, smoothing: float) -> Tensor:
    """Weiszfeld's iteration on N weights: the point is always a weighted mean, so its distances follow from the Gram matrix.

    `smoothing` is the least distance, as a share of the median distance, to avoid divisions by almost zero. The iteration starts from the
    nearest half around the most central contribution: from the mean it converges slowly when a false contribution is far away.
    """
    apart = squared_distances(gram_NN).sqrt()
    least = float(smoothing * apart.median()) or 1e-300
    half = apart[int(apart.sum(1).argmin())].argsort()[: len(apart) // 2 + 1]
    shares = torch.zeros(len(apart), dtype=torch.float64).index_fill_(0, half, 1 / len(half))
    for _ in range(iterations):
        inner = gram_NN @ shares
        distances = (gram_NN.diagonal() - 2 * inner + shares @ inner).clamp(min=0).sqrt()
        before, shares = shares, 1 / distances.clamp(min=least)
        shares = shares / shares.sum()
        if float((shares - before).abs().max()) < 1e-12:
            break
    return shares


def centered_clipping(stack_ND: Tensor, centre_D: Tensor | None, radius: float, iterations: int) -> Tensor:
    """From the last aggregate (zero at first) towards each contribution by at most `radius`; then again (Karimireddy et al., 2021)."""
    centre = torch.zeros_like(stack_ND[0]) if centre_D is None else centre_D.to(stack_ND)
    for _ in range(iterations):
        distances = distances_from(stack_ND, centre)
        shares = (radius / distances.clamp(min=radius)) / len(stack_ND)
        centre = shares.to(stack_ND) @ stack_ND + float(1 - shares.sum()) * centre
    return centre


def distances_from(stack_ND: Tensor, centre_D: Tensor) -> Tensor:
    """Each contribution's distance from a point, in double precision."""
    stack, centre = stack_ND.cpu().numpy(), centre_D.cpu().numpy()
    squares: list[Doubles] = []

    def measure(start: int, end: int) -> None:
        differences = stack[:, start:end] - centre[start:end]
        sums = np.einsum("nw,nw->n", differences, differences)
        if not np.isfinite(sums).all():
            sums = np.square(differences, dtype=np.float64).sum(1)
        squares.append(sums.astype(np.float64))

    in_blocks(stack.shape[1], measure, max(256, BLOCK // len(stack)))
    return torch.from_numpy(np.sqrt(np.sum(squares, axis=0)))


def _scores(distances_NN: Tensor, neighbours: int) -> Tensor:
    """Sums of the smallest distances to others."""
    return distances_NN.sort(1).values[:, 1 : neighbours + 1].sum(1)


def _need(rule: str, byzantine: int, count: int) -> None:
    needed = quorum(rule, byzantine)
    if count < needed:
        raise ShoalError(f"{rule} against {byzantine} false contributions needs {needed} contributions, there are {count}")
