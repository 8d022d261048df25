"""The report of a simulation: figures for a table, and curves over virtual time."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Curve = list[tuple[float, float]]
POINTS = 120
"""Number of points of a curve."""


class ProgressPoint(NamedTuple):
    """Progress of a run when a version was published."""

    hours: float
    samples: int
    bytes: float
    """In both directions."""


@dataclass
class SimulationReport:
    """Figures of one simulated run. Times are virtual, except the CPU times and `wall_s`."""

    workers: int
    hours: float
    """Virtual hours until the requested time, or the end of the run."""
    seed: int
    strategy: str
    codec: str
    learning: bool
    """Whether workers really computed updates."""
    data: str = ""
    """Name of the data, or of the fake data in its place."""
    gradients: str = ""
    """In learning simulations: how many gradients were computed per call, or why each was computed alone."""
    finished: bool = False
    versions: int = 0
    samples: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of contributions by outcome, as acknowledged to the workers."""
    abandoned: int = 0
    """Number of units that workers gave up since their version was too old."""
    work_s: dict[str, float] = field(default_factory=lambda: {"useful": 0.0, "wasted": 0.0, "present": 0.0})
    """Seconds of computing for accepted and for other contributions, and seconds that workers were present."""
    computed_s: float = 0.0
    """Virtual seconds that batches took, where workers share cores or have a slowdown."""
    processor_s: float = 0.0
    """Seconds of the same batches with a core for each worker."""
    lags: Counter[int] = field(default_factory=Counter)
    received_bytes: float = 0.0
    sent_bytes: float = 0.0
    heartbeats: int = 0
    coordinator_s: float = 0.0
    """CPU time of the coordinator for messages, after the warm-up."""
    ticks_s: float = 0.0
    """CPU time of the coordinator for its ticks, after the warm-up."""
    handled: int = 0
    """Contributions that it handled after the warm-up."""
    wall_s: float = 0.0
    losses: Curve = field(default_factory=list)
    """Hours, and the mean loss that workers reported."""
    curves: dict[str, Curve] = field(default_factory=dict)
    """By name: hours, and the value over the interval before."""
    first: ProgressPoint | None = None
    last: ProgressPoint | None = None
    """The first and the last version: between them lie whole rounds, without the start."""
    digest: int = 0
    """Checksum of the ledger: equal for equal settings, machines and seeds."""
    violations: list[str] = field(default_factory=list)
    """Guarantees that did not hold."""
    notes: list[str] = field(default_factory=list)
    tasks: Mapping[str, int] = field(default_factory=dict)
    """With a scheduler: tasks per epoch, assignments of tasks or parts of them, and tasks that were split in two."""

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
        """Contributions with an outcome, without those after the end of the run."""
        return sum(count for outcome, count in self.outcomes.items() if outcome != "finished")

    @property
    def utilisation(self) -> float:
        """Share of the workers' presence that was spent on accepted contributions."""
        return self.work_s["useful"] / self.work_s["present"] if self.work_s["present"] else 0.0

    @property
    def wasted_share(self) -> float:
        computed = self.work_s["useful"] + self.work_s["wasted"]
        return self.work_s["wasted"] / computed if computed else 0.0

    @property
    def stretch(self) -> float:
        """Factor by which shared cores lengthen a batch."""
        return self.computed_s / self.processor_s if self.processor_s else 1.0

    @property
    def mean_lag(self) -> float:
        count = self.lags.total()
        return sum(lag * number for lag, number in self.lags.items()) / count if count else 0.0

    def lag_below(self, share: float) -> int:
        """The quantile of the lag: at least this share of the contributions has at most this lag."""
        lags = sorted(self.lags)
        sums = list(itertools.accumulate(self.lags[lag] for lag in lags))
        return lags[bisect.bisect_left(sums, share * self.lags.total())] if lags else 0

    def hours_to(self, loss: float) -> float | None:
        """Hours until the workers' mean loss was first at or below this; None: never."""
        return next((hours for hours, value in self.losses if value <= loss), None)

    @property
    def cpu_us(self) -> float:
        """CPU time of the coordinator per contribution in microseconds, heartbeats included."""
        return 1e6 * self.coordinator_s / self.handled if self.handled else 0.0

    def rows(self, loss: float | None = None) -> list[tuple[str, str]]:
        """The rows of the printed table. `loss`: adds a row with the time at which this loss was reached."""
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
            counts = f"{self.tasks['given']:,} times given out, {self.tasks['cut']:,} times cut in two for a worker that was free"
            rows.insert(4, ("tasks", f"{self.tasks['tasks']:,} an epoch: {counts}"))
        if self.stretch > 1.005:
            rows.append(("shared cores", f"batches take {self.stretch:.2f} times as long as with a core for each worker"))
        if loss is not None:
            reached = self.hours_to(loss)
            rows.append((f"loss {loss:g}", "not reached" if reached is None else f"after {reached:.2f} h"))
        return [(name, text) for name, text in rows if text]


def format_hours(hours: float) -> str:
    """A time in hours as text, in seconds where it is short."""
    return f"{hours:.2f} h" if hours >= 0.1 else f"{3600 * hours:.1f} s"
