"""`shoal train` with an engine of several processes: start them, or be one of them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from shoal.cli.main import report
from shoal.config import Run
from shoal.config.ranks import Place, place
from shoal.errors import ShoalError


def place_in(run: Run) -> Place | None:
    """Which of the engine's processes this is. None: it is alone, or has to start them. Raises ShoalError where the two do not fit."""
    here = place()
    if here is None:
        return None
    if run.engine.kind == "single":
        if here.size > 1:
            raise ShoalError(
                f"torchrun started {here.size} processes, and the engine single is one: set engine.kind to ddp, fsdp or deepspeed"
            )
        return None
    for setting, wanted, found in (
        ("launch.devices_per_node", run.launch.devices_per_node, here.local_size),
        ("launch.nodes", run.launch.nodes, here.nodes),
    ):
        if wanted is not None and wanted != found:
            raise ShoalError(f"{setting} is {wanted}, and torchrun started {found}")
    return here


def start_ranks(run: Run, argv: list[str]) -> int:
    """Start the engine's processes on this machine and wait for them."""
    from shoal.launch import LocalRanks

    if (run.launch.nodes or 1) > 1:
        nodes, devices = run.launch.nodes, run.launch.devices_per_node or "gpu"
        raise ShoalError(
            f"launch.nodes is {nodes}: start on each machine with `torchrun --nnodes {nodes} --nproc-per-node {devices} "
            f"--rdzv-backend c10d --rdzv-endpoint HOST:29400 -m shoal train …`"
        )
    ranks = LocalRanks(_devices(run), ["train", *argv], on_cpu=run.training.device == "cpu")

    def stop(number: int, frame: FrameType | None) -> None:
        ranks.stop(signal.SIGTERM)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return ranks.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _devices(run: Run) -> int:
    import torch

    there = torch.cuda.device_count() if run.training.device in ("auto", "cuda") else 0
    wanted = run.launch.devices_per_node
    if wanted is None and not there:
        raise ShoalError("launch.devices_per_node: there are no GPUs here to count; say how many processes there shall be")
    if wanted is not None and there and wanted > there:
        raise ShoalError(f"launch.devices_per_node is {wanted}, and there are {there} GPUs here")
    return wanted or there


def as_rank(here: Place, work: Callable[[], int]) -> int:
    """Do the work of one process among several. One that fails ends at once: cleaning up would wait for others that are gone."""
    from shoal.engines.world import lost
    from shoal.launch import LOST

    if here.file:
        _leave_with_standard_input()
    try:
        return work()
    except ShoalError as error:
        report(error)
        code = 2
    except Exception as error:
        if not lost(error):
            raise
        report(ShoalError(f"process {here.rank} of {here.size} has lost the others: one of them has ended"))
        code = LOST
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_with_standard_input() -> None:
    """The process that started this one holds the other end; when it is gone, so is this one."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="standard-input", daemon=True).start()
