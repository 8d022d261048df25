"""Audit of rollouts: units are generated again from a checkpoint's weights and the same draws, and compared with the ledger.

The ledger has a hash of each unit's answers. A machine that rounds like the worker's gets the same hash. On another kind of machine a draw
at the very edge between two tokens may yield the other token, so a few units may differ: as many as their draws make likely, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.engines.learners.answers import AnswerLearner
from shoal.errors import ShoalError
from shoal.runs.build_run import assemble
from shoal.runs.folder.checkpoint import read_checkpoint
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.run_size import data_extent
from shoal.strategies import policies_for
from shoal.updates.answer_frames import digest, pack

_EDGE, _EDGE_HALF = 1e-5, 1e-3
"""How far another machine's rounding moves the edge between two tokens, as a share of all probability: in full and in half precision."""
_UNLIKELY = 1e-4
"""A unit that differs although the probability of that was lower than this is counted as impossible."""
_DEVIATIONS = 4.0
"""Standard deviations by which the number of units that differ may exceed the expected number."""


class LedgerUnit(NamedTuple):
    number: int
    base: int
    digest: str


class RegenerationResult(NamedTuple):
    same: int
    others: tuple[int, ...]
    """Units whose answers differ here."""
    impossible: tuple[int, ...]
    """Those of them in which no draw is near another token."""
    expected: float
    """The expected number of units that differ on another kind of machine."""
    most: float
    """The largest number of units that may differ by chance."""
    without_weights: int
    """Units of versions that have no checkpoint any more."""

    def format_lines(self) -> list[str]:
        tried = self.same + len(self.others)
        words = [f"answers   {tried} units were made again: {self.same} are the same, token for token"]
        if self.others:
            foreseen = f"on another kind of machine {self.expected:.1f} would, as draws at the edge of two tokens are rounded otherwise"
            words.append(f"answers   {_named(self.others)} came out otherwise; {foreseen}")
            if self.most >= tried:
                words.append("answers   so this says little here: make units again on the kind of machine that the workers were")
        if self.without_weights:
            words.append(f"answers   {self.without_weights} units are of versions of which no checkpoint is kept")
        return words

    def violations(self) -> list[str]:
        if self.impossible:
            return [f"{_named(self.impossible)} came out otherwise, and no draw is near another token"]
        if len(self.others) > self.most:
            return [f"{len(self.others)} units came out otherwise, where rounding explains {self.most:.0f} at most: {_named(self.others)}"]
        return []


def _named(units: Iterable[int]) -> str:
    numbers = sorted(units)
    shown = ", ".join(str(number) for number in numbers[:8])
    return f"unit{'s' * (len(numbers) > 1)} {shown}{' and others' if len(numbers) > 8 else ''}"


def regenerate(folder: Path, ledger: Iterable[dict[str, Any]], most: int) -> RegenerationResult:
    """Generate up to `most` units again: the newest whose weights are available. Raises ShoalError if the run has no units of answers."""
    units = [LedgerUnit(int(one[0]), int(one[1]), str(one[2])) for line in ledger for one in line.get("answers", ())]
    if not units:
        raise ShoalError(f"--regenerate: the ledger of {folder} tells of no answers; they are the strategy rollouts' own")
    weights: dict[int, Path | None] = {0: None}  # the run's initial weights are in no file
    weights |= {int(path.name.removeprefix("step-")): path for path in (folder / "checkpoints").glob("step-*")}
    available = [unit for unit in units if unit.base in weights][-most:]
    policy = _LoadedPolicy(folder)
    chances, others = list[float](), dict[int, float]()
    for unit in available:
        tokens_BT, chance = policy.make_again(unit, weights[unit.base])
        chances.append(chance)
        if digest(pack(tokens_BT)) != unit.digest:
            others[unit.number] = chance
    impossible = tuple(number for number, chance in others.items() if chance < _UNLIKELY)
    expected, spread = sum(chances), sum(chance * (1 - chance) for chance in chances) ** 0.5
    without = sum(unit.base not in weights for unit in units)
    return RegenerationResult(len(available) - len(others), tuple(others), impossible, expected, expected + _DEVIATIONS * spread, without)


class _LoadedPolicy:
    """The run's policy and prompts, loaded once for all units."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder).config_as_written(lambda text: None)
        policies = policies_for(self.run, 1)
        parts = assemble(self.run, None, folder, lambda samples: 1)
        self.engine, learner = parts.single, policies.apply.learner(parts.single, (), parts.feed)
        assert isinstance(learner, AnswerLearner)
        self.learner, self.start = learner, parts.single.vector.clone()
        self.cut = policies.length(data_extent(self.run, parts.data, 1)).cut
        self.at: int | None = None
        """The version whose weights the engine has loaded."""
        self.edge = _EDGE if self.run.training.precision.kind == "fp32" else _EDGE_HALF

    def make_again(self, unit: LedgerUnit, weights: Path | None) -> tuple[Tensor, float]:
        """The answers of a unit, and the probability that another kind of machine generates different ones."""
        if self.at != unit.base:
            self.engine.vector.copy_(self.start)
            if weights is not None:
                self.engine.load_weights(read_checkpoint(weights).weights)
            self.at = unit.base
        assert self.cut is not None
        epoch, start, prompts = self.cut.unit(unit.number)
        tokens_BT, far_N = self.learner.answer(epoch * self.cut.batches_per_epoch + start, prompts)
        stays_N = 1 - 0.5 * torch.exp(-far_N.double() / self.edge)
        return tokens_BT, 1 - float(stays_N.prod())
