"""How contributions become one update: pure functions of a stack [N, D], N contributions of D numbers.

Krum and Bulyan measure distances once, from one Gram matrix. Column-wise rules sort with a network, block by block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.updates.columns import Floats, by_blocks, sorted_rows

_GRAM_COLUMNS = 1 << 16


def mean(stack_ND: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """The mean, weighted by samples where they are given."""
    count = len(stack_ND)
    weights = torch.full((count,), 1.0 / count) if weights_N is None else weights_N.float() / weights_N.sum()
    return weights.to(stack_ND) @ stack_ND


def trimmed_mean(stack_ND: Tensor, trim_ratio: float) -> Tensor:
    """The mean of each column without its extremes: half of `trim_ratio` is dropped at each end."""
    count = len(stack_ND)
    dropped = trimmed_at_each_end(count, trim_ratio)
    if dropped == 0:
        return mean(stack_ND)
    return by_blocks(stack_ND, lambda block: _sum(sorted_rows(block)[dropped : count - dropped]) / np.float32(count - 2 * dropped))


def trimmed_at_each_end(count: int, trim_ratio: float) -> int:
    """Contributions dropped at each end of a column; at least one is left."""
    return min(int(count * trim_ratio / 2 + 1e-9), (count - 1) // 2)


def median(stack_ND: Tensor) -> Tensor:
    """The middle of each column; the mean of the two middle ones where there are two."""
    low, high = (len(stack_ND) - 1) // 2, len(stack_ND) // 2

    def middle(block: Floats) -> Floats:
        rows = sorted_rows(block)
        return (rows[low] + rows[high]) * np.float32(0.5)

    return by_blocks(stack_ND, middle)


def krum(stack_ND: Tensor, byzantine: int, select: int = 1) -> Tensor:
    """The mean of the `select` contributions that are closest to their neighbours."""
    chosen = krum_order(squared_distances(stack_ND), byzantine)[:select]
    return stack_ND[chosen[0]].clone() if select == 1 else mean(stack_ND[torch.tensor(chosen)])


def krum_order(distances_NN: Tensor, byzantine: int) -> list[int]:
    """Contributions by their Krum score: the sum of squared distances to their N − f − 2 nearest."""
    count = len(distances_NN)
    _need(count, 2 * byzantine + 3, "krum", byzantine)
    order: list[int] = _scores(distances_NN, count - byzantine - 2).argsort(stable=True).tolist()
    return order


def bulyan(stack_ND: Tensor, byzantine: int) -> Tensor:
    """Krum chooses N − 2f contributions one by one; of each of their columns, the mean of the values nearest the median."""
    count = len(stack_ND)
    _need(count, 4 * byzantine + 3, "bulyan", byzantine)
    chosen = bulyan_choice(squared_distances(stack_ND), byzantine)
    kept = len(chosen) - 2 * byzantine
    return by_blocks(stack_ND[torch.tensor(chosen)], lambda block: _nearest_median(sorted_rows(block), kept))


def bulyan_choice(distances_NN: Tensor, byzantine: int) -> list[int]:
    """The N − 2f contributions that Krum takes, each time from those that are left."""
    left = list(range(len(distances_NN)))
    chosen = []
    for _ in range(len(distances_NN) - 2 * byzantine):
        among = torch.tensor(left)
        neighbours = max(1, len(left) - byzantine - 2)
        best = int(_scores(distances_NN[among][:, among], neighbours).argmin())
        chosen.append(left.pop(best))
    return chosen


def squared_distances(stack_ND: Tensor) -> Tensor:
    """Squared distances of all pairs [N, N], in double precision from Gram matrices of centred blocks.

    Centring first keeps what the subtraction of large, nearly equal numbers would lose.
    """
    count, size = stack_ND.shape
    gram = torch.zeros(count, count, dtype=torch.float64)
    for start in range(0, size, _GRAM_COLUMNS):
        block = stack_ND[:, start : start + _GRAM_COLUMNS].float()
        centred = block - block.mean(0, keepdim=True)
        gram += (centred @ centred.T).double().cpu()
    norms = gram.diagonal()
    return (norms[:, None] + norms[None, :] - 2 * gram).clamp(min=0)


def _scores(distances_NN: Tensor, neighbours: int) -> Tensor:
    """Sums of the smallest distances to others."""
    return distances_NN.sort(1).values[:, 1 : neighbours + 1].sum(1)


def _nearest_median(rows: list[Floats], kept: int) -> Floats:
    """The mean of the `kept` sorted values nearest their median, which are neighbours: a window that slides up while that helps."""
    count = len(rows)
    middle = (rows[(count - 1) // 2] + rows[count // 2]) * np.float32(0.5)
    total = _sum(rows[:kept])
    for low in range(count - kept):
        gain = (middle - rows[low]) > (rows[low + kept] - middle)
        total += np.where(gain, rows[low + kept] - rows[low], np.float32(0))
    return total / np.float32(kept)


def _sum(rows: list[Floats]) -> Floats:
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


def _need(count: int, needed: int, rule: str, byzantine: int) -> None:
    if count < needed:
        raise ShoalError(f"{rule} against {byzantine} false contributions needs {needed} contributions, there are {count}")
