"""A coordinator that serves over ZeroMQ in a thread, workers that are honest, and peers that are not."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.config.schema.strategy import Async, WorkUnits
from shoal.config.schema.updates import NoCodec, Updates
from shoal.coordinator import Coordinator
from shoal.coordinator.driver import CoordinatorDriver, DriverDeps, SnapshotContent
from shoal.coordinator.effects import Published
from shoal.coordinator.run_plan import MemberLimits, RunPlan
from shoal.coordinator.units.cut import DataCut
from shoal.protocol.identities import Identity
from shoal.protocol.messages import PROTOCOL, Gone, Join, SeatAssigned, header_of
from shoal.runs.folder.file_store import FileStore
from shoal.transports import Message
from shoal.transports.keys import new_token
from shoal.transports.zeromq import ZmqClient
from shoal.updates import codecs
from shoal.worker.session import ContributionReceipt, LeasedUnit, WorkerSession
from tests.support.servers import zmq_server
from tests.support.small_cluster import Numbers, contribution, strategy_of

TOKEN = new_token()
LIMIT = 1_000_000
PATIENCE_S = 60.0
SAMPLES, TOKENS = 4, 8
"""Samples of a batch, and tokens of a sample."""


class Live:
    """Two numbers are learned, of shards of 100 batches, or of units of one batch."""

    def __init__(
        self,
        folder: Path,
        bounds: MemberLimits = MemberLimits(),  # noqa: B008 - a tuple
        units: bool = False,
        clock: Callable[[], float] = time.monotonic,
        **server: Any,
    ) -> None:
        self.folder, self.bounds, self.units, self.clock, self.options = folder, bounds, units, clock, server
        self.notes, self.published_ones, self.clients = list[str](), list[Published](), list[ZmqClient]()
        self.begin(resume=False)

    def begin(self, resume: bool) -> None:
        learner, store = Numbers(2), FileStore(self.folder)
        plan = RunPlan(Updates(), 0, 1, 1, 10**6, None, 1, 1e6, 0.5)._replace(  # nobody here gives signs of life, or is missed for it
            samples_per_batch=SAMPLES, weight_per_sample=TOKENS, batches_per_shard=100, bounds=self.bounds
        )
        strategy = strategy_of(WorkUnits(batches_per_unit=1, units_per_update=1) if self.units else Async(max_staleness=1000))
        if self.units:
            plan = plan._replace(cut=DataCut(100, 1, 10), total_batches=1000, lease_s=1000.0, attempts=3, samples_per_epoch=400)
        self.coordinator = coordinator = Coordinator(plan, strategy, learner)
        self.server = zmq_server(**{"token": TOKEN, "max_frame_bytes": LIMIT} | self.options)

        def capture() -> SnapshotContent:
            return SnapshotContent(
                {"vector": learner.vector.clone()}, {"coordinator": coordinator.replayed.state_dict(), "ledger": store.ledger.length}
            )

        welcome = Message({"size": 2})
        around = DriverDeps(self.server, store, self.published, self.say, welcome, capture, self.clock, lambda: secrets.token_hex(16))
        self.driver = CoordinatorDriver(coordinator, around)
        if resume:
            snapshot = store.snapshots.newest(lambda text: None)
            assert snapshot is not None
            learner.vector.copy_(snapshot.weights["vector"])
            self.driver.recover(snapshot)
        self.driver.open()
        self._ending, self._orders = threading.Event(), queue.SimpleQueue[Callable[[], None]]()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ending.is_set():
            self.driver.step(0.05)
            while not self._orders.empty():
                self._orders.get()()

    def in_its_thread(self, work: Callable[[], None]) -> None:
        """Do something with the driver or the coordinator, which belong to the thread that serves."""
        done = threading.Event()
        self._orders.put(lambda: (work(), done.set())[0])
        self.server.wake()
        assert done.wait(PATIENCE_S)

    def end(self) -> None:
        """A client that is not closed would wait for its connection wherever Python happens to collect it."""
        for client in self.clients:
            client.close()
        self._stop()

    def _stop(self) -> None:
        self._ending.set()
        self.server.wake()
        self._thread.join()
        self.driver.close()
        self.server.close()

    def restart(self) -> None:
        self._stop()
        self.begin(resume=True)

    def published(self, version: Published, replaying: bool) -> None:
        self.published_ones.append(version)

    def say(self, text: str) -> None:
        self.notes.append(text)

    def client(self, **options: Any) -> ZmqClient:
        self.clients.append(ZmqClient(self.server.address, **{"token": TOKEN, "server_key": None, "max_frame_bytes": LIMIT} | options))
        return self.clients[-1]


class Honest:
    """A worker that does as it is told, with a key of its own."""

    def __init__(self, live: Live, name: str | None, identity: Identity | None = None, **options: Any) -> None:
        self.live, self.client = live, live.client(**options)
        self.protocol = WorkerSession(name, {}, PROTOCOL, secrets.token_hex(4), identity=identity)
        self.protocol.ready = True
        self.place = (0, 0)
        self.receipts: list[ContributionReceipt] = []
        self.unit: LeasedUnit | None = None
        """What it leased last."""
        self.say_all()

    def say_all(self) -> None:
        while (question := self.protocol.next_request(time.monotonic())) is not None:
            answer = self.client.call(Message(header_of(question.asked), tuple(question.frames)), PATIENCE_S)
            for event in self.protocol.on_answer(answer.header, answer.frames):
                if isinstance(event, SeatAssigned):
                    self.place = event[1:]
                elif isinstance(event, ContributionReceipt):
                    self.receipts.append(event)
                elif isinstance(event, LeasedUnit):
                    self.unit = event

    def lease(self) -> LeasedUnit:
        self.unit = None
        self.protocol.claim()
        self.say_all()
        assert self.unit is not None
        return self.unit

    def manage(self) -> str:
        """Do a unit, and say what became of its result."""
        unit = self.lease()
        made = contribution(unit.epoch, unit.start + unit.batches, self.protocol.have, samples=SAMPLES, unit=unit.number)
        self.protocol.contribute(made, codecs.encode(NoCodec(), torch.ones(2), None), pulls=False)
        self.say_all()
        return self.receipts[-1].status

    def fail(self) -> None:
        unit = self.lease()
        self.protocol.fail(unit.number, "broken")
        self.say_all()

    def step(self, **claims: Any) -> str:
        """Contribute, and say what became of it."""
        epoch, position = self.place
        self.place = (epoch, position + 1)
        made = contribution(*self.place, self.protocol.have, samples=SAMPLES, **claims)
        self.protocol.contribute(made, codecs.encode(NoCodec(), torch.ones(2), None), pulls=True)
        self.say_all()
        return self.receipts[-1].status

    def claim(self, **fields: Any) -> dict[str, Any]:
        """Say what no worker of ours would say: a contribution with these fields."""
        protocol = self.protocol
        protocol._number += 1
        made = contribution(0, self.place[1] + 1, protocol.have, samples=SAMPLES)._replace(
            session=protocol.session, number=protocol._number, seq=protocol.seq, have=-1
        )
        message = Message(header_of(made._replace(**fields)), tuple(codecs.encode(NoCodec(), torch.ones(2), None)))
        return self.client.call(message, PATIENCE_S).header

    def leave(self) -> None:
        self.protocol.pending = None
        self.protocol.leave()
        self.say_all()
        self.client.close()


def ask(client: ZmqClient, asked: Join | Gone) -> dict[str, Any]:
    return client.call(Message(header_of(asked)), PATIENCE_S).header


def proved(client: ZmqClient, asked: Join | Gone, identity: Identity) -> Join | Gone:
    """The question with the proof that the coordinator wants."""
    asked = asked._replace(key=identity.key)
    nonce = ask(client, asked)["nonce"]
    purpose = "join" if isinstance(asked, Join) else "gone"
    return asked._replace(nonce=nonce, proof=identity.prove(purpose, asked.name or "", nonce))
