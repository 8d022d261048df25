"""`shoal train` with an engine of several processes: starts them, or is one of them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shoal.cli.discovery import announced
from shoal.cli.ends_with_parent import when_parent_ends
from shoal.cli.main import report
from shoal.cli.output import handling_signals, show_places
from shoal.config import Run
from shoal.config.ranks import RankPlace
from shoal.errors import ShoalError
from shoal.transports.connect import listening_hosts
from shoal.transports.discovery import COORDINATOR

if TYPE_CHECKING:
    from shoal.launch.start_mode import StartPlan
    from shoal.transports.zeromq.tunnel import Tunnel

_NOTICE_S = 10.0
"""How long a process may take to notice by itself that a machine was lost. torch can wait for days in some places."""


def start_ranks(run: Run, argv: list[str]) -> int:
    """Start the engine's processes on this machine and wait for them."""
    from shoal.launch.engine_processes import EngineProcesses, LocalRanks, RankLost

    processes = EngineProcesses.of(run, "train", _tell)
    assert processes is not None
    own = _without(argv, "--workers")
    counted = ["--set", f"launch.devices_per_node={processes.size}"] if own != argv else []  # these processes are the workers
    ranks = LocalRanks(processes, ["train", *own, *counted])
    try:
        with handling_signals(lambda number, frame: ranks.stop(signal.SIGTERM)):
            return ranks.run()
    except RankLost as error:
        raise ShoalError(f"{error}. --resume goes on from the last checkpoint") from None


def gather(plan: StartPlan, argv: list[str]) -> int:
    """Assign the stages of a pipeline to machines that join, and run a stage here, until the run ends."""
    from shoal.launch.start import pipeline_host

    if plan.options.public_address:
        raise ShoalError("--public-address: the stages of a pipeline connect to each other directly, in one network; leave it out")
    host = pipeline_host(plan, _without(argv, "--host", "--announce"), _tell)
    with handling_signals(lambda number, frame: host.stop()), ExitStack() as until_the_end:
        if plan.options.announce:
            name = Path(plan.options.run_dir or plan.run.name or "pipeline").name
            listening = listening_hosts(plan.run.transport, host.hosts)
            until_the_end.enter_context(announced(COORDINATOR, name, host.invitation, listening))
        show_places(host.invitation, plan.run, host.gathering.expected)
        return host.work()


def _without(argv: list[str], option: str, *switches: str) -> list[str]:
    """Arguments without an option and its value, and without these switches."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(option)
    for switch in switches:
        parser.add_argument(switch, action="store_true")
    return parser.parse_known_args(argv)[1]


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def as_stage(plan: StartPlan, work: Callable[[Tunnel], int]) -> int:
    """Work as the process of a pipeline stage, on a machine of its own. When another machine is lost this process ends: at once where
    torch notices it, and in any case after some seconds."""
    from shoal.launch.engine_processes import LOST
    from shoal.launch.pipeline_rendezvous import tunnel_for

    here = plan.here
    assert here is not None

    def on_lost(rank: int) -> None:
        def end() -> None:
            report(ShoalError(f"process {here.rank} of {here.size} has lost process {rank}, and waited for it in vain"))
            _leave(LOST)

        ending = threading.Timer(_NOTICE_S, end)
        ending.daemon = True
        ending.start()

    line = sys.stdin.readline()
    return as_rank(here, lambda: work(tunnel_for(plan.run, here, line, on_lost)), watch=True)


def as_rank(here: RankPlace, work: Callable[[], int], watch: bool) -> int:
    """Work as one process of several. A process that fails exits at once, since cleaning up would wait for the others.

    `watch`: end with the process that started this one.
    """
    from shoal.engines.world import OthersNotFound, is_process_lost
    from shoal.launch.engine_processes import LOST, NOT_FOUND

    if watch:
        when_parent_ends(lambda: _leave(1))
    try:
        return work()
    except ShoalError as error:
        report(error)
        code = NOT_FOUND if here.apart and isinstance(error, OthersNotFound) else 2
    except Exception as error:
        if not is_process_lost(error):
            raise
        report(ShoalError(f"process {here.rank} of {here.size} has lost the others: one of them has ended"))
        code = LOST
    _leave(code)


def _leave(code: int) -> NoReturn:
    from shoal.engines.deepspeed.disk import leave_nothing

    leave_nothing()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ignore_signals() -> None:
    """Ignore signals: this process stops on a command from the first process of its worker."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
