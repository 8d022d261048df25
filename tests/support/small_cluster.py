"""A coordinator of a few numbers, workers that speak the real protocol, and a clock that the test turns."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shoal import strategies
from shoal.config.schema.strategy import Async, DiLoCo, Edp, SyncPs, WorkUnits
from shoal.config.schema.training import Training
from shoal.config.schema.updates import NoCodec, Updates
from shoal.coordinator import Coordinator
from shoal.coordinator.durable.contribution_files import ContributionFiles
from shoal.coordinator.effects import Effect, LedgerEntry, Note, Persist, Published, Reply, StopRun
from shoal.coordinator.events import RequestReceived, Tick
from shoal.coordinator.run_plan import ContributionScorer, RunPlan
from shoal.protocol.messages import PROTOCOL, Contribute, Join, WorkerRequest, header_of, parse
from shoal.strategies import Policies
from shoal.updates import codecs
from shoal.worker.session import WorkerSession

RATE = 0.25


class Numbers:
    """Plain gradient descent on a few numbers."""

    gradient_buffer: Tensor | None = None

    def __init__(self, size: int = 4) -> None:
        self.vector = torch.zeros(size)
        self.buffers = torch.empty(0)

    def apply(self, update: Tensor, buffers: Tensor, step: float, share: float) -> Mapping[str, float]:
        self.vector.sub_(RATE * (update * share))
        return {}


def strategy_of(settings: SyncPs | Edp | Async | DiLoCo | WorkUnits, expected: int = 1, *, polyak_alpha: float | None = None) -> Policies:
    """The policies of a strategy, as the strategies' own files pick them."""
    run: Any = SimpleNamespace(strategy=settings, updates=Updates(), training=Training(polyak_alpha=polyak_alpha))
    return strategies.policies_for(run, expected)


def contribution(epoch: int, position: int, base: int, loss: float = 1.0, **other: Any) -> Contribute:
    """What a worker learned from one batch; the protocol fills in its numbers."""
    made = Contribute("", 0, 0, base, 0, 1.0, 2, epoch, position, 1, -1, {"loss": loss})
    return made._replace(**other)


class Nameplate:
    """An identity that costs nothing, for a coordinator that believes it (`believing`): the same for every worker of a name."""

    def __init__(self, name: str | None) -> None:
        self.key = hashlib.sha256((name or secrets.token_hex(8)).encode()).hexdigest()

    def prove(self, purpose: str, name: str, nonce: str) -> str:
        return "0" * 128


def believing(coordinator: Coordinator) -> Coordinator:
    """Proofs are tested elsewhere, and take their time."""
    coordinator.authenticator.is_proved = lambda *claimed: True
    return coordinator


def nameplate(name: str | None) -> Any:
    return Nameplate(name)


class FakeWorker:
    """A worker that speaks, and computes nothing."""

    def __init__(self, name: str | None, instance: str = "", workers: int = 1) -> None:
        self.protocol = WorkerSession(name, {}, PROTOCOL, instance or f"instance of {name}", identity=nameplate(name), workers=workers)
        self.epoch = self.position = 0

    @property
    def name(self) -> str:
        return self.protocol.name

    @property
    def session(self) -> str:
        return self.protocol.session

    @property
    def seat(self) -> int:
        return self.protocol.seat

    @property
    def version(self) -> int:
        return self.protocol.have

    @version.setter
    def version(self, version: int) -> None:
        self.protocol.have = version

    @property
    def round(self) -> int:
        return self.protocol.round

    @round.setter
    def round(self, number: int) -> None:
        self.protocol.round = number

    @property
    def seq(self) -> int:
        return self.protocol.seq


class Cluster:
    """The coordinator with everything that it asked for carried out: answers, records, ledger, notes."""

    def __init__(
        self,
        strategy: Policies,
        expected: int = 1,
        *,
        updates: Updates | None = None,
        needed: int = 1,
        steps: int = 10**6,
        learner: Any = None,
        heartbeat_s: float = 5.0,
        receipt_key: bytes = b"",
        held_files: ContributionFiles | None = None,
        scorer: ContributionScorer | None = None,
    ) -> None:
        self.strategy, self.learner, self.updates = strategy, learner or Numbers(), updates or Updates()
        self.plan = RunPlan(self.updates, 0, expected, needed, steps, None, 8 * expected, heartbeat_s, 0.5, receipt_key=receipt_key)
        self.plan = self.plan._replace(pull_every=strategy.pull.every, held_files=held_files, scorer=scorer)
        self.coordinator = believing(Coordinator(self.plan, strategy, self.learner))
        self.now = 1000.0
        self.calls = 0
        self.answers: dict[int, Mapping[str, Any]] = {}
        self.frames: dict[int, Sequence[bytes | memoryview]] = {}
        self.records: list[tuple[dict[str, Any], tuple[bytes, ...]]] = []
        self.ledger: list[dict[str, Any]] = []
        self.published: list[Published] = []
        self.notes: list[str] = []

    def carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                assert effect.caller not in self.answers, "a request is answered once"
                self.answers[effect.caller], self.frames[effect.caller] = effect.header, effect.frames
            elif isinstance(effect, Persist):
                self.records.append((effect.record, tuple(bytes(frame) for frame in effect.frames)))
            elif isinstance(effect, LedgerEntry):
                self.ledger.append(effect.line)
            elif isinstance(effect, Published):
                self.published.append(effect)
            elif isinstance(effect, Note | StopRun):
                self.notes.append(effect.text if isinstance(effect, Note) else effect.reason)

    def ask(self, asked: WorkerRequest, frames: Sequence[bytes | memoryview] = ()) -> int:
        """The number of the call: its answer may come later."""
        self.calls += 1
        event = RequestReceived(self.calls, parse(header_of(asked)), frames, f"session-{self.calls}")
        self.carry_out(self.coordinator.handle(event, self.now))
        return self.calls

    def say(self, worker: FakeWorker, **other: Any) -> int:
        """What the worker's protocol has to say; the number of the call. `other`: fields that a worker of ours would not send."""
        question = worker.protocol.next_request(self.now)
        assert question is not None
        asked: Any = question.asked
        return self.ask(asked._replace(**other), question.frames)

    def hear(self, worker: FakeWorker, call: int) -> Mapping[str, Any]:
        answer = self.answers[call]
        worker.protocol.on_answer(answer, self.frames[call])
        return answer

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.coordinator.handle(Tick(), self.now))

    def ask_in(self, asked: Join) -> int:
        """Join as this says, with a proof; the number of the call."""
        plate = nameplate(asked.name)
        asked = asked._replace(key=asked.key or plate.key)
        nonce = self.answers[self.ask(asked)].get("nonce", "")
        return self.ask(asked._replace(nonce=nonce, proof=plate.prove("join", "", nonce)))

    def join(self, name: str | None, pull: bool = True, instance: str = "", workers: int = 1) -> FakeWorker:
        worker = FakeWorker(name, instance, workers)
        for _ in ("asked to prove", "let in"):
            self.hear(worker, self.say(worker))
        worker.epoch, worker.position = worker.protocol.place
        worker.protocol.ready = True
        if pull:
            self.pull(worker)
        return worker

    def pull(self, worker: FakeWorker) -> Mapping[str, Any]:
        worker.version = -1
        return self.hear(worker, self.say(worker))

    def contribute(self, worker: FakeWorker, value: float = 1.0, *, again: bool = False, frames: Any = None, **other: Any) -> int:
        """Send what the worker computed next; the number of the call. `again`: the last one once more."""
        protocol = worker.protocol
        if again:
            assert protocol.pending is not None
            protocol.pending.frames = protocol.pending.frames if frames is None else frames
            return self.say(worker, **other)
        worker.position += 1
        protocol.have = max(0, protocol.have)
        content = codecs.encode(self.updates.codec, torch.full_like(self.learner.vector, value), None) if frames is None else frames
        protocol.contribute(contribution(worker.epoch, worker.position, protocol.have, value), content, pulls=True)
        return self.say(worker, **other)

    def status(self, call: int) -> str | None:
        """What became of a contribution; None while its answer is held back."""
        answer = self.answers.get(call)
        return None if answer is None else answer.get("status") or answer.get("reason")

    def step(self, worker: FakeWorker, value: float = 1.0, **other: Any) -> str | None:
        """Send, and hear the answer."""
        call = self.contribute(worker, value, **other)
        if call in self.answers and "round" in self.answers[call]:
            self.hear(worker, call)
        return self.status(call)

    def beat(self, worker: FakeWorker) -> Mapping[str, Any]:
        return self.answers[self.ask(worker.protocol.heartbeat("computing", {}))]

    def leave(self, worker: FakeWorker) -> None:
        worker.protocol.pending = None
        worker.protocol.leave()
        self.hear(worker, self.say(worker))

    def recovered(self, records: Sequence[tuple[dict[str, Any], tuple[bytes, ...]]] | None = None) -> Cluster:
        """Another coordinator that has taken all records again; everything else about the old one is forgotten."""
        other = Cluster(self.strategy, self.plan.expected, updates=self.updates, needed=self.plan.needed, steps=self.plan.total_steps)
        other.now, other.calls = self.now, self.calls
        for record, frames in self.records if records is None else records:
            other.carry_out(other.coordinator.replayed.apply(record, frames))
        return other


def encoded(*values: float) -> tuple[memoryview, ...]:
    return codecs.encode(NoCodec(), torch.tensor(values), None)
