"""Weights of a step's batches, relative to all batches of all processes."""

from __future__ import annotations

from shoal.engines.world import World
from shoal.errors import ShoalError
from shoal.tasks import Batch


class BatchWeights:
    """Weights of this process's batches. The sums over all processes are computed while the first batch goes through the network."""

    def __init__(self, counts: list[int], samples: int, world: World, *more: float) -> None:
        """`more`: further numbers to sum."""
        self._counts, self._world = counts, world
        self._sum = world.begin_sum([sum(counts), samples, world.leaving, *more])
        self._sums: list[float] | None = None

    def _known(self) -> list[float]:
        if self._sums is None:
            self._sums = self._sum.wait()
            self._world.all_leave = self._sums[2] > 0
        return self._sums

    @property
    def total(self) -> int:
        """Samples or tokens that count."""
        return max(1, int(self._known()[0]))

    @property
    def samples(self) -> int:
        return int(self._known()[1])

    def counts(self, number: int) -> bool:
        """Whether anything in one of this process's batches counts."""
        return self._counts[number] > 0

    def share(self, number: int) -> float:
        """The share of one of this process's batches in all that counts."""
        return self._counts[number] / self.total


class SharedBatchWeights(BatchWeights):
    """Weights for processes that all read the same batches: each batch counts once, and the sums only check that the batches are the
    same. The first process's `word` is sent to all."""

    def __init__(self, counts: list[int], samples: int, world: World, word: int) -> None:
        """`word`: a whole number below 2^53."""
        super().__init__(counts, samples, world, float(word) if world.first else 0.0)
        self._own = [float(sum(counts)), float(samples)]

    def _known(self) -> list[float]:
        if self._sums is None:
            found = super()._known()
            if found[:2] != [number * self._world.size for number in self._own]:
                raise ShoalError("the processes of the pipeline do not read the same batches: each needs the same data and settings")
            self._sums = [*self._own, *found[2:]]
        return self._sums

    @property
    def word(self) -> int:
        return int(self._known()[3])


def length(batch: Batch) -> int:
    return len(next(iter(batch.values())))
