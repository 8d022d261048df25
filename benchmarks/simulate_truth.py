"""Does a simulation foretell a real run? Four workers whose steps take 2, 4, 8 and 16 times as long (`--slowdown`) behind a cellular
network (`--netem`), with each strategy: five real runs, and the simulation of the same settings.

    shoal train FILE --workers 4 --slowdown w1=2 … --netem cellular
    shoal simulate FILE --workers 4 --slowdown w1=2 … --weather cellular --cores 2

A figure is foretold where the simulation is within 10 % of the mean of the real runs, or within twice their standard deviation. Two figures
of the real runs are inputs: the processor time of a batch, and how many times as long it took by the clock, from which the number of other
people's processes follows that compete for the cores. Everything else follows from the settings. Waiting decides here, not the processor,
so a machine that is busy with other things tells the same. The strategies' order by samples a second is to be the same, as far as their
real rates are further apart than they vary.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import real_runs
from real_runs import Seen
from run import Row

from shoal.config.load import File, Override, resolve
from shoal.simulate.report import Report
from shoal.simulate.simulation import Asked, simulated

SLOWDOWN, WEATHER = (2.0, 4.0, 8.0, 16.0), "cellular"
RUNS = int(os.environ.get("TRUTH_RUNS", "5"))
SECONDS = float(os.environ.get("TRUTH_SECONDS", "30"))
COMMON = {"model.hidden_sizes": "[64]", "training.batch_size": "32", "training.gradient_accumulation_steps": "8"}
STRATEGIES = {
    "edp": {"strategy.kind": "edp"},
    "syncps": {"strategy.kind": "syncps"},
    "async": {"strategy.kind": "async"},
    "diloco": {"strategy.kind": "diloco", "strategy.inner_steps": "4", "strategy.balance_speeds": "true"},
}
_CLOSE, _OTHERS_CLOSE = 0.1, 0.2
_HOURS, _SHORT_HOURS = 0.1, 0.01
_SMALL = {"samples_per_s": 0.0, "rejected": 0.02, "lag": 0.1}
"""A difference that is none: two contributions of a hundred, a tenth of a version."""


class Told(NamedTuple):
    """What the simulation says."""

    samples_per_s: float
    rejected: float
    lag: float


def foretold(settings: dict[str, str], slowdown: tuple[float, ...], weather: str | None, batch_s: float, stretch: float) -> Told:
    """What a simulation says, with as many other processes on the machine as make its batches take so many times as long."""
    least, most = 0.0, 32.0
    while most - least > _OTHERS_CLOSE:
        others = (least + most) / 2
        longer = reported(settings, slowdown, weather, batch_s, others, _SHORT_HOURS).stretch > stretch
        least, most = (least, others) if longer else (others, most)
    return told_by(reported(settings, slowdown, weather, batch_s, (least + most) / 2, _HOURS))


def reported(
    settings: dict[str, str], slowdown: tuple[float, ...], weather: str | None, batch_s: float, others: float, hours: float
) -> Report:
    overrides = [Override(path, value, path) for path, value in (real_runs.QUIET | settings).items()]
    run = resolve([File("starter")], overrides, environ={}).run
    slow = {f"w{number}": factor for number, factor in enumerate(slowdown, 1)}
    cores = float(os.cpu_count() or 1)
    return simulated(run, Asked(len(slowdown), weather, hours, 0, batch_s, slowdown=slow, cores=cores, others=others), None)


def told_by(report: Report) -> Told:
    """The figures between the first version and the last."""
    first, last = report.first, report.last
    assert first is not None, "no version was made"
    assert last is not None
    rate = (last.samples - first.samples) / (3600 * (last.hours - first.hours))
    return Told(rate, report.rejected_share, report.mean_lag)


def measure() -> Iterator[Row]:
    kept = {}
    for name, settings in STRATEGIES.items():
        runs = [real_runs.watched(COMMON | settings, SLOWDOWN, WEATHER, SECONDS) for _ in range(RUNS)]
        batch_s, stretch = (statistics.mean(getattr(one, name) for one in runs) for name in ("batch_s", "stretch"))
        told = foretold(COMMON | settings, SLOWDOWN, WEATHER, batch_s, stretch)
        kept[name] = {"real": [one._asdict() for one in runs], "simulated": told._asdict()}
        yield from rows_of(name, runs, told)
    yield _order(kept)
    _write(kept)


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


def _write(kept: dict[str, dict[str, object]]) -> None:
    results = Path(__file__).parents[1] / "results"
    results.mkdir(exist_ok=True)
    (results / "simulate-truth.json").write_text(json.dumps(kept, indent=2))
