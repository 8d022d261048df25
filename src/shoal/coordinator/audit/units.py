"""Audit of units: each unit is learned from once, or named as given up, or was not done when the run ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from shoal.coordinator.audit.files import AuditInput
from shoal.errors import printable

_MOST_NAMED = 8
_MOST_UNITS = 10_000_000
"""More units than any run has. A damaged file may claim more, which must not fill the memory."""


class LagRule(NamedTuple):
    """A result counts 1/(1+lag). Lag: versions that were made while its unit was computed."""

    most: int | None
    """The largest lag; None: it followed the number of workers, which no file holds."""

    def violations(self, applied: Iterable[tuple[str, int, int, float, int]]) -> Iterator[str]:
        """`applied`: worker, number, base and share of each contribution, and the version that was made of it."""
        for worker, seq, base, share, version in applied:
            lag = version - 1 - base
            if lag >= 0 and share != 1 / (1 + lag):
                yield f"contribution {seq} of {worker} lags {lag} versions and counted {share:g}, not {1 / (1 + lag):g}"
            if self.most is not None and lag > self.most:
                yield f"contribution {seq} of {worker} lags {lag} versions; strategy.max_lag is {self.most}"


class UnitAudit:
    """The units of a run, and the fate of each."""

    def __init__(
        self, evidence: AuditInput, learned: Iterable[tuple[int, int, int]], given_up: Iterable[tuple[int, int, int, str]]
    ) -> None:
        """`learned`: epoch, first batch and batches of each contribution; `given_up`: the same of each unit given up, with the reason."""
        spans, failed = list(learned), list(given_up)
        self.evidence = evidence
        self.per_epoch, self.per_unit, self.epochs = _cut_of(evidence, [*spans, *(one[:3] for one in failed)])
        self.total = self.epochs * self._in_epoch
        """Units of all epochs; 0: unknown."""
        self.later = [span for span in spans if self._fits(span) and 0 < self.total <= self._number(*span[:2])]
        """Units after the last epoch: the owner made the run shorter when it was resumed."""
        self.odd = [span for span in [*spans, *(one[:3] for one in failed)] if not self._fits(span)]
        self.learned = {self._number(*span[:2]) for span in spans if self._is_unit(span)}
        self.given_up = {self._number(*one[:2]): one[3] for one in failed if self._is_unit(one[:3])}
        self.settled = self._settled()

    @property
    def _in_epoch(self) -> int:
        return max(1, -(-self.per_epoch // self.per_unit))

    def _number(self, epoch: int, start: int) -> int:
        return epoch * self._in_epoch + start // self.per_unit

    def _span(self, number: int) -> tuple[int, int, int]:
        epoch, place = divmod(number, self._in_epoch)
        start = place * self.per_unit
        return epoch, start, min(self.per_unit, self.per_epoch - start)

    def _fits(self, span: tuple[int, int, int]) -> bool:
        """Whether the data has such a unit, in whatever epoch."""
        number = self._number(*span[:2])
        return 0 <= number < _MOST_UNITS and span == self._span(number)

    def _is_unit(self, span: tuple[int, int, int]) -> bool:
        return self._fits(span) and self._number(*span[:2]) < (self.total or _MOST_UNITS)

    def _settled(self) -> set[int]:
        """Units that the coordinator would not offer again, by the newest snapshot and the records since."""
        snapshot = self.evidence.snapshot
        below, beyond = (snapshot.settled_below, snapshot.settled_beyond) if snapshot is not None else (0, set[int]())
        since = {record["unit"] for _, record in self.evidence.records if type(record.get("unit")) is int}
        most = self.total or _MOST_UNITS
        return {*range(min(below, most))} | {number for number in beyond | since if 0 <= number < most}

    @property
    def undone(self) -> list[int]:
        """Units that were not done, before the last that was. Units are offered ahead, so a run that ends early leaves some."""
        known = self.learned | self.given_up.keys() | self.settled
        return [number for number in range(max(known, default=-1) + 1) if number not in known]

    def violations(self, complete: bool) -> Iterator[str]:
        """`complete`: the run claims that all of its epochs are done."""
        for epoch, start, batches in self.odd[:_MOST_NAMED]:
            yield f"batches {start} to {start + batches - 1} of epoch {epoch} are no unit of {self.per_unit} batches"
        for name in self._names(self.settled - self.learned - self.given_up.keys()):
            yield f"{name} is nowhere: neither learned from nor given up, and it would not be given out again"
        if self.evidence.snapshot is not None:
            for name in self._names((self.learned | self.given_up.keys()) - self.settled):
                yield f"{name} is settled, and would be given out again"
        if complete:
            total = min(self.total, _MOST_UNITS) or max(self.settled, default=-1) + 1
            for name in self._names({*range(total)} - self.learned - self.given_up.keys() - self.settled):
                yield f"{name} was never done, and the run says that it is complete"

    def summary(self) -> list[str]:
        undone = self.undone
        lines = [
            f"units     {len(self.learned):,} learned from, {len(self.given_up):,} given up, {len(undone):,} passed over and not done yet"
        ]
        if self.later:
            lines.append(f"units     {len(self.later):,} learned from are of epochs after the last: the run was made shorter")
        for reason, numbers in groupby(sorted(self.given_up, key=lambda number: (self.given_up[number], number)), key=self.given_up.get):
            lines += [f"given up  {name}: {printable(reason or '')}" for name in self._names({*numbers})]
        return lines + [f"not done  {name}" for name in self._names({*undone})]

    def _names(self, numbers: set[int]) -> Iterator[str]:
        """Names of units, neighbours together."""
        runs = [[*run] for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])]
        for run in runs[:_MOST_NAMED]:
            first, last = self._span(run[0][1]), self._span(run[-1][1])
            if first[0] == last[0]:
                yield f"epoch {first[0] + 1}, batches {first[1]} to {last[1] + last[2] - 1}"
            else:
                yield f"epoch {first[0] + 1} from batch {first[1]} to epoch {last[0] + 1}, batch {last[1] + last[2] - 1}"
        if len(runs) > _MOST_NAMED:
            yield f"and {sum(len(run) for run in runs[_MOST_NAMED:])} other units"


def _cut_of(evidence: AuditInput, spans: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    """Batches per epoch, batches per unit and epochs, as the snapshot says, or without one as far as the units show it."""
    if evidence.snapshot is not None and evidence.snapshot.cut is not None:
        return evidence.snapshot.cut
    return max((start + batches for _, start, batches in spans), default=1), max((batches for *_, batches in spans), default=1), 0
