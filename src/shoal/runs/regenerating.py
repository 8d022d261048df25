"""Units of answers made again, for an audit: with the weights of a checkpoint and the same draws they come out as the ledger has them.

The ledger knows the answers of a unit by a hash. Whoever rounds numbers as the worker did gets the same hash. On another kind of machine a
draw that lies at the very edge between two tokens may give the other one: a unit without such a draw must be the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from shoal.engines.answering import AnswerLearner
from shoal.errors import ShoalError
from shoal.runs.agreement import extent_of
from shoal.runs.assembly import assemble
from shoal.runs.checkpoint import read
from shoal.runs.run_directory import RunDirectory
from shoal.strategies import of
from shoal.updates.answers import digest, pack

_EDGE = 1e-3
"""A share of all probability: numbers in half precision move the edge between two tokens by about as much."""


class Unit(NamedTuple):
    """A unit, as the ledger tells of it."""

    number: int
    base: int
    digest: str


class Regenerated(NamedTuple):
    """What came of making units again."""

    same: int = 0
    at_the_edge: tuple[int, ...] = ()
    """Units that are other ones here, and have a draw so near to another token that another machine may well take that."""
    others: tuple[int, ...] = ()
    """Units that are other ones here, with no such draw."""
    without_weights: int = 0
    """Units of versions of which no checkpoint is left."""

    def told(self) -> list[str]:
        tried = self.same + len(self.at_the_edge) + len(self.others)
        words = [f"answers   {tried} units were made again: {self.same} are the same, token for token"]
        if self.at_the_edge:
            words.append(
                f"answers   {_named(self.at_the_edge)} came out otherwise: draws at the edge of two tokens, rounded otherwise here"
            )
        if self.without_weights:
            words.append(f"answers   {self.without_weights} units are of versions of which no checkpoint is kept")
        return words

    def violations(self) -> list[str]:
        return [f"{_named(self.others)} came out otherwise, and no draw is near another token"] if self.others else []


def _named(units: Iterable[int]) -> str:
    numbers = sorted(units)
    shown = ", ".join(str(number) for number in numbers[:8])
    return f"unit{'s' * (len(numbers) > 1)} {shown}{' and others' if len(numbers) > 8 else ''}"


def regenerate(folder: Path, ledger: Iterable[dict[str, Any]], most: int) -> Regenerated:
    """Make up to so many units again, the newest whose weights are there. Raises ShoalError where the run has no such units."""
    units = [Unit(int(one[0]), int(one[1]), str(one[2])) for line in ledger for one in line.get("answers", ())]
    if not units:
        raise ShoalError(f"--regenerate: the ledger of {folder} tells of no answers; they are the strategy rollouts' own")
    weights = _weights_of(folder)
    there = [unit for unit in units if unit.base in weights][-most:]
    room = _Room(folder)
    found, at_the_edge, others = 0, list[int](), list[int]()
    for unit in there:
        tokens_BT, edge = room.make_again(unit, weights[unit.base])
        if digest(pack(tokens_BT)) == unit.digest:
            found += 1
        else:
            (at_the_edge if edge < _EDGE else others).append(unit.number)
    return Regenerated(found, tuple(at_the_edge), tuple(others), sum(unit.base not in weights for unit in units))


def _weights_of(folder: Path) -> dict[int, Path | None]:
    """Where the weights of each version are; None: it is what the run began with."""
    found: dict[int, Path | None] = {0: None}
    for path in (folder / "checkpoints").glob("step-*"):
        found[int(path.name.removeprefix("step-"))] = path
    return found


class _Room:
    """The run's policy and prompts, put together once."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder).config()
        policies = of(self.run, 1)
        parts = assemble(self.run, None, folder, lambda samples: 1)
        self.engine, learner = parts.single, policies.apply.learner(parts.single, (), parts.feed)
        assert isinstance(learner, AnswerLearner)
        self.learner, self.start = learner, parts.single.vector.clone()
        self.cut = policies.length(extent_of(self.run, parts.data, 1)).cut
        self.at: int | None = None
        """The version that the engine has."""

    def make_again(self, unit: Unit, weights: Path | None) -> tuple[Tensor, float]:
        """The answers of a unit, and how near the nearest of their draws is to another token."""
        if self.at != unit.base:
            self.engine.vector.copy_(self.start)
            if weights is not None:
                self.engine.load_weights(read(weights).weights)
            self.at = unit.base
        assert self.cut is not None
        epoch, start, prompts = self.cut.unit(unit.number)
        return self.learner.answer(epoch * self.cut.batches_per_epoch + start, prompts)
