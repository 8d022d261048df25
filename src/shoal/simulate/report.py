"""What a simulation showed: figures for a table, and curves over virtual time."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Curve = list[tuple[float, float]]
POINTS = 120
"""Points of a curve over the whole time."""


class ProgressPoint(NamedTuple):
    """How far a run had come when a version was made."""

    hours: float
    samples: int
    bytes: float
    """Both ways."""


@dataclass
class SimulationReport:
    """Figures of one simulated run. Times are virtual, except the coordinator's and the simulation's own."""

    workers: int
    hours: float
    """How long it was simulated, until its time or the run was over."""
    seed: int
    strategy: str
    codec: str
    learning: bool
    """Whether the workers really learned."""
    data: str = ""
    """What it learned from, for people; or what was supposed of data that was not read."""
    gradients: str = ""
    """Where workers learned: how many were computed at once, or why each was computed by itself."""
    finished: bool = False
    """Whether the run came to its end."""
    versions: int = 0
    samples: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Contributions by what became of them, as their workers were told."""
    work_s: dict[str, float] = field(default_factory=lambda: {"useful": 0.0, "wasted": 0.0, "present": 0.0})
    """Seconds of computing that were of use, or wasted; and seconds that workers were there."""
    computed_s: float = 0.0
    """Seconds that batches took by the clock, where workers share cores or are made slower."""
    processor_s: float = 0.0
    """Seconds that the same batches would take with a core for each worker."""
    lags: Counter[int] = field(default_factory=Counter)
    received_bytes: float = 0.0
    sent_bytes: float = 0.0
    heartbeats: int = 0
    coordinator_s: float = 0.0
    """Processor time that messages cost the coordinator, since the time began that counts."""
    ticks_s: float = 0.0
    """Processor time for what it does as time passes, whether anybody speaks or not."""
    handled: int = 0
    """Contributions that it handled meanwhile."""
    wall_s: float = 0.0
    losses: Curve = field(default_factory=list)
    """Hours, and the mean loss that workers told of."""
    curves: dict[str, Curve] = field(default_factory=dict)
    """By name: hours, and what a figure was in the time before."""
    first: ProgressPoint | None = None
    last: ProgressPoint | None = None
    """When the first and the last version were made: what lies between them holds neither a beginning nor half a round."""
    digest: int = 0
    """Of the ledger: the same settings, machines and seed give the same."""
    violations: list[str] = field(default_factory=list)
    """Promises that were broken."""
    notes: list[str] = field(default_factory=list)
    tasks: Mapping[str, int] = field(default_factory=dict)
    """Where a scheduler gives out tasks: how many an epoch has, how often pieces of them were given out, and how many were cut in two."""

    @property
    def accepted(self) -> int:
        return self.outcomes["accepted"]

    @property
    def samples_per_s(self) -> float:
        return self.samples / (3600 * self.hours) if self.hours else 0.0

    @property
    def rejected_share(self) -> float:
        return 1 - self.accepted / self.judged if self.judged else 0.0

    @property
    def judged(self) -> int:
        """Contributions that have an outcome; what came after the end of the run is none."""
        return sum(count for outcome, count in self.outcomes.items() if outcome != "finished")

    @property
    def utilisation(self) -> float:
        """The share of the time that workers were there in which they computed what was taken."""
        return self.work_s["useful"] / self.work_s["present"] if self.work_s["present"] else 0.0

    @property
    def wasted_share(self) -> float:
        computed = self.work_s["useful"] + self.work_s["wasted"]
        return self.work_s["wasted"] / computed if computed else 0.0

    @property
    def stretch(self) -> float:
        """How many times as long batches took because workers share cores."""
        return self.computed_s / self.processor_s if self.processor_s else 1.0

    @property
    def mean_lag(self) -> float:
        count = self.lags.total()
        return sum(lag * often for lag, often in self.lags.items()) / count if count else 0.0

    def lag_below(self, share: float) -> int:
        """The lag that so large a share of the contributions does not exceed."""
        lags = sorted(self.lags)
        sums = list(itertools.accumulate(self.lags[lag] for lag in lags))
        return lags[bisect.bisect_left(sums, share * self.lags.total())] if lags else 0

    def hours_to(self, loss: float) -> float | None:
        """When the workers' mean loss was first at or below this."""
        return next((hours for hours, value in self.losses if value <= loss), None)

    @property
    def cpu_us(self) -> float:
        """Microseconds of the coordinator's processor for each contribution, heartbeats included."""
        return 1e6 * self.coordinator_s / self.handled if self.handled else 0.0

    def rows(self, loss: float | None = None) -> list[tuple[str, str]]:
        """The table for people. `loss`: also tell when this loss was reached."""
        turned_away = ", ".join(f"{count:,} {outcome}" for outcome, count in self.outcomes.most_common() if outcome != "accepted")
        rows = [
            ("run", f"{self.strategy}, codec {self.codec}, {self.workers:,} workers, {'learning' if self.learning else 'timing only'}"),
            ("data", self.data),
            ("virtual time", f"{format_hours(self.hours)}{': the run came to its end' if self.finished else ''}"),
            ("samples/s", f"{self.samples_per_s:,.1f} ({self.samples:,} in all, {self.versions:,} versions)"),
            ("utilisation", f"{self.utilisation:.1%} of the time that workers were there"),
            ("lag", f"mean {self.mean_lag:.2f}, 95 % at most {self.lag_below(0.95)}"),
            ("rejected", f"{self.rejected_share:.1%} of the contributions" + (f" ({turned_away})" if turned_away else "")),
            ("wasted work", f"{self.wasted_share:.1%} of the computing"),
            ("bytes", f"{self.received_bytes / 1e6:,.1f} MB to the coordinator, {self.sent_bytes / 1e6:,.1f} MB back"),
            ("coordinator", f"{self.cpu_us:,.0f} µs of processor time per contribution ({self.heartbeats:,} heartbeats included)"),
            ("gradients", self.gradients),
            ("simulated in", f"{self.wall_s:.1f} s, seed {self.seed}, ledger {self.digest:08x}"),
        ]
        if self.losses:
            rows.insert(4, ("loss", f"{self.losses[-1][1]:.4f} at the end"))
        if self.tasks:
            often = f"{self.tasks['given']:,} times given out, {self.tasks['cut']:,} times cut in two for a worker that was free"
            rows.insert(4, ("tasks", f"{self.tasks['tasks']:,} an epoch: {often}"))
        if self.stretch > 1.005:
            rows.append(("shared cores", f"batches take {self.stretch:.2f} times as long as with a core for each worker"))
        if loss is not None:
            reached = self.hours_to(loss)
            rows.append((f"loss {loss:g}", "not reached" if reached is None else f"after {reached:.2f} h"))
        return [(name, text) for name, text in rows if text]


def format_hours(hours: float) -> str:
    """A time in virtual hours, for people."""
    return f"{hours:.2f} h" if hours >= 0.1 else f"{3600 * hours:.1f} s"
