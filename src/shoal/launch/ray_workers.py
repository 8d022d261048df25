"""Workers as actors of a Ray cluster that is there already, each with a placement group of its own.

Through Ray go strings: an invitation, arguments, what a worker printed. Weights and updates go between worker and coordinator, as always.
A worker whose node comes later waits for it; one whose node went is started again wherever Ray has room.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.config import Run
from shoal.config.plugins import as_arguments
from shoal.errors import ShoalError
from shoal.files import make_folder, open_file
from shoal.launch.local import USER_ERROR, last_line, pause_s
from shoal.launch.ray_actor import RayWorkerActor
from shoal.protocol.identities import Identity
from shoal.runs.invitation import Invitation

_CHECK_INTERVAL_S = 2.0
_PARTING_S, _FETCH_S = 10.0, 2.0


class RayWorker:
    """One worker, and the actor that runs it."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name, self.arguments = name, list(arguments)
        self.identity = Identity.new().secret
        """Its own key: it is the same worker on whatever node it is started again."""
        self.actor: Any = None
        self.group: Any = None
        self.outcome: Any = None
        """What becomes of the actor's work, some day."""
        self.log: Any = None
        """The end of its log, when it has been asked for."""
        self.started_at = self.restart_at = 0.0
        self.failed = ""
        self.done = False


def require_ray() -> Any:
    """The module. Raises ShoalError where it is not installed."""
    try:
        return import_module("ray")
    except ImportError:
        raise ShoalError("launch.kind ray needs Ray: pip install 'shoal[ray]'") from None


class RayWorkers:
    """The workers of a run on a Ray cluster."""

    def __init__(
        self, run: Run, folder: Path, invitation: Invitation, workers: Mapping[str, Sequence[str]], notify: Callable[[str], None]
    ) -> None:
        ray = require_ray()
        self.ray, self.folder, self.notify = ray, folder, notify
        self.settings, self.gpus = run.launch.ray, run.launch.devices_per_node or 0
        if run.training.device == "cpu":
            self.gpus = 0
        self.invitation = invitation
        self.workers = [RayWorker(name, arguments) for name, arguments in workers.items()]
        self._next_check_at = 0.0
        make_folder(folder)

    def start(self) -> None:
        """Reach the cluster and ask it for places. Raises ShoalError where there is no cluster."""
        if not self.ray.is_initialized():
            self._connect()
        for worker in self.workers:
            self._start(worker)

    def _connect(self) -> None:
        asked = signal.getsignal(signal.SIGTERM)  # Ray takes this signal for itself, and would end this process without saving the run
        try:
            self.ray.init(address=self.settings.address, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise ShoalError(f"launch.ray.address: there is no Ray cluster at {self.settings.address}: {error}") from None
        finally:
            with suppress(ValueError):  # only a process's main thread receives signals
                signal.signal(signal.SIGTERM, asked)

    def _start(self, worker: RayWorker) -> None:
        groups, strategies = import_module("ray.util.placement_group"), import_module("ray.util.scheduling_strategies")
        wanted = {"CPU": self.settings.cpus} | ({"GPU": float(self.gpus)} if self.gpus else {})
        worker.started_at, worker.restart_at = time.monotonic(), 0.0
        worker.group = groups.placement_group([wanted], strategy="SPREAD")
        place = strategies.PlacementGroupSchedulingStrategy(placement_group=worker.group, placement_group_bundle_index=0)
        remote = self.ray.remote(num_cpus=self.settings.cpus, num_gpus=self.gpus, max_concurrency=4, scheduling_strategy=place)(
            RayWorkerActor
        )
        worker.actor = remote.remote(worker.name, [*worker.arguments, *as_arguments()])
        worker.outcome = worker.actor.work.remote(json.dumps(self.invitation._replace(identity=worker.identity)._asdict()))

    def look_after(self, notify: Callable[[str], None], lost: Callable[[str], None] = lambda name: None) -> None:
        """Start workers again whose node went, or that died. Raises ShoalError when none is left."""
        now = time.monotonic()
        if now < self._next_check_at:
            return
        self._next_check_at = now + _CHECK_INTERVAL_S
        for worker in self.workers:
            if worker.done or worker.failed:
                continue
            if worker.restart_at:
                if now >= worker.restart_at:
                    self._start(worker)
                continue
            self._collect_log(worker)
            if self.ray.wait([worker.outcome], timeout=0)[0]:
                self._ended(worker, notify, lost)
        if self.workers and all(worker.failed for worker in self.workers):
            raise ShoalError(f"no worker is left: {self.workers[0].failed}")

    def _ended(self, worker: RayWorker, notify: Callable[[str], None], lost: Callable[[str], None]) -> None:
        try:
            code, said = self.ray.get(worker.outcome)
        except self.ray.exceptions.RayError as error:
            code, said = -1, f"Ray lost it ({type(error).__name__})"
        self._write(worker, said)
        self._give_back(worker)
        if code == 0:
            worker.done = True
            return
        lost(worker.name)
        if code == USER_ERROR:
            worker.failed = f"{worker.name}: {last_line(said)}"
            notify(f"warning: {worker.failed}")
            return
        worker.restart_at = time.monotonic() + pause_s(time.monotonic() - worker.started_at)
        notify(f"warning: {worker.name} ended: {last_line(said) if said.strip() else code}; starting it again")

    def _collect_log(self, worker: RayWorker) -> None:
        """Fetch what a worker has printed, without waiting for it."""
        if worker.log is None:
            worker.log = worker.actor.said.remote()
        elif self.ray.wait([worker.log], timeout=0)[0]:
            with suppress(self.ray.exceptions.RayError):  # its outcome tells more
                self._write(worker, self.ray.get(worker.log))
            worker.log = None

    def _write(self, worker: RayWorker, text: str) -> None:
        with open_file(self.folder / f"{worker.name}.log", "a", private=True) as file:
            file.write(text)

    def _give_back(self, worker: RayWorker) -> None:
        """Fetch a worker's receipts, and let its place go."""
        with suppress(self.ray.exceptions.RayError):  # its node may be gone, and the receipts with it
            receipts = self.ray.get(worker.actor.end.remote(), timeout=_FETCH_S)
            with open_file(self.folder / f"{worker.name}.jsonl", "a", private=True) as file:
                file.write(receipts)
        self.ray.kill(worker.actor)
        import_module("ray.util.placement_group").remove_placement_group(worker.group)
        worker.actor = worker.group = worker.log = None

    def close(self) -> None:
        """Ask the workers to leave, and give their places back."""
        started = [worker for worker in self.workers if worker.actor is not None]
        for worker in started:
            worker.actor.stop.remote()
        if started:
            self.ray.wait([worker.outcome for worker in started], num_returns=len(started), timeout=_PARTING_S)
        for worker in started:
            self._give_back(worker)
        self.ray.shutdown()
