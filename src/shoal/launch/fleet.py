"""The processes that torchrun started, as the workers of a run: the first one coordinates, too.

Where an engine is one process, each of them is a worker; where it spans several, those of a machine are (or of as many machines as
`launch.nodes` says); where workers meet in collectives, all of them are one to the coordinator. All they know of each other is what
torchrun's variables say; the rest they hear from the first one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from shoal.config import Run
from shoal.config.ranks import Place, environment_of, forget_place, of_several
from shoal.config.schema.cluster import Collectives, XmlRpc, Zmq
from shoal.engines import Meeting
from shoal.errors import ShoalError
from shoal.launch.local import gpus_of, names_for
from shoal.strategies.assembly import continued
from shoal.strategies.inviting import Invitation
from shoal.strategies.joining import Joined, Way, follow
from shoal.transports.addresses import parse

_PATIENCE_S = 1800.0
"""How long the others wait for the first one to begin: it may have data and a model to load from far away."""
_GOODBYE_S = 30.0


class Leaver(Protocol):
    """Who works here, and can be asked to stop."""

    def stop(self) -> None: ...


class Fleet:
    """This process among all of them."""

    def __init__(self, run: Run, here: Place) -> None:
        self.here, self.run = here, run
        if not isinstance(run.transport, (Zmq, XmlRpc, Collectives)):
            raise ShoalError(f"transport.kind {run.transport.kind}: the processes of torchrun speak zmq; start others with `shoal join`")
        per_worker = self._per_worker()
        self.workers = here.size // per_worker
        expected = here.size if run.transport.kind == "collectives" else self.workers
        if run.cluster.num_workers not in (None, expected):
            raise ShoalError(f"cluster.num_workers is {run.cluster.num_workers}, and torchrun started {expected}")
        group, rank = divmod(here.rank, per_worker)
        self.name = names_for(self.workers, run.cluster.workers)[group]
        own = here._replace(rank=rank, size=per_worker, hosted=True, group=f"island-{group}")
        self.island = own if of_several(run) else None
        """The place in the worker that this process belongs to; None: it is one by itself."""
        self.meeting = Meeting(here)
        self._settle()

    def _per_worker(self) -> int:
        """Processes that make up one worker."""
        settings, here = self.run.launch, self.here
        if self.run.transport.kind == "collectives":
            return here.size
        if self.run.engine.kind == "single":
            return 1
        if settings.devices_per_node not in (None, here.local_size):
            raise ShoalError(f"launch.devices_per_node is {settings.devices_per_node}, and torchrun started {here.local_size}")
        span = settings.nodes or 1
        if here.nodes % span:
            raise ShoalError(f"launch.nodes is {span}: {here.nodes} machines cannot be shared out among workers of so many")
        return span * here.local_size

    def _settle(self) -> None:
        """From now on this process, and what it starts, is one of its worker's processes."""
        gpus = gpus_of(self.run)
        if self.island is not None:
            os.environ.update(environment_of(self.island))
            return
        forget_place()
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[self.here.local_rank % len(gpus)]

    @property
    def first(self) -> bool:
        return self.here.rank == 0

    @property
    def leads(self) -> bool:
        """Whether it speaks for its worker."""
        return self.island is None or self.island.rank == 0

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where the coordinator listens."""
        return ("127.0.0.1",) if self.here.nodes == 1 else ("0.0.0.0",)

    def goes_on(self, run_dir: str | None) -> bool:
        """Whether torchrun has started the processes again, and there is a run to go on with."""
        if not self.here.restart:
            return False
        with contextlib.suppress(ShoalError):
            directory, _ = continued(self.run, run_dir, lambda text: None)
            folder = Path(self.run.coordinator.state_path or directory.path / "coordinator")
            return (folder / "secrets.json").exists()
        return False

    # --- the first process -------------------------------------------------------------------------

    def announce(self, invitation: Invitation, folder: Path) -> None:
        """Tell the others whom to join, and where the run's folder is."""
        address = parse(invitation.address)
        if self.here.nodes > 1:
            address = address._replace(host=self.here.address)
        self.meeting.say([json.dumps([str(address), *invitation[1:], str(folder.absolute())]).encode()])

    def end(self, summary: dict[str, Any]) -> None:
        """Tell the others what came of it, and wait until they have heard."""
        with contextlib.suppress(ShoalError):
            self.meeting.leave_word("summary", json.dumps(summary), [f"heard by {rank}" for rank in range(1, self.here.size)], _GOODBYE_S)

    # --- the others --------------------------------------------------------------------------------

    def work(self, tell: Callable[[str], None], working: list[Leaver]) -> None:
        """Until the run is over, or what stands in `working` is told to stop."""
        (words,) = self.meeting.hear(_PATIENCE_S)
        address, token, key, folder = json.loads(words)
        kept = Path(folder) / "workers"
        kept.mkdir(parents=True, exist_ok=True)
        way = Way(address, token, key, self.name, (), kept / f"{self.name}.jsonl", state=kept / self.name)
        if not self.leads:
            assert self.island is not None
            return follow(self.island, way)
        joined = Joined(way, tell)
        working.append(joined)
        tell(f"joined as {joined.name}")
        joined.prepare(here=self.island)
        joined.work()
        tell(f"{joined.name}: {joined.summary()}")
        joined.part()
        return None

    def outcome(self) -> dict[str, Any]:
        """The run's summary, as the first process has it."""
        summary: dict[str, Any] = json.loads(self.meeting.take_word("summary", f"heard by {self.here.rank}", _GOODBYE_S))
        return summary
