"""Carries out a planned run as a command: progress on standard error, outcome on standard output, signals."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.discovery import announced
from shoal.cli.engine_processes import as_rank, as_stage, gather, ignore_signals, start_ranks
from shoal.cli.main import print_log, report
from shoal.cli.options import load, slowdowns
from shoal.cli.output import download, print_secret, show_invitation, show_outcome, show_when_open, stopping_on_signals
from shoal.config.load import Override
from shoal.config.problems import ConfigError
from shoal.config.ranks import rank_place
from shoal.config.schema.cluster import Postgres
from shoal.errors import ShoalError
from shoal.launch.side_processes import check_dashboard, dashboard
from shoal.launch.start import Arguments, StartedRun, headline, preload_libraries, start_run
from shoal.launch.start_mode import StartMode, StartOptions, StartPlan, plan_start
from shoal.transports.discovery import COORDINATOR
from shoal.transports.interface import Unreachable

if TYPE_CHECKING:
    from shoal.config import Run
    from shoal.engines import World
    from shoal.runs.coordinator_run import CoordinatorLoop
    from shoal.runs.training.loop import TrainingLoop


def coordinator_options(arguments: argparse.Namespace, **more: Any) -> StartOptions:
    """How a command starts a coordinator that workers of other machines may join; `more`: options of this command alone."""
    hosts = tuple(arguments.host)
    return StartOptions(
        arguments.run_dir, arguments.resume, arguments.workers, invite=True, hosts=hosts, public_address=arguments.public_address, **more
    )


def planned(arguments: argparse.Namespace, overrides: list[Override], asked: StartOptions, *, warns: bool = True) -> StartPlan:
    """The plan for the options of a command; prints warnings, if wanted."""
    resolved = _continued(arguments)
    if asked.watch:
        check_dashboard()
    plan = plan_start(lambda more: load(arguments, [*overrides, *more], resolved=resolved), asked)
    if warns and _speaks_for_all():
        if plan.note:
            sys.stderr.write(f"{plan.note}\n")
        if plan.loaded.problems:
            report(ConfigError(plan.loaded.problems))
    return plan


def _speaks_for_all() -> bool:
    """Whether this process prints warnings: the first of torchrun's does; a process that Shoal started does not, since its parent has."""
    here = rank_place()
    return here is None or (here.rank == 0 and not here.file and not here.apart)


def goes_on_by_folder(arguments: argparse.Namespace) -> bool:
    """Whether a run is resumed with the settings in its folder."""
    settings = os.path.join(arguments.run_dir or "", "config.yaml")
    return bool(arguments.resume and arguments.run_dir and (arguments.files or [settings]) == [settings] and not arguments.config)


def _continued(arguments: argparse.Namespace) -> bool:
    """Use the settings in the run's folder if it is resumed without others; returns whether that is so."""
    alone = goes_on_by_folder(arguments)
    if arguments.run_dir and not arguments.config:
        _refuse_other_folder(arguments, alone)
    if arguments.resume and arguments.run_dir:
        from shoal.runs.folder.plugin_record import expect_those_of

        expect_those_of(Path(arguments.run_dir))
    if alone:
        arguments.files = [os.path.join(arguments.run_dir, "config.yaml")]
        arguments.dialect = "shoal"
    return alone


def _refuse_other_folder(arguments: argparse.Namespace, alone: bool) -> None:
    """Refuse to resume a run that is not there, and to start one without settings where there is one."""
    folder = Path(arguments.run_dir)
    there = (folder / "config.yaml").exists()
    if alone and not there and any((folder / phase / "config.yaml").exists() for phase in ("base", "policy")):
        raise ShoalError(f"--resume: {folder} holds a run in phases; name its settings again, before --run-dir {folder} --resume")
    if alone and not there:
        where = f"there is no run in {arguments.run_dir}; `shoal runs .` lists the runs here"
        raise ShoalError(f"--resume: {where}. To start one, name its settings and leave --resume out")
    if there and not arguments.files and not arguments.resume and not os.path.exists("config.yaml"):
        raise ShoalError(f"{arguments.run_dir} holds a run already: add --resume to continue it, or choose another --run-dir")


def carry_out(plan: StartPlan, argv: list[str], arguments: Arguments = lambda names: dict.fromkeys(names, ())) -> int:
    """Train, coordinate, or start the processes that do; returns the exit code. `argv` starts this command again in other processes."""
    if plan.mode is StartMode.RANKS:
        return start_ranks(plan.run, argv)
    if plan.mode is StartMode.GATHERS:
        return gather(plan, argv)
    if plan.mode is StartMode.FOLLOWS:
        assert plan.torchrun is not None
        ignore_signals()  # its child processes get the signal, too, and it ends with them
        plan.torchrun.work(print_log)
        return 0
    if plan.here is not None and plan.here.apart:
        return as_stage(plan, lambda tunnel: train(plan._replace(tunnel=tunnel)))
    if plan.here is not None:
        return as_rank(plan.here, lambda: train(plan), watch=bool(plan.here.file))
    return train(plan, arguments)


def train(plan: StartPlan, arguments: Arguments = lambda names: dict.fromkeys(names, ())) -> int:
    """Train or coordinate in this process; returns the exit code."""
    code, world = _train(plan, arguments)
    world.close()  # after the model is freed
    return code


def _train(plan: StartPlan, arguments: Arguments) -> tuple[int, World]:
    preload_libraries(plan)  # before torch is loaded here
    from shoal.reporters.progress import progress_for
    from shoal.reporters.sinks import sinks_for

    run, speaks, cluster = plan.run, plan.here is None or plan.here.rank == 0, plan.mode is StartMode.COORDINATES
    reporters = [progress_for(sys.stderr, run.log_level, cluster, run.log_format), *sinks_for(run)] if speaks else []
    if plan.options.invite and speaks:
        sys.stderr.write(f"starting: {_beginnings(run)}; the command for workers follows\n")
    with start_run(plan, reporters, download if speaks else None, arguments) as ready:
        loop = ready.loop
        loop.message(headline(plan, loop))
        with stopping_on_signals(loop):  # before the invitation is printed, after which the user may stop the run
            with _announced(ready, plan.options.announce):
                if plan.options.invite:
                    show_invitation(ready, plan.options.hosts)
                    show_when_open(ready)
                with _watched(loop, plan.options.watch and speaks), _telling_how_to_go_on(loop, _command(plan)):
                    outcome = ready.train()
        return show_outcome(loop, outcome, _command(plan)) if speaks else 0, loop.engine.world


def _beginnings(run: Run) -> str:
    """What a coordinator does before workers can join."""
    database = isinstance(run.transport, Postgres) and run.transport.host == "embedded"
    return "the data and the model are read" + (", and a PostgreSQL of the run's own begins" if database else "")


def _command(plan: StartPlan) -> str:
    """The command that resumes such a run; empty for a relay, which needs its coordinator's address again."""
    if plan.options.above is not None:
        return ""
    return "up" if plan.options.up else "coordinate" if plan.options.invite else "train"


@contextmanager
def _announced(ready: StartedRun, wanted: bool) -> Iterator[None]:
    """Announce the coordinator during the run, if wanted."""
    if not wanted:
        yield
        return
    assert ready.invitation is not None
    with announced(COORDINATOR, ready.loop.directory.path.name, ready.invitation, ready.hosts):
        yield


@contextmanager
def _telling_how_to_go_on(loop: TrainingLoop | CoordinatorLoop, command: str) -> Iterator[None]:
    """Adds the command that resumes the run to the error where its database does not come back."""
    try:
        yield
    except Unreachable as problem:
        again = f"What was confirmed is kept; when it answers: shoal {command} --run-dir {loop.directory.path} --resume"
        raise ShoalError(f"{problem}. {again}" if command else str(problem)) from None


@contextmanager
def _watched(loop: TrainingLoop | CoordinatorLoop, wanted: bool) -> Iterator[None]:
    """Show a dashboard during the run, if wanted."""
    if not wanted:
        yield
        return
    with dashboard(loop.directory.path) as where:
        print_secret(where)  # no message of the run: the address holds the owner's password
        loop.recorder.dashboard = next((word.partition("#")[0] for word in where.split() if word.startswith("http")), "")
        yield


def weather_and_speeds(netem: str | None, slowdown: Sequence[str]) -> Arguments:
    """Arguments of workers with a simulated network or speed; `slowdown` is a list of NAME=FACTOR."""

    def arguments(names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        factors = slowdowns(slowdown)
        if unknown := [name for name in factors if name not in names]:
            raise ShoalError(f"--slowdown: there is no worker `{unknown[0]}`; there are {', '.join(names)}")
        common = ["--netem", netem] if netem else []
        return {name: [*common, *(["--slowdown", f"{factors[name]:g}"] if name in factors else [])] for name in names}

    return arguments
