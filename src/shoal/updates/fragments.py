"""Fragments of the weights that are exchanged in turn (streaming DiLoCo): consecutive whole tensors, about equal in size."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from shoal.errors import ShoalError

Span = tuple[int, int]
"""Start and end in the vector."""


def spans(sizes: Iterable[int], count: int) -> tuple[Span, ...]:
    """Cut tensors of these sizes, end to end, into `count` fragments. Raises ShoalError where there are fewer tensors than that."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    total, tensors = ends[-1], len(ends) - 1
    if tensors < count:
        raise ShoalError(f"strategy.fragments: the model has {tensors} tensors, which do not make {count} fragments")
    cuts = [0]
    for number in range(1, count):
        possible = range(cuts[-1] + 1, tensors - (count - number) + 1)
        cuts.append(min(possible, key=lambda cut: abs(ends[cut] - total * number / count)))
    cuts.append(tensors)
    return tuple((ends[start], ends[end]) for start, end in pairwise(cuts))
