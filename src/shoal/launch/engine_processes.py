"""The processes of one engine on this machine: started together, watched, and ended together.

What the first one prints goes where this process prints; what the others say is kept, and its end is shown when one of them fails. Each
leaves when its standard input is closed, so none is left behind whatever happens to the process that started them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.config import Run
from shoal.config.load import Override
from shoal.config.ranks import RankPlace, rank_environment, rank_place
from shoal.errors import ShoalError
from shoal.files import open_file
from shoal.launch import forkserver
from shoal.launch.local import MOST_FAILURES, last_line, pause_s, shared_cores
from shoal.launch.volunteer.limits import let_leave
from shoal.launch.waiting import wait_until
from shoal.protocol.messages import PAUSED
from shoal.scheduling.task_stages import stage_shares
from shoal.transports.addresses import interface_of

LOST = 75
"""The exit code of a process that ended because another one did."""
NOT_FOUND = 76
"""The exit code of a process on a machine of its own that did not find the others."""
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Variables that name the interface on which a library listens, without passwords or encryption."""
_POLL_INTERVAL_S = 0.05
_PATIENCE_S = 5.0
_FOR_ALL = ("torch.distributed.checkpoint",)
_LIBRARIES = {"fsdp": ("shoal.engines.fsdp", "torch._dynamo")}
"""What all engines of several processes load beside the rest, and what one of them does: seconds, which the processes on the CPU spend
once, together. On GPUs each loads its own: no library may look for a GPU before a fork."""
ENDED = (0, 2, 130)
"""Exit codes of processes that finished, or that have reported themselves why they could not."""


class RankLost(ShoalError):
    """One of the processes was killed, or ended without an error message."""

    def __init__(self, what: str, killed: bool) -> None:
        super().__init__(what)
        self.killed = killed


class EngineProcesses(NamedTuple):
    """The processes of one worker on this machine."""

    size: int
    on_cpu: bool
    engine: str

    @classmethod
    def of(cls, run: Run, command: str, notify: Callable[[str], None], workers: int = 1) -> EngineProcesses | None:
        """For one of `workers` workers; None where it is a single process. The settings give their number, else the share of GPUs.

        Raises ShoalError; `command` is what to start where this machine is not enough.
        """
        import torch

        if not run.engine.several_processes:
            return None
        nodes, wanted, device = run.launch.nodes or 1, run.launch.devices_per_node or _stages(run), run.training.device
        if nodes > 1:
            raise ShoalError(
                f"launch.nodes is {nodes}: start on each machine with `torchrun --nnodes {nodes} --nproc-per-node {wanted or 'gpu'} "
                f"--rdzv-backend c10d --rdzv-endpoint HOST:29400 -m shoal {command} …`"
            )
        gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 0
        share = max(1, gpus // workers)
        if wanted is not None and gpus and wanted > share:
            shared = f" for {workers} workers" if workers > 1 else ""
            raise ShoalError(f"launch.devices_per_node is {wanted}, and there are {gpus} GPUs here{shared}")
        if wanted is None and not gpus:
            notify(f"{run.engine.kind} with one process, on the CPU: there is no GPU here (launch.devices_per_node says how many)")
        return cls(wanted or share, device in ("auto", "cpu") and not gpus, run.engine.kind)


def _stages(run: Run) -> int | None:
    """Stages of a pipeline: those that the tasks are, else one for each machine that the settings list, the server and its workers."""
    if run.placed:
        return len(stage_shares(run.scheduler.tasks))
    return run.cluster.num_workers + 1 if run.engine.kind == "pipeline" and run.alone and run.cluster.num_workers else None


def settings_from_start(run: Run, here: RankPlace | None, workers: int) -> list[Override]:
    """Settings that follow from the processes that were started, where they are not given: the length of a run depends on them."""
    given, facts = run.launch.devices_per_node, dict[str, int]()
    if run.engine.several_processes and given is None:
        processes = EngineProcesses.of(run, "train", lambda text: None, max(1, workers)) if here is None else None
        facts = {"launch.devices_per_node": here.local_size if here is not None else processes.size if processes is not None else 1}
    if run.engine.kind == "collectives" and here is not None and run.launch.nodes is None:
        facts["launch.nodes"] = here.nodes  # all machines are one worker, unless the settings say otherwise
    return [Override(path, str(value), "--workers" if here is None else "torchrun") for path, value in facts.items()]


def place_in_engine(run: Run) -> RankPlace | None:
    """Which of the engine's processes this is. None: it is alone, or has to start them. Raises ShoalError where the two do not fit."""
    here = rank_place()
    if here is None:
        return None
    if not run.engine.several_processes:
        if here.size > 1:
            engines = "ddp, fsdp, deepspeed or pipeline, or strategy.kind to one with workers"
            raise ShoalError(f"torchrun started {here.size} processes, and the engine single is one: set engine.kind to {engines}")
        return None
    for setting, wanted, found in (
        ("launch.devices_per_node", run.launch.devices_per_node, here.local_size),
        ("launch.nodes", run.launch.nodes, here.nodes),
    ):
        if wanted is not None and wanted != found:
            raise ShoalError(f"{setting} is {wanted}, and torchrun started {found}")
    if here.nodes == 1:
        for variable, interface in on_loopback(GLOO, NCCL).items():
            os.environ.setdefault(variable, interface)
    return here


def on_loopback(*variables: str) -> dict[str, str]:
    """The environment in which these libraries listen on 127.0.0.1 only."""
    found = interface_of("127.0.0.1")
    return dict.fromkeys(variables, found) if found else {}


class LocalRanks:
    """Processes of `shoal`, each with a rank."""

    def __init__(self, planned: EngineProcesses, arguments: Sequence[str], secret: str = "") -> None:
        """`secret`: a line for the first process alone, on its standard input."""
        (self.count, self.on_cpu, engine), self.arguments, self.secret = planned, list(arguments), secret
        self.libraries = (*_FOR_ALL, *_LIBRARIES.get(engine, ())) if self.on_cpu else ()
        self.processes: list[forkserver.ChildProcess] = []

    def run(self) -> int:
        """Start them and wait for their end; the exit code of the first. Raises ShoalError when one fails without a message of its own."""
        with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as folder:
            try:
                for rank in range(self.count):
                    self.processes.append(self._start(rank, Path(folder)))
                while all(process.poll() in (None, 0) for process in self.processes):
                    if all(process.poll() == 0 for process in self.processes):
                        return 0
                    time.sleep(_POLL_INTERVAL_S)
                return self._failed(Path(folder))
            finally:
                self._end()

    def _start(self, rank: int, folder: Path) -> forkserver.ChildProcess:
        here = RankPlace(rank, self.count, rank, self.count, file=str(folder / "meeting"))
        environ = on_loopback(GLOO, NCCL) | os.environ | rank_environment(here) | ({"DS_ACCELERATOR": "cpu"} if self.on_cpu else {})
        if "OMP_NUM_THREADS" not in environ:
            environ |= shared_cores(self.count)
        command = ["-m", "shoal", *self.arguments]
        with open_file(folder / f"{rank}.log", "wb", private=True) as log:
            output = None if rank == 0 else log
            # Ctrl-C reaches this process alone, which passes it on
            process = forkserver.start(command, stdout=output, stderr=output, env=environ, start_new_session=True, loads=self.libraries)
        if rank == 0 and self.secret:
            with contextlib.suppress(OSError):  # the process has ended already
                forkserver.write_line(process, self.secret)
        return process

    def pause(self, reason: str) -> None:
        """Let the first process leave for a while, with all others."""
        for process in self.processes:
            let_leave(process.pid)
        if self.processes and self.processes[0].poll() is None:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                forkserver.write_line(self.processes[0], json.dumps({"pause": reason.removeprefix(PAUSED)}))

    def stop(self, number: int) -> None:
        """Pass a signal on to one process. It informs the others, and all stop after the same step."""
        if self.processes and self.processes[0].poll() is None:
            self.processes[0].send_signal(number)

    def _failed(self, folder: Path) -> int:
        """A process has failed: wait until the others notice, end them, and find the one that failed first."""
        wait_until(self._have_ended, _PATIENCE_S, _POLL_INTERVAL_S)
        codes = [process.poll() for process in self.processes]
        guilty = [rank for rank, code in enumerate(codes) if code not in (None, 0, LOST)]
        rank = guilty[0] if guilty else next(rank for rank, code in enumerate(codes) if code)
        code = codes[rank] or 0
        if rank == 0 and code > 0:
            return code  # the process has reported the reason itself
        said = last_line(folder / f"{rank}.log").removeprefix("error: ") if rank else ""
        if code == 2:
            raise ShoalError(said)
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}: {said}"
        raise RankLost(f"process {rank} of {self.count} {how}; the others were ended", killed=code < 0)

    def _have_ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def _end(self) -> None:
        for process in self.processes:
            process.stdin.close()
        wait_until(self._have_ended, _PATIENCE_S, _POLL_INTERVAL_S)
        for process in self.processes:
            process.kill()
            process.wait()


class LocalIsland:
    """The processes of one worker. When one of them dies the others end, and all are started again. The run continues meanwhile."""

    def __init__(self, make: Callable[[], LocalRanks], notify: Callable[[str], None], gone: Callable[[], None] = lambda: None) -> None:
        """`gone` is called when the processes have ended and are to be started again."""
        self.make, self.notify, self.gone = make, notify, gone
        self.ranks: LocalRanks | None = None
        self.stopping = False

    def run(self) -> int:
        """Run the processes until the work is done; the exit code. Raises ShoalError when they fail again and again."""
        failures = 0
        while True:
            self.ranks, started = self.make(), time.monotonic()
            try:
                if (code := self.ranks.run()) in ENDED or self.stopping:
                    return code
                problem, failures = f"ended with code {code}", failures + 1
            except RankLost as error:
                if self.stopping:
                    return 1
                problem, failures = str(error), 0 if error.killed else failures + 1
            if failures >= MOST_FAILURES:
                raise ShoalError(f"the processes of this worker failed {failures} times in a row: {problem}")
            self.notify(f"warning: {problem}; starting all again")
            self.gone()
            time.sleep(pause_s(time.monotonic() - started))

    def stop(self, reason: str = "") -> None:
        """Ask the processes to leave soon; for a while, if the reason says so. Any thread may call this."""
        self.stopping = True
        if self.ranks is not None and reason.startswith(PAUSED):
            self.ranks.pause(reason)
        elif self.ranks is not None:
            self.ranks.stop(signal.SIGTERM)
