"""`shoal simulate`: simulates a run with any number of workers in virtual time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import load, make_parser, parse, require, slowdowns
from shoal.config import Run
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.simulate import SimulationReport, VirtualRun
    from shoal.simulate.simulation import SimulationOptions

_SHOWN = 8
"""Workers that are printed in a scheduling round."""
_LAST_NOTES = 5
"""Last messages of the coordinator that are printed."""


def run(argv: list[str]) -> int:
    parser = make_parser("simulate", "Simulate a run with the real coordinator, protocol, codecs and rules on a virtual clock.")
    parser.add_argument("--workers", type=int, metavar="N", help="number of workers (default: as many as the run expects)")
    parser.add_argument("--hours", type=float, metavar="H", help="virtual hours (default: by the settings of simulation)")
    parser.add_argument(
        "--weather",
        metavar="WEATHER",
        help="calm, straggler, good, cellular, satellite, degraded, brownout, mixed, or a rate: 50mbit (default: the machines that the "
        "settings list, else calm)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same simulation (default: 0)")
    parser.add_argument("--step-s", type=float, metavar="S", help="seconds per batch on a machine of usual speed (default: measured here)")
    parser.add_argument("--flops", type=float, metavar="F", help="instead of --step-s: operations per second of such a machine")
    parser.add_argument("--samples", type=int, metavar="N", help="number of samples; the data is then not read (without --learn)")
    parser.add_argument(
        "--slowdown", action="append", default=[], metavar="NAME=FACTOR", help="make a worker slower: w2=8 (may be repeated)"
    )
    parser.add_argument("--cores", type=float, metavar="N", help="all workers share N cores of one machine, as with `shoal train`")
    parser.add_argument("--learn", action="store_true", help="workers really train: for small models and some hundreds of workers")
    parser.add_argument("--false-workers", type=float, default=0.0, metavar="SHARE", help="share of workers that send false updates")
    parser.add_argument("--loss", type=float, metavar="L", help="report when this loss was reached (with --learn)")
    parser.add_argument("--plots", metavar="DIR", help="save curves over virtual time in this folder")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments, overrides = parse(parser, argv)
    _check(arguments)
    loaded = require(load(arguments, overrides))
    if loaded.run.alone and loaded.run.engine.kind == "pipeline":
        return _pipelined(loaded.run, arguments)
    from shoal.simulate.simulation import simulated

    report = simulated(loaded.run, _asked(arguments), None if arguments.json else _show_members)
    _print(report, arguments)
    if arguments.plots:
        _draw(report, Path(arguments.plots))
    return 1 if report.violations else 0


def _check(arguments: argparse.Namespace) -> None:
    for name in ("workers", "hours", "step_s", "flops", "samples", "cores"):
        if (value := getattr(arguments, name)) is not None and not value > 0:
            raise ShoalError(f"--{name.replace('_', '-')} must be more than 0")
    if arguments.step_s is not None and arguments.flops is not None:
        raise ShoalError("--step-s and --flops both set the time per batch: give one of them")
    if not 0 <= arguments.false_workers <= 1:
        raise ShoalError("--false-workers is a share between 0 and 1")


def _pipelined(run: Run, arguments: argparse.Namespace) -> int:
    """Simulate a pipeline, which has no coordinator."""
    from shoal.simulate.pipeline_simulation import pipelined

    if arguments.plots or arguments.loss is not None:
        raise ShoalError("a simulated pipeline has no curves over time and no loss: leave --plots and --loss out")
    report = pipelined(run, _asked(arguments))
    figures = {"samples_per_s": report.samples_per_s, "step_s": report.step.seconds, "bytes_per_step": report.step.bytes}
    if arguments.json:
        stages = {one.stage.id: one.machine.name for one in report.held}
        print(json.dumps(figures | {"utilisation": report.step.utilisation, "hours": report.run_hours, "stages": stages}, indent=2))
    for name, text in () if arguments.json else report.rows():
        print(f"{name:<14} {text}")
    return 0


def _asked(arguments: argparse.Namespace) -> SimulationOptions:
    from shoal.simulate.simulation import SimulationOptions

    return SimulationOptions(
        arguments.workers,
        arguments.weather,
        arguments.hours,
        arguments.seed,
        arguments.step_s,
        arguments.learn,
        arguments.false_workers,
        slowdowns(arguments.slowdown),
        arguments.cores,
        flops=arguments.flops,
        samples=arguments.samples,
    )


def _show_members(number: int, world: VirtualRun) -> None:
    """Print a scheduling round: the workers and their measured speeds."""
    rows, tasks = world.coordinator.members.table(), world.coordinator.tasks
    print(f"{world.timeline.now:8.1f} s  scheduling round {number}: {len(rows)} workers are here")
    for row in rows[:_SHOWN]:
        rate = "no contribution yet" if row["rate"] is None else f"{row['rate']:.2f} contributions/s"
        task = "" if tasks is None else f", {tasks.task_of(world.coordinator.members.by_name[row['worker']]) or 'no task'}"
        print(f"              {row['worker']:<16} {rate}, {row['accepted']} taken, {row['rejected']} turned away, lag {row['lag']}{task}")
    if len(rows) > _SHOWN:
        print(f"              and {len(rows) - _SHOWN} more")


def _print(report: SimulationReport, arguments: argparse.Namespace) -> None:
    if arguments.json:
        figures = ("samples_per_s", "rejected_share", "utilisation", "wasted_share", "mean_lag", "cpu_us")
        print(json.dumps(vars(report) | {name: getattr(report, name) for name in figures}, default=str, indent=2))
        return
    for name, text in report.rows(arguments.loss):
        print(f"{name:<14} {text}")
    for note in report.notes[-_LAST_NOTES:]:
        print(f"coordinator:{note}")
    for violation in report.violations[:20]:
        print(f"broken promise: {violation}; the same seed shows it again")


def _draw(report: SimulationReport, folder: Path) -> None:
    from shoal.reporters.plots import save_curves

    folder.mkdir(parents=True, exist_ok=True)
    for name, curve in (report.curves | {"loss": report.losses}).items():
        scaled = [(60 * hours, value) for hours, value in curve]
        save_curves({name: scaled}, folder / f"{name.replace(' ', '-')}.png", x_title="virtual minutes", y_title=name)
    lags = [(float(lag), float(often)) for lag, often in sorted(report.lags.items())]
    save_curves({"contributions": lags}, folder / "lag.png", x_title="lag in versions", y_title="contributions")
