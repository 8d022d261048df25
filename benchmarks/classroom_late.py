"""How much of what students compute is thrown away, and how long they wait: by number of students and their speeds.

In virtual time, with the real coordinator and the real sessions of workers: students lease units of ten batches, whose times differ by a
few percent. Before: `strategy.max_lag` 0, which drops every result of an older version. After: the default. A unit counts as unused where
its result was dropped, or was given up before it was complete; the time spent on units is counted as well, and the time without a unit.
`python benchmarks/classroom_late.py` prints a table and writes results/classroom-late.json.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from run import Row

from shoal.config import Run
from shoal.config.load import resolve_data
from shoal.simulate.machines import SimulatedMachine
from shoal.simulate.report import SimulationReport
from shoal.simulate.simulation import simulate

STUDENTS = (2, 3, 4, 6, 8, 12, 16, 20, 25, 30)
SPEEDS = {"equal": (1.0,), "1:2:4": (1.0, 2.0, 4.0)}
UNITS_PER_UPDATE = (1, 3)
STEP_S = 1.0
HOURS = 0.25
"""Ninety units of a student of speed 1. The unit that a student is computing at the end counts as idle time, before and after."""
SETTINGS: dict[str, Any] = {"before": 0, "after": None}
MOST_UNUSED = {"equal": 0.02, "1:2:4": 0.10}
FILE = Path(__file__).parent.parent / "results" / "classroom-late.json"


class Found(NamedTuple):
    """Shares of one class, in which every student is there all the time."""

    students: int
    speeds: str
    units_per_update: int
    max_lag: str
    units: int
    """Units that were computed or begun and given up."""
    unused_units: float
    unused_time: float
    """Share of the computing time."""
    idle: float
    """Share of the time of all students."""
    mean_lag: float


def class_run(units_per_update: int, max_lag: int | None) -> Run:
    tree = {
        "model": {"kind": "mlp", "input_dim": 64, "output_dim": 10, "hidden_sizes": [4]},
        "data": {"source": {"kind": "builtin", "name": "digits"}},
        "training": {"batch_size": 16, "epochs": 10_000},
        "strategy": {"kind": "workunits", "batches_per_unit": 10, "units_per_update": units_per_update, "max_lag": max_lag},
    }
    loaded = resolve_data(tree, name="late", dialect="shoal", environ={})
    if not loaded.ok:
        raise RuntimeError(str(loaded.problems))
    return loaded.run


def look(students: int, speeds: str, units_per_update: int, setting: str) -> Found:
    ratio = SPEEDS[speeds]
    machines = [SimulatedMachine(f"s{number}", STEP_S / ratio[number % len(ratio)], start_s=0.0) for number in range(students)]
    report = simulate(class_run(units_per_update, SETTINGS[setting]), machines, hours=HOURS, seed=students, samples=100_000)
    if report.violations:
        raise RuntimeError(str(report.violations))
    return _found(report, students, speeds, units_per_update, setting)


def _found(report: SimulationReport, students: int, speeds: str, units_per_update: int, setting: str) -> Found:
    work = report.work_s
    computed = work["useful"] + work["wasted"]
    judged = report.judged + report.abandoned
    return Found(
        students=students,
        speeds=speeds,
        units_per_update=units_per_update,
        max_lag=setting,
        units=judged,
        unused_units=1 - report.outcomes["accepted"] / judged,
        unused_time=work["wasted"] / computed,
        idle=max(0.0, 1 - computed / work["present"]),
        mean_lag=report.mean_lag,
    )


def grid() -> list[Found]:
    found = [
        look(students, speeds, units, setting)
        for speeds in SPEEDS
        for units in UNITS_PER_UPDATE
        for students in STUDENTS
        for setting in SETTINGS
    ]
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps([one._asdict() for one in found], indent=1) + "\n")
    return found


def measure() -> list[Row]:
    found = grid()
    rows = []
    for speeds, most in MOST_UNUSED.items():
        before, after = ([one for one in found if (one.speeds, one.max_lag) == (speeds, setting)] for setting in SETTINGS)
        worst, former = (max(one.unused_units for one in group) for group in (after, before))
        note = f"{STUDENTS[0]} to {STUDENTS[-1]} students, {UNITS_PER_UPDATE} units an update; peer: max_lag 0"
        rows.append(Row(f"unused units, speeds {speeds}, worst class", worst, former, "share", worst / most, "≤ 1 (of the goal)", note))
        idle, idle_before = (statistics.mean(one.idle for one in group) for group in (after, before))
        rows.append(
            Row(f"idle time, speeds {speeds}, mean of classes", idle, idle_before, "share", idle / max(idle_before, 1e-9), "≤ 1", note)
        )
    return rows


if __name__ == "__main__":
    print(
        f"{'speeds':<7} {'per update':>10} {'students':>8} {'max_lag':>8} {'units':>6} {'unused':>7} {'of time':>8} {'idle':>6} {'lag':>5}"
    )
    for one in grid():
        shares = f"{one.unused_units:7.1%} {one.unused_time:8.1%} {one.idle:6.1%} {one.mean_lag:5.1f}"
        print(f"{one.speeds:<7} {one.units_per_update:>10} {one.students:>8} {one.max_lag:>8} {one.units:>6} {shares}")
