"""A run that was planned, carried out as a command: progress on standard error, the outcome on standard output, signals obeyed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.engine_processes import as_rank, gather, ignore_signals, start_ranks
from shoal.cli.main import report
from shoal.cli.options import load, slowdowns
from shoal.cli.output import download, print_log, show_invitation, show_outcome, stopping_on_signals
from shoal.config.load import Override
from shoal.config.problems import ConfigError
from shoal.config.ranks import rank_place
from shoal.errors import ShoalError
from shoal.launch.dashboard_process import check_dashboard, dashboard
from shoal.launch.start import Arguments, headline, preload_libraries, start_run
from shoal.launch.start_mode import StartMode, StartOptions, StartPlan, plan_start

if TYPE_CHECKING:
    from shoal.engines import World
    from shoal.runs.coordinator_run import CoordinatorLoop
    from shoal.runs.training.loop import TrainingLoop


def planned(arguments: argparse.Namespace, overrides: list[Override], asked: StartOptions) -> StartPlan:
    """The plan for what the options of a command say; what is doubtful about them is told."""
    resolved = _continued(arguments)
    if asked.watch:
        check_dashboard()
    made = plan_start(lambda more: load(arguments, [*overrides, *more], resolved=resolved), asked)
    if _speaks_for_all():
        if made.note:
            sys.stderr.write(f"{made.note}\n")
        if made.loaded.problems:
            report(ConfigError(made.loaded.problems))
    return made


def _speaks_for_all() -> bool:
    """Whether this process tells what is doubtful about the settings. Of torchrun's the first does; those that Shoal itself started do
    not, since the process that started them has."""
    here = rank_place()
    return here is None or (here.rank == 0 and not here.file and not here.apart)


def goes_on_by_folder(arguments: argparse.Namespace) -> bool:
    """Whether a run is resumed by its folder, which holds all its settings."""
    settings = os.path.join(arguments.run_dir or "", "config.yaml")
    return bool(arguments.resume and arguments.run_dir and (arguments.files or [settings]) == [settings] and not arguments.config)


def _continued(arguments: argparse.Namespace) -> bool:
    """A run that is resumed by its folder alone goes on with the settings in it."""
    alone = goes_on_by_folder(arguments)
    if arguments.resume and arguments.run_dir:
        from shoal.runs.folder.plugin_record import expect_those_of

        expect_those_of(Path(arguments.run_dir))
    if alone:
        arguments.files = [os.path.join(arguments.run_dir, "config.yaml")]
        arguments.dialect = "shoal"
    return alone


def carry_out(made: StartPlan, argv: list[str], arguments: Arguments = lambda names: dict.fromkeys(names, ())) -> int:
    """Train, coordinate, or start the processes that do; the exit code. `argv` starts this command again in other processes."""
    if made.mode is StartMode.RANKS:
        return start_ranks(made.run, argv)
    if made.mode is StartMode.GATHERS:
        return gather(made, argv)
    if made.mode is StartMode.FOLLOWS:
        assert made.torchrun is not None
        ignore_signals()  # what this one starts is asked to stop, too, and it ends with that
        made.torchrun.work(print_log)
        return 0
    if made.here is not None:
        return as_rank(made.here, lambda: train(made), watch=bool(made.here.file) or made.here.apart)
    return train(made, arguments)


def train(made: StartPlan, arguments: Arguments = lambda names: dict.fromkeys(names, ())) -> int:
    """Train in this process, or coordinate in it; the exit code."""
    code, world = _train(made, arguments)
    world.close()  # when nothing of the model is left
    return code


def _train(made: StartPlan, arguments: Arguments) -> tuple[int, World]:
    preload_libraries(made)  # before torch is loaded here
    from shoal.reporters.progress import progress_for
    from shoal.reporters.sinks import sinks_for

    run, speaks, cluster = made.run, made.here is None or made.here.rank == 0, made.mode is StartMode.COORDINATES
    reporters = [progress_for(sys.stderr, run.log_level, cluster, run.log_format), *sinks_for(run)] if speaks else []
    with start_run(made, reporters, download if speaks else None, arguments) as ready:
        loop = ready.loop
        loop.message(headline(made, loop))
        with stopping_on_signals(loop):  # before the invitation: whoever reads that may want the run to end
            if made.options.invite:
                show_invitation(ready, made.options.hosts)
            with _watched(loop, made.options.watch and speaks):
                outcome = ready.train()
        return show_outcome(loop, outcome, _command(made)) if speaks else 0, loop.engine.world


def _command(made: StartPlan) -> str:
    """The command that resumes such a run; nothing for a relay, which is given the way to its coordinator again."""
    if made.options.above is not None:
        return ""
    return "up" if made.options.up else "coordinate" if made.options.invite else "train"


@contextmanager
def _watched(loop: TrainingLoop | CoordinatorLoop, wanted: bool) -> Iterator[None]:
    """A dashboard beside the run, where one is wanted."""
    if not wanted:
        yield
        return
    with dashboard(loop.directory.path) as where:
        loop.message(where)
        yield


def weather_and_speeds(netem: str | None, slowdown: Sequence[str]) -> Arguments:
    """Arguments for workers that behave as if they were elsewhere, or slower: `slowdown` is NAME=FACTOR each."""

    def arguments(names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        factors = _factors(slowdown, names)
        common = ["--netem", netem] if netem else []
        return {name: [*common, *(["--slowdown", factors[name]] if name in factors else [])] for name in names}

    return arguments


def _factors(slowdown: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    factors = slowdowns(slowdown)
    for name in factors:
        if name not in names:
            raise ShoalError(f"--slowdown: there is no worker `{name}`; there are {', '.join(names)}")
    return {name: f"{factor:g}" for name, factor in factors.items()}
