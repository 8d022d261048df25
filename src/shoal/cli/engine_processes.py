"""`shoal train` with an engine of several processes: starts them, or is one of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from shoal.cli.main import report
from shoal.config import Run
from shoal.config.ranks import RankPlace
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.launch.engine_processes import EngineProcesses, LocalIsland
    from shoal.launch.start_mode import StartPlan


def start_ranks(run: Run, argv: list[str]) -> int:
    """Start the engine's processes on this machine and wait for them."""
    from shoal.launch.engine_processes import EngineProcesses, LocalRanks, RankLost

    crew = EngineProcesses.of(run, "train", _tell)
    assert crew is not None
    own = _without(argv, "--workers")
    counted = ["--set", f"launch.devices_per_node={crew.size}"] if own != argv else []  # these processes are the workers
    ranks = LocalRanks(crew, ["train", *own, *counted])

    def stop(number: int, frame: FrameType | None) -> None:
        ranks.stop(signal.SIGTERM)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return ranks.run()
    except RankLost as error:
        raise ShoalError(f"{error}. --resume goes on from the last checkpoint") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def gather(plan: StartPlan, argv: list[str]) -> int:
    """Assign the stages of a pipeline to machines that join, and run a stage here, until the run ends."""
    from shoal.cli.output import show_places
    from shoal.launch.start import pipeline_host

    host = pipeline_host(plan, _without(argv, "--host"), _tell)

    def stop(number: int, frame: FrameType | None) -> None:
        host.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        show_places(host.invitation, plan.run, host.gathering.expected)
        return host.work()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _without(argv: list[str], option: str) -> list[str]:
    """Arguments without an option and its value."""
    kept, skips = list[str](), False
    for word in argv:
        if not skips and not word.startswith(f"{option}="):
            skips = word == option
            kept += [] if skips else [word]
        else:
            skips = False
    return kept


def island(
    crew: EngineProcesses, name: str, argv: list[str], invitation: Mapping[str, Any], tell: Callable[[str], None], gone: Callable[[], None]
) -> LocalIsland:
    """The processes of a worker, each of which runs `shoal join`; the first of them joins under the worker's name."""
    from shoal.launch.engine_processes import LocalIsland, LocalRanks

    arguments, secret = ["join", *argv, "--stdin", "--name", name], json.dumps(dict(invitation))
    return LocalIsland(lambda: LocalRanks(crew, arguments, secret), tell, gone)


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def as_rank(here: RankPlace, work: Callable[[], int], watch: bool) -> int:
    """Work as one process of several. A process that fails exits at once, since cleaning up would wait for the others.

    `watch`: end with the process that started this one.
    """
    from shoal.engines.deepspeed.disk import leave_nothing
    from shoal.engines.world import is_process_lost
    from shoal.launch.engine_processes import LOST

    if watch:
        _leave_with_standard_input(leave_nothing)
    try:
        return work()
    except ShoalError as error:
        report(error)
        code = 2
    except Exception as error:
        if not is_process_lost(error):
            raise
        report(ShoalError(f"process {here.rank} of {here.size} has lost the others: one of them has ended"))
        code = LOST
    sys.stdout.flush()
    sys.stderr.flush()
    leave_nothing()
    os._exit(code)


def ignore_signals() -> None:
    """For a process that stops when the first of its worker says so."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _leave_with_standard_input(leave_nothing: Callable[[], None]) -> None:
    """The process that started this one holds the other end; when it is gone, so is this one."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        leave_nothing()
        os._exit(1)

    threading.Thread(target=watch, name="standard-input", daemon=True).start()
