"""Units of the data, numbered through all epochs: which are settled, and which are to be done next.

A unit is a few batches in an epoch's order. Results come in any order; an epoch is complete when all its units are settled: learned from,
or given up after too many attempts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LEAST_ISSUED = 64
"""Least number of units on offer: more than there are workers in a class."""
ISSUED_PER_QUORUM = 4


class DataUnit(NamedTuple):
    """Some batches of an epoch."""

    epoch: int
    start: int
    batches: int


@dataclass(frozen=True)
class DataCut:
    """How the data is cut into units."""

    batches_per_epoch: int
    batches_per_unit: int
    total_epochs: int

    @property
    def per_epoch(self) -> int:
        return -(-self.batches_per_epoch // self.batches_per_unit)

    @property
    def total(self) -> int:
        return self.per_epoch * self.total_epochs

    def unit(self, number: int) -> DataUnit:
        epoch, place = divmod(number, self.per_epoch)
        start = place * self.batches_per_unit
        return DataUnit(epoch, start, min(self.batches_per_unit, self.batches_per_epoch - start))

    def number(self, epoch: int, start: int) -> int:
        return epoch * self.per_epoch + start // self.batches_per_unit

    def has(self, unit: DataUnit) -> bool:
        number = self.number(unit.epoch, unit.start)
        return 0 <= number < self.total and self.unit(number) == unit


@dataclass
class SettledUnits:
    """Units that need not be done any more: all before `below`, and those in `beyond`."""

    below: int = 0
    beyond: set[int] = field(default_factory=set)
    failed: int = 0
    """Number of units that were given up."""

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.beyond

    def add(self, number: int) -> None:
        self.beyond.add(number)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1

    def open(self, total: int, most: int) -> Iterator[int]:
        """The first `most` units that are left to do."""
        number = self.below
        while number < total and most > 0:
            if number not in self.beyond:
                most -= 1
                yield number
            number += 1

    def all_of(self, total: int) -> bool:
        return self.below >= total

    def state_dict(self) -> dict[str, Any]:
        return {"below": self.below, "beyond": sorted(self.beyond), "failed": self.failed}

    @classmethod
    def of(cls, saved: dict[str, Any]) -> SettledUnits:
        return cls(saved["below"], set(saved["beyond"]), saved["failed"])
