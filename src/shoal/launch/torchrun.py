"""The processes that torchrun started, as the workers of a run: the first one coordinates, and each starts a worker, or its part of one.

Where an engine is one process, each is a worker; where it spans several, those of a machine (or of `launch.nodes` machines) form one.
The first process publishes the coordinator's address in torchrun's store. torchrun's restart count differs between machines, so it is not
used: each process asks under a random number, and is answered under that number. The store answers every user who can reach it. So on one
machine the token is not in it, and is read from the run's owner.json; between machines it is.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from shoal.config import Run
from shoal.config.ranks import RankPlace, rank_environment, without_rank_variables
from shoal.config.received import arguments_for
from shoal.config.schema.cluster import XmlRpc, Zmq
from shoal.engines import Rendezvous
from shoal.errors import ShoalError
from shoal.launch.engine_processes import GLOO, NCCL, on_loopback
from shoal.launch.local import LocalWorkers, factory_arguments, gpus_for, worker_names
from shoal.launch.waiting import wait_until
from shoal.runs.invitation import Invitation
from shoal.runs.owner import FILE as OWNER_FILE
from shoal.runs.owner import OwnerFile
from shoal.transports.addresses import parse

_PATIENCE_S = 1800.0
"""How long the others wait for the first one to begin and to end: it may load data and a model, and evaluate for long."""
_GOODBYE_S = 30.0
_LEAVE_S = 5.0
"""How long a worker may run after the end of the run: one that never found the coordinator would try for much longer."""
_POLL_INTERVAL_S = 0.1
_RUNS = itertools.count()
"""A program may train more than once, in all its processes alike."""


class TorchrunGroup:
    """This process and its place among all of them."""

    def __init__(self, run: Run, here: RankPlace) -> None:
        self.here, self.run = here, run
        if not isinstance(run.transport, (Zmq, XmlRpc)):
            raise ShoalError(
                f"transport.kind {run.transport.kind}: the processes of torchrun speak zmq or xmlrpc; start others with `shoal join`"
            )
        self.machines = int(os.environ.get("GROUP_WORLD_SIZE", here.nodes))
        self.per_worker = self._per_worker()
        self.workers = here.size // self.per_worker
        expected = run.cluster.num_workers
        if expected is not None and self.workers not in (expected, expected + run.coordinator.trains):
            raise ShoalError(f"cluster.num_workers is {expected}, and torchrun started {self.workers}")
        self.group, self.rank = divmod(here.rank, self.per_worker)
        self.name = worker_names(self.workers, run.cluster.workers)[self.group]
        self.number = next(_RUNS)
        self.start = ""
        """Name of this start of all processes, different from earlier ones. The first process chooses it."""
        self.rendezvous = Rendezvous(here._replace(group="fleet"))

    def _per_worker(self) -> int:
        """Processes that make up one worker."""
        settings, here = self.run.launch, self.here
        if self.run.engine.kind == "single":
            return 1
        if settings.devices_per_node not in (None, here.local_size):
            raise ShoalError(f"launch.devices_per_node is {settings.devices_per_node}, and torchrun started {here.local_size}")
        span = settings.nodes or 1
        if self.machines * here.local_size != here.size:
            raise ShoalError("torchrun started different numbers of processes on the machines: a worker has the same number on each")
        if self.machines % span:
            raise ShoalError(f"launch.nodes is {span}: {self.machines} machines cannot be divided into workers of {span} machines each")
        return span * here.local_size

    @property
    def first(self) -> bool:
        return self.here.rank == 0

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where the coordinator listens."""
        return ("127.0.0.1",) if self.machines == 1 else ("0.0.0.0",)

    # --- the first process -------------------------------------------------------------------------

    def run_begun_before(self) -> str | None:
        """The folder of the run, where torchrun has started the processes again since it began."""
        return self.rendezvous.get(f"begun {self.number}")

    def announce(self, invitation: Invitation, folder: Path) -> LocalWorkers:
        """Publish the coordinator's address and the run's folder. Return the worker that this process starts."""
        address, self.start = parse(invitation.address), secrets.token_hex(4)
        if self.machines > 1:
            address = address._replace(host=self.here.address)
        self.rendezvous.put(f"begun {self.number}", str(folder.absolute()))
        token = invitation.token if self.machines > 1 else ""  # torchrun's store gives every user of this machine what is in it
        answer = json.dumps([self.start, str(address), token, invitation.key, str(folder.absolute())])
        threading.Thread(target=self._answer, args=(answer,), name="fleet", daemon=True).start()
        return self._worker(invitation, folder)

    def _answer(self, answer: str) -> None:
        """Answer every process that asks, until all have the answer. A process that was killed asks again."""
        rendezvous, missing = Rendezvous(self.here._replace(group="fleet", hosted=True)), set(range(1, self.here.size))
        while missing:
            for rank in tuple(missing):
                asked = rendezvous.get(f"hello {self.number} {rank}")
                if asked is None:
                    continue
                if rendezvous.get(f"heard {asked}") == self.start:
                    missing.remove(rank)
                else:
                    rendezvous.put(f"answer {asked}", answer)
            time.sleep(_POLL_INTERVAL_S)

    def announce_end(self, summary: dict[str, Any]) -> None:
        """Publish the run's summary, and wait until the other processes have read it."""
        self.rendezvous.put(f"summary {self.start}", json.dumps(summary))
        others = range(1, self.here.size)
        wait_until(
            lambda: all(self.rendezvous.get(f"told {self.start} {rank}") is not None for rank in others), _GOODBYE_S, _POLL_INTERVAL_S
        )

    # --- the others --------------------------------------------------------------------------------

    def work(self, notify: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
        """Keep this process's worker running until the run is over; the run's folder and summary. Raises ShoalError."""
        asked = self.ask()
        while True:
            invitation, folder = self.answer_to(asked)
            self._keep(self._worker(invitation, folder), asked, notify)
            summary = self._outcome(asked)
            if summary is not None:
                return folder, summary

    def ask(self) -> str:
        """Ask the first process for the coordinator's address, under a random number. Return the number."""
        asked = secrets.token_hex(8)
        self.rendezvous.put(f"hello {self.number} {self.here.rank}", asked)
        return asked

    def answer_to(self, asked: str) -> tuple[Invitation, Path]:
        """How to join the coordinator, and the run's folder."""
        self.start, address, token, key, folder = json.loads(self.rendezvous.wait_for(f"answer {asked}", _PATIENCE_S))
        self.rendezvous.put(f"heard {asked}", self.start)
        if not token:
            owner = OwnerFile.read(Path(folder) / OWNER_FILE)
            token = owner.token if owner is not None else ""
        return Invitation(address, token, key), Path(folder)

    def _keep(self, started: LocalWorkers, asked: str, notify: Callable[[str], None]) -> None:
        """Keep a worker running until it ends, or its run is over, or the first process has been started again."""
        with closing(started):
            started.start()
            until = math.inf
            while not started.ended and time.monotonic() < until and not self.renewed(asked):
                started.look_after(notify)
                time.sleep(_POLL_INTERVAL_S)
                if until == math.inf and self.rendezvous.get(f"summary {self.start}") is not None:
                    until = time.monotonic() + _LEAVE_S

    def renewed(self, asked: str) -> bool:
        """Whether there is a newer answer: a first process that torchrun then restarted may have given the earlier one."""
        answer = self.rendezvous.get(f"answer {asked}")
        return answer is not None and json.loads(answer)[0] != self.start

    def _outcome(self, asked: str) -> dict[str, Any] | None:
        """The run's summary, as the first process has it; None where that has been started again. Raises ShoalError if it never comes."""
        until = time.monotonic() + _PATIENCE_S
        while not self.renewed(asked):
            text = self.rendezvous.get(f"summary {self.start}")
            if text is not None:
                self.rendezvous.put(f"told {self.start} {self.here.rank}", "")
                return json.loads(text)
            if time.monotonic() > until:
                raise ShoalError("the first process has not said how the run ended")
            time.sleep(_POLL_INTERVAL_S)
        return None

    # --- all ---------------------------------------------------------------------------------------

    def _worker(self, invitation: Invitation, folder: Path) -> LocalWorkers:
        """The worker process of this machine. The processes of an island are not started again here: torchrun starts them all together."""
        invited, gpus, several = invitation._asdict(), gpus_for(self.run), self.run.engine.several_processes
        trusted, modules = factory_arguments(self.run)
        environ = dict(modules or os.environ)
        if several:
            here = self.here._replace(rank=self.rank, size=self.per_worker, hosted=True, group=f"{self.start} {self.group}")
            environ = (on_loopback(GLOO, NCCL) if self.machines == 1 else {}) | environ | rank_environment(here)
        else:
            environ = without_rank_variables(environ)
            gpus = gpus[self.here.local_rank % len(gpus) :][:1] if gpus else []
        log = f"{self.name}-{self.rank}" if several else self.name
        arguments = [*trusted, *arguments_for(self.run)]
        return LocalWorkers(folder / "workers", invited, {self.name: arguments}, gpus, environ=environ, again=not several, log=log)
