"""A worker in virtual time: the real protocol, the loop of a real worker, and no waiting."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, Protocol

from shoal.protocol.messages import PROTOCOL, Contribute, Message, WorkerRequest
from shoal.simulate.event_queue import EventQueue
from shoal.simulate.links import Link
from shoal.simulate.machines import SimulatedMachine
from shoal.simulate.worker_updates import EncodedUpdate, UpdateSource
from shoal.worker.sender import JOINING_PAUSE_S
from shoal.worker.session import (
    COMPUTING,
    FIRST_PAUSE_S,
    TOO_FAST,
    ContributionReceipt,
    Frames,
    LeasedUnit,
    RunNews,
    SeatAssigned,
    SessionEndedError,
    SessionEvent,
    SessionRequest,
    WorkerSession,
)
from shoal.worker.worker import WorkerPace, WorkerPolicies, may_overlap

_UNEVEN = 0.05
"""Steps of one machine differ so much: the sigma of their logarithms."""


class FreeIdentity:
    """An identity that costs nothing: who a worker is was never in doubt here."""

    def __init__(self, name: str) -> None:
        self.key = hashlib.sha256(name.encode()).hexdigest()

    def prove(self, purpose: str, name: str, nonce: str) -> str:
        return "0" * 128


class WorkerEnvironment(Protocol):
    """The world, as far as a worker must know it."""

    timeline: EventQueue
    policies: WorkerPolicies
    heartbeat_s: float

    def uneven(self, sigma: float) -> float: ...
    def call(self, worker: VirtualWorker, asked: WorkerRequest, frames: Frames, question: int) -> bool:
        """Send a question; whether it will arrive. The answer comes to the worker's `hear`, with the number of the question."""

    def patience_s(self, question: SessionRequest) -> float:
        """How long a worker waits for the answer to a question that arrives."""

    def pulse(self, worker: VirtualWorker) -> None:
        """Have the worker's signs of life arrive, one after the other, until it is gone."""

    def compute(self, worker: VirtualWorker, work_s: float, done: Callable[[], None]) -> None: ...
    def settled(self, worker: VirtualWorker, receipt: ContributionReceipt, work_s: float) -> None:
        """A contribution of the worker has an outcome, which took so many seconds to compute."""

    def wasted(self, work_s: float) -> None: ...


class VirtualWorker:
    """One stay of a machine. When the machine comes back, that is another one of the same name."""

    def __init__(self, world: WorkerEnvironment, machine: SimulatedMachine, link: Link, mind: UpdateSource, life: int) -> None:
        self.world, self.machine, self.link, self.mind = world, machine, link, mind
        plate: Any = FreeIdentity(machine.name)
        self.protocol = WorkerSession(machine.name, {}, PROTOCOL, f"life {life}", math.inf, plate)
        self.gone = self.finished = False
        self.conversing = self.computing = False
        self.unit: LeasedUnit | None = None
        self._events: list[SessionEvent] = []
        self._parcel: tuple[EncodedUpdate, float] | None = None
        """What was made and is not sent yet, with the seconds it took."""
        self._sent_s = 0.0
        self._steps = self._question = self._seating = 0
        self._step_s = self._round_trip_s = 0.0
        self._versions_per_step, self._most_lag = 1.0, math.inf
        self._version, self._asked_at = -1, 0.0

    # --- coming and going ----------------------------------------------------------------------------

    def come(self) -> None:
        self._say_all()
        self.world.timeline.after(self.machine.start_s * self.world.uneven(0.3), self._ready)
        self.world.pulse(self)

    def _ready(self) -> None:
        self.protocol.ready = True
        if not self.gone and not self.conversing:
            self._say_all()

    def vanish(self) -> None:
        """The machine is gone, without a word."""
        self.gone = True

    def hear_pulse(self, message: Message) -> None:
        """The answer to a sign of life."""
        self.protocol.on_heartbeat_answer(message.header)

    # --- the conversation ------------------------------------------------------------------------------

    def _say_all(self) -> None:
        """Say what there is to say; then go on with what was answered."""
        if self.gone:
            return
        now = self.world.timeline.now
        question = self.protocol.next_request(now)
        if question is None:
            self.conversing = False
            if self.protocol.have >= 0 or self.protocol.left:
                self._go_on()
            return
        if not self.conversing:
            self.conversing, self._asked_at = True, now
        self._question += 1
        arrives = self.world.call(self, question.asked, question.frames, self._question)
        self.world.timeline.after(self.world.patience_s(question) if arrives else FIRST_PAUSE_S, self._give_up, self._question)

    def _give_up(self, number: int) -> None:
        if number == self._question and not self.gone:
            retry = self.protocol.on_no_answer(self.world.timeline.now, "no answer")
            self._question += 1
            self.world.timeline.after(retry.pause_s * self.world.uneven(0.2), self._say_all)

    def hear(self, number: int, message: Message) -> None:
        if number != self._question or self.gone:
            return
        self._question += 1
        header = message.header
        try:
            self._events += self.protocol.on_answer(header, message.frames)
        except SessionEndedError:
            self.finished = True
            return
        pause_s = 0.0
        if header["kind"] == "refused" and (self.protocol.session or header.get("reason") == TOO_FAST):
            pause_s = (FIRST_PAUSE_S if self.protocol.session else JOINING_PAUSE_S) * self.world.uneven(0.2)
        elif self.protocol.session:
            self._round_trip_s = self.world.timeline.now - self._asked_at
        self.world.timeline.after(pause_s, self._say_all) if pause_s else self._say_all()

    def _go_on(self) -> None:
        """Everything was said and answered."""
        if self.computing:
            return  # what was answered is taken when the step is done
        if self._parcel is not None:
            self._send()
        elif not self.finished:
            self._settle()
            self._begin()

    # --- the work -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        protocol = self.protocol
        if protocol.done or protocol.left:
            self.finished = protocol.left or not protocol.session
            if not self.finished:
                protocol.leave()
                self._say_all()
            return
        if self.world.policies.feed.leased and self.unit is None:
            protocol.claim()
            self._say_all()
            return
        self.computing = True
        if self.unit is not None:
            self._learn_batch(self.unit, 0, self.world.timeline.now)
        elif self.mind.sync_delay and self.conversing:
            self._compute(self.mind.sync_delay, self._middle, self.world.timeline.now)
        else:
            self._walk(0, self.world.timeline.now)

    def _compute(self, batches: int, then: Callable[..., None], *given: Any) -> None:
        work_s = batches * self.machine.step_s * self.world.uneven(_UNEVEN)
        self.world.compute(self, work_s, lambda: None if self.gone else then(*given))

    def _middle(self, began: float) -> None:
        """The steps are done that may be taken before the last contribution is answered."""
        if self.conversing:
            self.world.timeline.after(self.machine.step_s / 4, lambda: None if self.gone else self._middle(began))
            return
        self._settle()
        self._walk(self.mind.sync_delay, began)

    def _walk(self, walked: int, began: float) -> None:
        """Learn from the weights there are now; that takes its time."""
        seating, have = self._seating, self.protocol.have
        batches = self.mind.begin(have)
        self._compute(max(1, batches - walked), self._walked, have, began, seating)

    def _walked(self, have: int, began: float, seating: int) -> None:
        self._made(self.mind.make(have, None) if seating == self._seating else None, began, seating)

    def _learn_batch(self, unit: LeasedUnit, done: int, began: float) -> None:
        """A unit is learned from batch by batch; it is left when nobody waits for its result any more."""
        if self.protocol.newest > unit.version:
            self.computing, self.unit = False, None
            self.world.wasted(self.world.timeline.now - began)
            self.protocol.give_back(unit.number)
            return self._say_all()
        if done < unit.batches:
            return self._compute(1, self._learn_batch, unit, done + 1, began)
        return self._made(self.mind.make(self.protocol.have, unit), began, self._seating)

    def _made(self, parcel: EncodedUpdate | None, began: float, seating: int) -> None:
        self.computing = False
        took_s = self.world.timeline.now - began
        self._step_s = took_s
        if parcel is None or seating != self._seating:
            self.world.wasted(took_s)
            self.unit = None
            return None if self.conversing else self._go_on()
        self._parcel = (parcel, took_s)
        return None if self.conversing else self._send()

    def _send(self) -> None:
        seating = self._seating
        self._settle()
        assert self._parcel is not None
        (parcel, took_s), self._parcel, unit, self.unit = self._parcel, None, self.unit, None
        if seating != self._seating or self.protocol.done:
            self.world.wasted(took_s)
            return self._begin()
        self._steps += 1
        self._sent_s = took_s
        epoch, position = self.mind.place()
        pulls = unit is None and self._steps % self.world.policies.pull.every == 0
        self.protocol.contribute(_contribution(parcel, epoch, position, unit), parcel.frames, pulls)
        pace = WorkerPace(self._round_trip_s, self._step_s, self._versions_per_step, self._most_lag)
        through = self.protocol.until is not None and position >= self.protocol.until  # what comes next is for the coordinator to say
        overlaps = not through and may_overlap(self.world.policies, self.mind.sync_delay, pace)
        self._say_all()
        if overlaps and self.conversing and not self.computing:
            self._begin()
        return None

    def _settle(self) -> None:
        """Take what was answered."""
        events, self._events, status = self._events, [], None
        for event in events:
            if isinstance(event, ContributionReceipt):
                status = event.status
                self.world.settled(self, event, self._sent_s)
            elif isinstance(event, RunNews):
                self._refresh(event, status)
            elif isinstance(event, LeasedUnit):
                self._lease(event)
            else:
                self._sit(event)

    def _sit(self, place: SeatAssigned) -> None:
        if not self.world.policies.feed.leased:
            self._seating += 1
            self.mind.sit(*place)

    def _lease(self, unit: LeasedUnit) -> None:
        if unit.version == self._version:
            self.unit = unit
        else:
            self.protocol.give_back(unit.number)

    def _refresh(self, news: RunNews, status: str | None) -> None:
        header = news.header
        if not news.afresh:
            passed = header["version"] - self._version
            self._versions_per_step = 0.8 * self._versions_per_step + 0.2 * max(1, passed / self.world.policies.pull.every)
        self._most_lag = header["most_lag"]
        if "weights" in header:
            self._version = header["version"]
        self.mind.on_answer(news, status)

    @property
    def doing(self) -> str:
        return COMPUTING if self.computing else "waiting"


def _contribution(parcel: EncodedUpdate, epoch: int, position: int, unit: LeasedUnit | None) -> Contribute:
    number = -1 if unit is None else unit.number
    return Contribute("", 0, 0, parcel.base, 0, parcel.weight, parcel.samples, epoch, position, parcel.batches, -1, parcel.metrics, number)
