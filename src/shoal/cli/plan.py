"""`shoal plan`: finds settings for a model and the available machines."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import load, make_parser, parse, require
from shoal.config import Run
from shoal.config.load import LoadedConfig, Override
from shoal.config.machines import MachineKind, read_machines
from shoal.config.ranks import STRATEGY_ALONE
from shoal.config.show import brief, scalar
from shoal.errors import ShoalError
from shoal.files import writing

if TYPE_CHECKING:
    from shoal.simulate.meta_model import MetaModel
    from shoal.simulate.planning import Planned, Prediction

_SHOWN = 12
"""Candidates that the table shows; --all shows every one."""


def run(argv: list[str]) -> int:
    parser = make_parser("plan", "Find the best strategy, codec, quorum and batch size for a model and your machines, by simulation.")
    parser.add_argument(
        "--machines", metavar="FILE", help="YAML: names of machines, with memory_gb, steps_per_s or flops, bandwidth_mbps …"
    )
    parser.add_argument(
        "--measure",
        nargs="?",
        const="",
        metavar="RUN",
        help="time this machine and plan for as many equal ones as the run expects; with a run's folder: plan for its workers, with the "
        "speeds and links that were measured there",
    )
    parser.add_argument("--samples", type=int, metavar="N", help="number of samples; the data is then not read")
    parser.add_argument("--out", metavar="FILE", help="write the best configuration into this file")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same plan (default: 0)")
    parser.add_argument("--all", action="store_true", help="show all candidates, also those that cannot run")
    arguments, overrides = parse(parser, argv)
    overrides = _for_measurement(arguments, overrides)
    if bool(arguments.machines) == (arguments.measure is not None):
        raise ShoalError("name the machines to plan for: --machines FILE, or --measure for machines like this one")
    if arguments.samples is not None and arguments.samples < 1:
        raise ShoalError("--samples must be more than 0")
    from shoal.simulate.meta_model import build_meta_model, data_of

    run = require(load(arguments, overrides)).run
    listed = dict(read_machines(arguments.machines)) if arguments.machines else None
    if arguments.measure:
        listed = _machines_of_run(run, Path(arguments.measure))
    found = build_meta_model(run, data_of(run, arguments.samples))
    kinds = _this_machine(found, arguments.samples) if listed is None else listed
    planned = _planned(found, kinds, arguments, overrides)
    _print(planned, arguments.all)
    if arguments.out:
        with writing(arguments.out):
            Path(arguments.out).write_text(brief(planned.first.loaded), encoding="utf-8")
        print(f"written to {arguments.out}: shoal train {arguments.out}")
    return 0


def _for_measurement(arguments: argparse.Namespace, overrides: list[Override]) -> list[Override]:
    """The settings for `--measure` without a run: a number of equal machines replaces those that the file lists. A file that follows the
    option is a configuration, not a run."""
    if arguments.measure and Path(arguments.measure).is_file():
        arguments.files, arguments.measure = [*arguments.files, arguments.measure], ""
    counted = any(override.path == "cluster.num_workers" for override in overrides)
    if arguments.measure != "" or not counted or any(override.path == "cluster.workers" for override in overrides):
        return overrides
    return [Override("cluster.workers", "[]", "--measure"), *overrides]


def _planned(found: MetaModel, kinds: dict[str, MachineKind], arguments: argparse.Namespace, overrides: list[Override]) -> Planned:
    from shoal.simulate.meta_model import devices_of, with_sharded_engine
    from shoal.simulate.planning import plan

    def variant(settings: Mapping[str, Any]) -> LoadedConfig:
        further = [Override(path, scalar(value), f"--set {path}={scalar(value)}") for path, value in settings.items()]
        return load(arguments, [*overrides, *further])

    print(f"data: {found.parts.data.info.name}")
    too_small = _print_memory(found, with_sharded_engine(found, devices_of(kinds)), kinds)
    try:
        return plan(found, kinds, variant, _progress, arguments.seed)
    except ShoalError:
        if not too_small:
            raise
        raise ShoalError(f"the model fits none of the machines, nor several of them together:\n{too_small}") from None


def _progress(number: int, count: int, text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{number}/{count} {text}"[:150], end="" if number < count else "\r\033[K", file=sys.stderr, flush=True)


# --- this machine -------------------------------------------------------------------------------------


def _this_machine(found: MetaModel, samples: int | None) -> dict[str, MachineKind]:
    """This machine, once for each expected worker; prints the measurement as a line for a machines file."""
    from shoal.simulate.simulation import measured_step_s, to_be_timed

    parts = to_be_timed(found, samples, "leave --samples out, or list your machines with --machines FILE")
    steps_per_s = float(f"{1 / measured_step_s(parts):.3g}")
    kind = MachineKind(count=found.run.cluster.num_workers or 1, memory_gb=_memory_gb(parts.engine.device), steps_per_s=steps_per_s)
    memory = "" if kind.memory_gb is None else f"memory_gb: {kind.memory_gb:g}, "
    print(f"this machine, for a file of machines:\n  this: {{count: {kind.count}, {memory}steps_per_s: {steps_per_s:g}}}\n")
    return {"this": kind}


def _machines_of_run(run: Run, folder: Path) -> dict[str, MachineKind]:
    """Those who have joined a run, as its coordinator last saw them. What was found is printed as a file of machines."""
    from shoal.runs.folder.run_reader import RunFolder

    status = RunFolder(folder).status()
    if not RunFolder(folder).is_coordinated():
        raise ShoalError(
            f"{folder} is a run without workers, so no machine was measured there: leave {folder} out, and --measure times this machine"
        )
    rows = [row for row in status.get("members", ()) if _is_positive(row, "computing_s") and _is_positive(row, "samples")]
    if not rows:
        raise ShoalError(f"{folder}: no worker of this run has learned from a batch yet; start it, and try again in a moment")
    kinds = {str(row["worker"]): _machine_of(row, run.training.batch_size or 1) for row in rows}
    print("those who joined, for a file of machines:")
    for name, kind in kinds.items():
        print(f"  {name}: {{steps_per_s: {kind.steps_per_s:g}, bandwidth_mbps: {kind.bandwidth_mbps:g}, latency_ms: {kind.latency_ms:g}}}")
    print()
    return kinds


def _is_positive(row: Mapping[str, Any], name: str) -> bool:
    """Whether a worker's own word for a figure can be true."""
    return isinstance(row.get(name), (int, float)) and row[name] > 0


def _machine_of(row: Mapping[str, Any], batch: int) -> MachineKind:
    """A worker's machine. Missing measurements of its link count as a local network."""
    link: dict[str, Any] = {name: float(f"{row[name]:.3g}") for name in ("bandwidth_mbps", "latency_ms") if _is_positive(row, name)}
    return MachineKind(steps_per_s=float(f"{row['samples'] / row['computing_s'] / batch:.3g}"), **link)


def _memory_gb(device: Any) -> float | None:
    """What this machine or its device has; None where the system does not tell."""
    if device.type == "cuda":
        import torch

        return round(torch.cuda.mem_get_info(device)[1] / 1e9, 1)
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (AttributeError, ValueError, OSError):  # not a Unix
        return None


# --- what fits ----------------------------------------------------------------------------------------


def _print_memory(found: MetaModel, run: Run, kinds: dict[str, MachineKind]) -> str:
    """Print the memory that training needs and the machines that are too small; returns advice if all are, even with the smallest batch."""
    from shoal.simulate.meta_model import changes_that_fit, machines_that_fit
    from shoal.simulate.pipeline_plans import machines_needed

    needs, batch = found.memory(run), run.training.batch_size
    who = (
        "a worker" if run.launch.devices_per_node in (None, 1) else f"with {run.engine.kind}, each of {run.launch.devices_per_node} devices"
    )
    parts = ", ".join(f"{name} {_gigabytes(size / 1e9)}" for name, size in needs._asdict().items())
    active = f" ({found.active:,} active per token)" if found.active < found.parameters else ""
    print(f"{found.parameters:,} parameters{active}; {who} needs {_gigabytes(needs.gb)} with a batch of {batch}: {parts}")
    least = run.replace(training=run.training.replace(batch_size=1))
    fitting = machines_that_fit(found, run, kinds)
    lines = []
    for name in [name for name in kinds if name not in fitting]:
        memory_gb = kinds[name].memory_gb or 0.0
        changes = changes_that_fit(found, run, memory_gb)
        if needed := machines_needed(found, run, memory_gb):
            changes.append("engine.kind=pipeline over {} such machines, with engine.micro_batches={}".format(*needed))
        lines.append(f"it does not fit {name}, which has {_gigabytes(memory_gb)}. It would with {'; or '.join(changes)}")
    print("".join(f"{line}\n" for line in lines))
    return "" if machines_that_fit(found, least, kinds) else "\n".join(lines)


# --- the table ----------------------------------------------------------------------------------------


def _print(planned: Planned, whole: bool) -> None:
    ranked = planned.predictions
    shown = ranked if whole else ranked[:_SHOWN]
    if planned.first not in shown:
        shown = [*shown[:-1], planned.first]
    names = [_name(one) for one in shown]
    width, priced = max(map(len, names)), any(one.price_per_hour for one in ranked)
    print(f"  {'candidate':<{width}}  workers  samples/s   run takes      bytes    memory  apart" + ("      cost" if priced else ""))
    for name, one in zip(names, shown, strict=True):
        cost = f"  {one.cost:>8.2f}" if priced else ""
        print(
            f"{'*' if one is planned.first else ' '} {name:<{width}}  {one.workers:>7}  {one.samples_per_s:>9,.1f}  {_time(one.hours):>10}"
            f"  {_gigabytes(one.bytes / 1e9):>9}  {_gigabytes(one.memory_gb):>8}  {one.apart:>5.1f}{cost}"
        )
    if len(shown) < len(ranked):
        print(f"  and {len(ranked) - len(shown)} more that are slower (--all)")
    for name, reason in planned.refused.items() if whole else ():
        print(f"  cannot be run: {name}: {reason}")
    print("apart: batches that a worker learns from before it knows what the others learned; the more, the more samples a loss may take")
    print(f"first choice: {_name(planned.first)}: {planned.reason}")
    name, rate = planned.alone or ("", 0.0)
    if rate >= planned.first.samples_per_s and planned.first.loaded.run.strategy.kind != STRATEGY_ALONE:
        print(f"warning: {name} alone is as fast, with {rate:,.1f} samples/s and no coordinator: train there, with strategy.kind=local")


def _name(one: Prediction) -> str:
    return f"{one.candidate}, codec {one.candidate.codec}, batch {one.candidate.batch}"


def _gigabytes(gb: float) -> str:
    if gb >= 1:
        return f"{gb:,.1f} GB"
    return f"{1e3 * gb:,.1f} MB" if gb >= 1e-3 else f"{1e6 * gb:,.1f} kB"


def _time(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min" if hours >= 1 / 60 else f"{3600 * hours:.1f} s"
