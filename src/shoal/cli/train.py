"""`shoal train`: train what a configuration describes, alone or with workers on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from shoal.cli.main import report
from shoal.cli.options import load, parse, parser, require
from shoal.cli.ranks import as_rank, ignore_signals, start_ranks
from shoal.config.load import Loaded, Override
from shoal.config.problems import ConfigError
from shoal.config.ranks import place
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.config.ranks import Place
    from shoal.runs.cluster_loop import ClusterLoop
    from shoal.runs.loop import Loop
    from shoal.worker.interfaces import World


def run(argv: list[str]) -> int:
    made = parser("train", "Train a model.")
    made.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: a new one in output_dir)")
    made.add_argument("--resume", action="store_true", help="go on with the run in --run-dir, or the newest with these settings")
    made.add_argument("--workers", type=int, metavar="N", help="start a coordinator and N workers on this machine")
    made.add_argument(
        "--netem", metavar="WEATHER", help="put a network between them: good, cellular, satellite, degraded, brownout, or a rate: 50mbit"
    )
    made.add_argument("--slowdown", action="append", default=[], metavar="NAME=FACTOR", help="make a worker slower: w2=8 (may be repeated)")
    arguments, overrides = parse(made, argv)
    resolved = continued_from(arguments)
    loaded = require(load(arguments, overrides, resolved=resolved))
    if arguments.workers and loaded.run.strategy.kind == "local":
        sys.stderr.write("strategy: syncps, since there are workers (edp and async are others: --set strategy.kind=…)\n")
        loaded = require(load(arguments, [*overrides, Override("strategy.kind", "syncps", "--workers")], resolved=resolved))
    if loaded.problems:
        report(ConfigError(loaded.problems))
    from shoal.launch import place_in
    from shoal.launch.ranks import facts_of

    if loaded.run.strategy.kind == "local":
        for option in ("netem", "slowdown"):
            if getattr(arguments, option):
                raise ShoalError(f"--{option} needs workers: add --workers N")
        here = place_in(loaded.run)
        if here is not None:
            return as_rank(here, lambda: train(loaded, arguments.run_dir, arguments.resume, here), watch=bool(here.file))
        if loaded.run.engine.kind in ("ddp", "fsdp", "deepspeed"):
            from shoal.runs.assembly import refuse_unbuilt

            refuse_unbuilt(loaded)
            return start_ranks(loaded.run, argv)
        return train(loaded, arguments.run_dir, arguments.resume)
    here, count = place(), arguments.workers or loaded.run.cluster.num_workers or 0
    facts = facts_of(loaded.run, here, count)
    if facts:
        loaded = require(load(arguments, [*overrides, *facts], resolved=resolved))
    if here is not None:
        return _in_fleet(loaded, arguments, here)
    if loaded.run.transport.kind == "collectives":
        if not count:
            raise ShoalError("how many workers? --workers N starts them here")
        count = 1  # to the coordinator they are one
    if not count and not arguments.resume:
        raise ShoalError(
            f"how many workers? --workers N starts them here; `shoal coordinate` waits for others ({loaded.run.strategy.kind})"
        )
    count += bool(count and loaded.run.coordinator.trains and not arguments.workers)
    from shoal.cli.clusters import coordinate

    return coordinate(loaded, arguments.run_dir, arguments.resume, workers=count, netem=arguments.netem, slowdown=arguments.slowdown)


def _in_fleet(loaded: Loaded, arguments: argparse.Namespace, here: Place) -> int:
    """As one of the processes that torchrun started, each of which is a worker, or one of a worker's."""
    from shoal.cli.join import tell
    from shoal.launch.fleet import Fleet

    for option in ("workers", "netem", "slowdown"):
        if getattr(arguments, option):
            raise ShoalError(f"--{option} is for workers that Shoal starts here, and torchrun has started these: leave it out")
    fleet = Fleet(loaded.run, here)
    if fleet.first:
        from shoal.cli.clusters import coordinate

        begun = fleet.begun()
        return coordinate(loaded, begun or arguments.run_dir, bool(begun or arguments.resume), workers=fleet.workers, fleet=fleet)
    ignore_signals()  # what this one starts is asked to stop, too, and it ends with that
    fleet.work(tell)
    return 0


def continued_from(arguments: argparse.Namespace) -> bool:
    """A run that is resumed by its folder alone goes on with the settings in it."""
    alone = bool(arguments.resume and arguments.run_dir and not arguments.files and not arguments.config)
    if arguments.resume and arguments.run_dir:
        from shoal.runs.plugins import expect_those_of

        expect_those_of(Path(arguments.run_dir))
    if alone:
        arguments.files = [os.path.join(arguments.run_dir, "config.yaml")]
        arguments.dialect = "shoal"
    return alone


def train(loaded: Loaded, run_dir: str | None = None, resume: bool = False, here: Place | None = None) -> int:
    """Train alone, with progress on standard error and the outcome on standard output. `here`: as one of several processes."""
    code, world = _train(loaded, run_dir, resume, here)
    world.close()  # when nothing of the model is left
    return code


def _train(loaded: Loaded, run_dir: str | None, resume: bool, here: Place | None) -> tuple[int, World]:
    from shoal.runs.alone import prepare
    from shoal.watch.progress import progress_for
    from shoal.watch.sinks import sinks_for

    speaks = here is None or here.rank == 0
    progress = progress_for(sys.stderr, loaded.run.log_level)
    reporters = [progress, *sinks_for(loaded.run)] if speaks else []
    loop = prepare(loaded, run_dir=run_dir, resume=resume, reporters=reporters, progress=download if speaks else None, here=here)
    where = loop.engine.device if here is None else f"{here.size} × {loop.engine.device.type} ({loaded.run.engine.kind})"
    loop.message(f"{loop.engine.task.__class__.__name__} on {where}, {loop.engine.size:,} parameters, in {loop.directory.path}")
    with stopping_on_signals(loop):
        summary = loop.train()
    return conclude(loop, summary) if speaks else 0, loop.engine.world


@contextmanager
def stopping_on_signals(loop: Loop | ClusterLoop) -> Iterator[None]:
    """Stop after a step when asked to, and at once when asked again."""
    own = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:  # a process that loads data: it ends with this one
            return
        if loop.interrupt():
            os._exit(130)
        loop.message("stopping after this step and saving; once more to stop at once")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def conclude(loop: Loop | ClusterLoop, summary: dict[str, Any]) -> int:
    """Tell how it ended; the exit code."""
    from shoal.runs.trained import save_final
    from shoal.watch.progress import figures

    last = summary["metrics"]["eval"] or summary["metrics"]["train"]
    print(f"{summary['status']} after {summary['steps']} steps, {summary['samples']} samples, {summary['wall_s']:.1f} s: {figures(last)}")
    print(f"run: {loop.directory.path}")
    if final := save_final(loop.run, loop.directory.path, summary):
        print(f"model: {final}")
    return 130 if summary["status"] == "interrupted" else 0


def download(what: str, done: int, total: int | None) -> None:
    """Progress of a download, on one line."""
    size = f"{done >> 20} of {total >> 20} MiB" if total else f"{done >> 20} MiB"
    end = "\n" if total and done >= total else "\r"
    sys.stderr.write(f"downloading {what}: {size}{end}")
