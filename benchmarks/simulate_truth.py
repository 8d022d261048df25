"""Does a simulation foretell a real run? Four workers whose steps take 2, 4, 8 and 16 times as long (`--slowdown`) behind a cellular
network (`--netem`), with each strategy: five real runs, and the simulation of the same settings.

    shoal train FILE --workers 4 --slowdown w1=2 … --netem cellular
    shoal simulate FILE --workers 4 --slowdown w1=2 … --weather cellular --cores 2

A figure is foretold where the simulation is within 10 % of the mean of the real runs, or within twice their standard deviation. Nothing of
the judged runs goes into it. Two inputs are measured before each of them: the processor time of a batch, by one worker alone without
weather, which sleeps between its steps as those of the runs do (a batch takes a processor a quarter longer that was idle before); and how
many processes of other people compete for the cores, by what share of them a loop on each core gets.
The settings were chosen so that the simulation has rejected work: rounds that close before the slowest is there, and a bound on the lag
that is about as large as the lag.

The strategies' order by samples a second is to be the same, as far as their real rates are further apart than they vary.

`TRUTH_ONLY=edp,async` measures some of the strategies; the order is told of all that results/simulate-truth.json has.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import real_runs
from real_runs import Seen
from run import Row

from shoal.config.load import ConfigFile, Override, resolve
from shoal.simulate.report import SimulationReport
from shoal.simulate.simulation import SimulationOptions, simulated

SLOWDOWN, WEATHER = (2.0, 4.0, 8.0, 16.0), "cellular"
RUNS = int(os.environ.get("TRUTH_RUNS", "5"))
SECONDS = float(os.environ.get("TRUTH_SECONDS", "20"))
ONLY = os.environ.get("TRUTH_ONLY", "")
COMMON = {"model.hidden_sizes": "[64]", "training.batch_size": "32", "training.gradient_accumulation_steps": "8"}
STRATEGIES = {
    "edp": {"strategy.kind": "edp"},
    "syncps": {"strategy.kind": "syncps", "strategy.round_timeout_s": "0.2"},
    "async": {"strategy.kind": "async", "strategy.max_staleness": "4", "strategy.adaptive": "false"},
    "diloco": {"strategy.kind": "diloco", "strategy.inner_steps": "4", "strategy.quorum": "3"},
}
ALONE = COMMON | {"strategy.kind": "async"}
_CLOSE = 0.1
_HOURS = 0.1
_ALONE_S, _ALONE_SLOWDOWN, _SPIN_S = 6.0, 4.0, 2.0
_SPIN = """
import sys, time
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    pass
print(time.process_time())
"""
_SMALL = {"samples_per_s": 0.0, "rejected": 0.02, "lag": 0.1}
"""A difference that is none: two contributions of a hundred, a tenth of a version."""


class Told(NamedTuple):
    """What the simulation says."""

    samples_per_s: float
    rejected: float
    lag: float


class Measured(NamedTuple):
    """What a simulation must know of this machine."""

    batch_s: float
    """Processor time of a batch, of one worker alone."""
    others: float
    """Processes of other people that compute here all the time."""


def measured() -> Measured:
    return Measured(real_runs.watched(ALONE, (_ALONE_SLOWDOWN,), "", _ALONE_S).batch_s, competing())


def mean_of(several: list[Measured]) -> Measured:
    return Measured(*(statistics.mean(values) for values in zip(*several, strict=True)))


def competing() -> float:
    """How many processes of others a loop on each core shares the cores with."""
    cores = os.cpu_count() or 1
    loops = [subprocess.Popen([sys.executable, "-c", _SPIN, str(_SPIN_S)], stdout=subprocess.PIPE, text=True) for _ in range(cores)]
    had_s = statistics.mean(float(loop.communicate()[0]) for loop in loops)
    return max(0.0, cores * (_SPIN_S / had_s - 1))


def foretold(settings: dict[str, str], slowdown: tuple[float, ...], weather: str, here: Measured) -> Told:
    overrides = [Override(path, value, path) for path, value in (real_runs.QUIET | settings).items()]
    run = resolve([ConfigFile("starter")], overrides, environ={}).run
    slow = {f"w{number}": factor for number, factor in enumerate(slowdown, 1)}
    cores = float(os.cpu_count() or 1)
    asked = SimulationOptions(len(slowdown), weather, _HOURS, 0, here.batch_s, slowdown=slow, cores=cores, others=here.others)
    return told_by(simulated(run, asked, None))


def told_by(report: SimulationReport) -> Told:
    """The figures between the first version and the last."""
    first, last = report.first, report.last
    assert first is not None, "no version was made"
    assert last is not None
    rate = (last.samples - first.samples) / (3600 * (last.hours - first.hours))
    return Told(rate, report.rejected_share, report.mean_lag)


def measure() -> Iterator[Row]:
    kept = _read()
    for name, settings in STRATEGIES.items():
        if ONLY and name not in ONLY.split(","):
            continue
        seen = [(measured(), real_runs.watched(COMMON | settings, SLOWDOWN, WEATHER, SECONDS)) for _ in range(RUNS)]
        here, runs = mean_of([before for before, _ in seen]), [run for _, run in seen]
        told = foretold(COMMON | settings, SLOWDOWN, WEATHER, here)
        kept[name] = {"measured": here._asdict(), "real": [one._asdict() for one in runs], "simulated": told._asdict()}
        _write(kept)
        yield from rows_of(name, runs, told)
    yield _order(kept)


def rows_of(name: str, runs: list[Seen], told: Told) -> Iterator[Row]:
    for figure in Told._fields:
        real = [getattr(one, figure) for one in runs]
        mean, sigma, simulated = statistics.mean(real), statistics.stdev(real) if len(real) > 1 else 0.0, getattr(told, figure)
        off = abs(simulated - mean)
        good = off <= max(_CLOSE * abs(mean), 2 * sigma, _SMALL[figure])
        note = f"{'foretold' if good else 'MISSED'}: real {mean:.3g} ± {sigma:.2g} in {len(real)} runs"
        yield Row(f"simulate-truth, {name}, {figure}", simulated, mean, figure, simulated / mean if mean else 1.0, "1 ± 0.1, or 2 σ", note)


def _order(kept: dict[str, dict[str, object]]) -> Row:
    """Pairs of strategies of which the same one is faster in both worlds; those that are equally fast in reality do not count."""
    pairs = agreeing = 0
    for one in kept:
        for other in kept:
            real_one, real_other = _rates(kept[one]), _rates(kept[other])
            spread = max(statistics.pstdev(real_one), statistics.pstdev(real_other))
            if statistics.mean(real_one) - statistics.mean(real_other) > max(2 * spread, _CLOSE * statistics.mean(real_one)):
                pairs += 1
                agreeing += kept[one]["simulated"]["samples_per_s"] > kept[other]["simulated"]["samples_per_s"]  # type: ignore[index]
    return Row(
        "simulate-truth, order of strategies", agreeing, pairs, "pairs", agreeing / pairs if pairs else 1.0, "1", "by samples a second"
    )


def _rates(of: dict[str, object]) -> list[float]:
    return [one["samples_per_s"] for one in of["real"]]  # type: ignore[attr-defined]


def _results() -> Path:
    return Path(__file__).parents[1] / "results" / "simulate-truth.json"


def _read() -> dict[str, dict[str, object]]:
    """What was measured before, where only some strategies are measured now."""
    kept: dict[str, dict[str, object]] = json.loads(_results().read_text()) if ONLY and _results().exists() else {}
    return kept


def _write(kept: dict[str, dict[str, object]]) -> None:
    _results().parent.mkdir(exist_ok=True)
    _results().write_text(json.dumps(kept, indent=2))
