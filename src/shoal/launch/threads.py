"""Workers as threads of this process. They share what the program has, such as its data, and each has a model of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.config import Run
from shoal.config.received import permissions_for
from shoal.errors import ShoalError
from shoal.files import make_folder
from shoal.runs.connections import JoinOptions
from shoal.runs.invitation import Invitation
from shoal.runs.live_objects import LiveObjects
from shoal.runs.worker_run import JoinedWorker

_PATIENCE_S, _LEAVING_S = 60.0, 10.0
"""How long a worker waits for an answer (the coordinator is slow when many join at once), and how long a leaving worker is waited for."""


class WorkerThread:
    """One worker, and what became of it."""

    def __init__(self, options: JoinOptions, live: LiveObjects, tell: Callable[[str], None]) -> None:
        self.options, self.live, self.tell = options, live, tell
        self.joined: JoinedWorker | None = None
        self.problem: BaseException | None = None
        self.noticed = self.stopping = False
        self.thread = threading.Thread(target=self._run, name=f"worker-{options.name}", daemon=True)

    @property
    def name(self) -> str:
        return self.options.name or "?"

    def _run(self) -> None:
        try:
            self.joined = JoinedWorker(self.options, self.tell)
            self.joined.prepare(live=self.live)
            if self.stopping:
                self.joined.stop()
            self.joined.work(tells_end=False)  # the program itself sees it
        except BaseException as problem:  # it is raised again where the run is waited for
            self.problem = problem

    def stop(self) -> None:
        self.stopping = True
        if self.joined is not None:
            self.joined.stop()


class WorkerThreads:
    """The workers of a run in this process."""

    def __init__(
        self, run: Run, folder: Path, invitation: Invitation, names: Sequence[str], live: LiveObjects, tell: Callable[[str], None]
    ) -> None:
        own = permissions_for(run)
        make_folder(folder)
        self.workers = [
            WorkerThread(
                JoinOptions(
                    *invitation,
                    name=name,
                    receipts=folder / f"{name}.jsonl",
                    state=folder / name,
                    patience_s=_PATIENCE_S,
                    permissions=own,
                ),
                live.copied(),
                tell,
            )
            for name in names
        ]

    def start(self) -> None:
        for worker in self.workers:
            worker.thread.start()

    def look_after(self, tell: Callable[[str], None], lost: Callable[[str], None]) -> None:
        """Tell of those that cannot work. Raises what went wrong in the program's own parts, and ShoalError when no worker is left."""
        for worker in self.workers:
            if worker.problem is None or worker.noticed:
                continue
            worker.noticed = True
            lost(worker.name)
            if not isinstance(worker.problem, ShoalError):
                raise worker.problem
            tell(f"warning: {worker.name} cannot work: {worker.problem}")
        if all(worker.noticed for worker in self.workers):
            raise ShoalError(f"no worker is left: {self.workers[0].problem}")

    def close(self) -> None:
        """Let them go, and see that they do."""
        for worker in self.workers:
            worker.stop()
        for worker in self.workers:
            if worker.thread.ident is not None:
                worker.thread.join(_LEAVING_S)
