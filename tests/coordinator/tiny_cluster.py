"""A coordinator of a few numbers, workers that are three lines each, and a clock that the test turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shoal.config.schema.strategy import Async, DiLoCo, Edp, SyncPs
from shoal.config.schema.updates import NoCodec, Updates
from shoal.coordinator import Coordinator, Policy
from shoal.coordinator.effects import Effect, Entry, Note, Persist, Published, Reply, Stop
from shoal.coordinator.machine import Called, Plan, Tick
from shoal.strategies import asynchronous, diloco, edp, syncps
from shoal.updates import codecs
from shoal.updates.messages import PROTOCOL, Asked, Contribute, Heartbeat, Join, Leave, Pull, header_of, parse

RATE = 0.25


class Numbers:
    """Plain gradient descent on a few numbers."""

    def __init__(self, size: int = 4) -> None:
        self.vector = torch.zeros(size)
        self.buffers = torch.empty(0)

    def apply(self, update: Tensor, buffers: Tensor, step: float) -> Mapping[str, float]:
        self.vector.sub_(RATE * update)
        return {}


def policy_of(settings: SyncPs | Edp | Async | DiLoCo, expected: int = 1, *, polyak_alpha: float | None = None) -> Policy:
    """The policies of a strategy, as the strategies' own files pick them."""
    made = {"syncps": syncps.policy, "edp": edp.policy, "async": asynchronous.policy, "diloco": diloco.policy}[settings.kind]
    run: Any = SimpleNamespace(strategy=settings, updates=Updates(), training=SimpleNamespace(polyak_alpha=polyak_alpha))
    return made(run, expected)


@dataclass
class FakeWorker:
    """What a worker remembers."""

    name: str
    session: str = ""
    number: int = 0
    seq: int = 0
    version: int = -1
    round: int = 0
    seat: int = -1
    epoch: int = 0
    position: int = 0


class Cluster:
    """The coordinator with everything that it asked for carried out: answers, records, ledger, notes."""

    def __init__(
        self,
        policy: Policy,
        expected: int = 1,
        *,
        updates: Updates | None = None,
        needed: int = 1,
        steps: int = 10**6,
        learner: Any = None,
        heartbeat_s: float = 5.0,
    ) -> None:
        self.policy, self.learner, self.updates = policy, learner or Numbers(), updates or Updates()
        self.plan = Plan(self.updates, 0, expected, needed, steps, None, 8 * expected, heartbeat_s, 0.5)
        self.coordinator = Coordinator(self.plan, policy, self.learner)
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
                assert effect.caller not in self.answers, "nobody is answered twice"
                self.answers[effect.caller], self.frames[effect.caller] = effect.header, effect.frames
            elif isinstance(effect, Persist):
                self.records.append((effect.record, tuple(bytes(frame) for frame in effect.frames)))
            elif isinstance(effect, Entry):
                self.ledger.append(effect.line)
            elif isinstance(effect, Published):
                self.published.append(effect)
            elif isinstance(effect, Note | Stop):
                self.notes.append(effect.text if isinstance(effect, Note) else effect.reason)

    def ask(self, asked: Asked, frames: Sequence[bytes | memoryview] = ()) -> int:
        """The number of the call: its answer may come later."""
        self.calls += 1
        event = Called(self.calls, parse(header_of(asked)), frames, f"session-{self.calls}")
        self.carry_out(self.coordinator.handle(event, self.now))
        return self.calls

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.coordinator.handle(Tick(), self.now))

    def join(self, name: str | None, pull: bool = True) -> FakeWorker:
        answer = self.answers[self.ask(Join(name, PROTOCOL, {}))]
        worker = FakeWorker(answer["name"], answer["session"], seq=answer["last_seq"] + 1, seat=answer["seat"])
        worker.epoch, worker.position = answer["epoch"], answer["position"]
        if pull:
            self.pull(worker)
        return worker

    def pull(self, worker: FakeWorker) -> Mapping[str, Any]:
        worker.number += 1
        answer = self.answers[self.ask(Pull(worker.session, worker.number, worker.version))]
        worker.version = worker.round = answer["version"]
        return answer

    def contribute(self, worker: FakeWorker, value: float = 1.0, *, again: bool = False, frames: Any = None, **other: Any) -> int:
        """Send what the worker computed next; the number of the call. `again`: the last one once more."""
        worker.number += 1
        if not again:
            worker.position += 1
        fields: dict[str, Any] = {
            "session": worker.session,
            "number": worker.number,
            "seq": worker.seq - again,
            "base": max(0, worker.version),
            "round": worker.round - again,
            "weight": 1.0,
            "samples": 2,
            "epoch": worker.epoch,
            "position": worker.position,
            "batches": 1,
            "have": worker.version,
            "metrics": {"loss": value},
        }
        worker.seq, worker.round = worker.seq + (not again), worker.round + (not again)
        content = codecs.encode(self.updates.codec, torch.full_like(self.learner.vector, value), None) if frames is None else frames
        return self.ask(Contribute(**(fields | other)), content)

    def status(self, call: int) -> str | None:
        """What became of a contribution; None while its answer is held back."""
        answer = self.answers.get(call)
        return None if answer is None else answer.get("status") or answer.get("reason")

    def take(self, worker: FakeWorker, call: int) -> None:
        """The worker has heard the answer: it has the weights in it."""
        answer = self.answers[call]
        worker.version, worker.round = answer["version"], max(worker.round, answer["round"])

    def step(self, worker: FakeWorker, value: float = 1.0, **other: Any) -> str | None:
        """Send, and take the answer."""
        call = self.contribute(worker, value, **other)
        if call in self.answers and "round" in self.answers[call]:
            self.take(worker, call)
        return self.status(call)

    def beat(self, worker: FakeWorker) -> Mapping[str, Any]:
        worker.number += 1
        return self.answers[self.ask(Heartbeat(worker.session, worker.number, "computing"))]

    def leave(self, worker: FakeWorker) -> None:
        worker.number += 1
        self.ask(Leave(worker.session, worker.number))

    def recovered(self, records: Sequence[tuple[dict[str, Any], tuple[bytes, ...]]] | None = None) -> Cluster:
        """Another coordinator that has taken all records again; everything else about the old one is forgotten."""
        other = Cluster(self.policy, self.plan.expected, updates=self.updates, needed=self.plan.needed, steps=self.plan.total_steps)
        other.now, other.calls = self.now, self.calls
        for record, frames in self.records if records is None else records:
            other.carry_out(other.coordinator.replay(record, frames))
        return other


def encoded(*values: float) -> tuple[memoryview, ...]:
    return codecs.encode(NoCodec(), torch.tensor(values), None)
