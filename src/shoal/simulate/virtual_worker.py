"""A worker in virtual time: the real session and the real order of steps, with computing and sending replaced by delays."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from shoal.protocol.messages import EMPTY, PROTOCOL, Message, SeatAssigned
from shoal.simulate.coordinator_service import CoordinatorService
from shoal.simulate.event_queue import EventQueue
from shoal.simulate.links import Cores, Link
from shoal.simulate.machines import SimulatedMachine
from shoal.simulate.report import SimulationReport
from shoal.simulate.worker_updates import EncodedUpdate, UpdateSource
from shoal.worker.sender import JOINING_PAUSE_S
from shoal.worker.session import (
    COMPUTING,
    FIRST_PAUSE_S,
    TOO_FAST,
    ContributionReceipt,
    LeasedUnit,
    RunNews,
    SessionEndedError,
    SessionEvent,
    WorkerSession,
)
from shoal.worker.worker import WorkerPace, WorkerPolicies, may_overlap

_STEP_SIGMA = 0.05
"""Step times of one machine are log-normal with this sigma."""


class FreeIdentity:
    """An identity whose signature is a constant and takes no CPU time; the simulated coordinator does not verify it."""

    def __init__(self, name: str) -> None:
        self.key = hashlib.sha256(name.encode()).hexdigest()

    def prove(self, purpose: str, name: str, nonce: str) -> str:
        return "0" * 128


class WorkerDeps(NamedTuple):
    """Collaborators that all virtual workers of a run share."""

    timeline: EventQueue
    rng: random.Random
    service: CoordinatorService
    policies: WorkerPolicies
    heartbeat_s: float
    cores: Mapping[str, Cores]
    """By host: cores that its workers share."""
    report: SimulationReport
    confirmed: Counter[str]
    """By worker: contributions that were acknowledged to it as accepted."""


class VirtualWorker:
    """A worker during one stay of its machine. A machine that returns starts another worker of the same name."""

    def __init__(self, deps: WorkerDeps, machine: SimulatedMachine, link: Link, updates: UpdateSource, life: int) -> None:
        """`life`: number of the machine's stay."""
        self.machine, self.link, self.updates = machine, link, updates
        self._timeline, self._rng, self._service, self._policies = deps.timeline, deps.rng, deps.service, deps.policies
        self._heartbeat_s, self._cores = deps.heartbeat_s, deps.cores.get(machine.host)
        self._report, self._confirmed = deps.report, deps.confirmed
        identity: Any = FreeIdentity(machine.name)
        self.session = WorkerSession(machine.name, {}, PROTOCOL, f"life {life}", math.inf, identity)
        self.gone = self.finished = False
        self.awaiting_answer = self.computing = False
        self.unit: LeasedUnit | None = None
        self._events: list[SessionEvent] = []
        self._unsent: tuple[EncodedUpdate, float] | None = None
        """An update that is computed and not sent yet, and the seconds it took."""
        self._sent_s = 0.0
        self._contributions = self._request = self._seatings = 0
        self._step_s = self._round_trip_s = 0.0
        self._versions_per_step, self._most_lag = 1.0, math.inf
        self._version, self._asked_at = -1, 0.0

    # --- start and end --------------------------------------------------------------------------------

    def start(self) -> None:
        self._send_requests()
        self._timeline.after(self.machine.start_s * self._jitter(0.3), self._set_ready)
        self._schedule_heartbeat()

    def _set_ready(self) -> None:
        self.session.ready = True
        if not self.gone and not self.awaiting_answer:
            self._send_requests()

    def disappear(self) -> None:
        """The machine is switched off; the coordinator gets no message."""
        self.gone = True

    def _jitter(self, sigma: float) -> float:
        return self._rng.lognormvariate(0.0, sigma)

    def _schedule_heartbeat(self) -> None:
        self._timeline.at_in_order(self.link.heartbeat_arrival(self._timeline.now + self._heartbeat_s), self._heartbeat)

    def _heartbeat(self) -> None:
        """A heartbeat arrives at the coordinator."""
        if self.gone or self.finished:
            return
        if self.session.session:
            asked = self.session.heartbeat(COMPUTING if self.computing else "waiting", EMPTY)
            self._service.heartbeat(asked, lambda message: self.session.on_heartbeat_answer(message.header))
        self._schedule_heartbeat()

    # --- requests and answers -------------------------------------------------------------------------

    def _send_requests(self) -> None:
        """Send the session's next request; when there is none, continue with the work."""
        if self.gone:
            return
        now = self._timeline.now
        request = self.session.next_request(now)
        if request is None:
            self.awaiting_answer = False
            if self.session.have >= 0 or self.session.left:
                self._continue()
            return
        if not self.awaiting_answer:
            self.awaiting_answer, self._asked_at = True, now
        self._request += 1
        arrives = self._service.send(self.link, request.asked, request.frames, partial(self._on_answer, self._request))
        self._timeline.after(self._service.timeout_s(request) if arrives else FIRST_PAUSE_S, self._time_out, self._request)

    def _time_out(self, number: int) -> None:
        if number == self._request and not self.gone:
            retry = self.session.on_no_answer(self._timeline.now, "no answer")
            self._request += 1
            self._timeline.after(retry.pause_s * self._jitter(0.2), self._send_requests)

    def _on_answer(self, number: int, message: Message) -> None:
        if number != self._request or self.gone:
            return
        self._request += 1
        header = message.header
        try:
            self._events += self.session.on_answer(header, message.frames)
        except SessionEndedError:
            self.finished = True
            return
        pause_s = 0.0
        if header["kind"] == "refused" and (self.session.session or header.get("reason") == TOO_FAST):
            pause_s = (FIRST_PAUSE_S if self.session.session else JOINING_PAUSE_S) * self._jitter(0.2)
        elif self.session.session:
            self._round_trip_s = self._timeline.now - self._asked_at
        self._timeline.after(pause_s, self._send_requests) if pause_s else self._send_requests()

    def _continue(self) -> None:
        """No request is open: send the update that waits, or begin the next step."""
        if self.computing:
            return  # the answers are applied when the step is done
        if self._unsent is not None:
            self._contribute()
        elif not self.finished:
            self._apply_answers()
            self._begin()

    # --- computing ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        session, now = self.session, self._timeline.now
        if session.done or session.left:
            self.finished = session.left or not session.session
            if not self.finished:
                session.leave()
                self._send_requests()
            return
        if self._policies.feed.leased and self.unit is None:
            session.claim()
            self._send_requests()
            return
        self.computing = True
        if self.unit is not None:
            self._compute_unit(self.unit, 0, now)
        elif self.updates.sync_delay and self.awaiting_answer:
            self._compute(self.updates.sync_delay, self._after_sync_delay, now)
        else:
            self._compute_update(0, now)

    def _compute(self, batches: int, then: Callable[..., None], *arguments: Any) -> None:
        """Call `then` when this many batches are computed, unless the machine is gone by then."""
        machine, cores, began = self.machine, self._cores, self._timeline.now
        work_s = batches * machine.step_s * self._jitter(_STEP_SIGMA)

        def done() -> None:
            if not self.gone:
                then(*arguments)

        def sleep() -> None:
            passed_s = self._timeline.now - began
            self._report.computed_s += passed_s
            self._report.processor_s += work_s
            rest_s = (machine.slowdown - 1) * passed_s
            self._timeline.after(rest_s, done) if rest_s > 0 else done()

        if cores is not None:
            cores.compute(work_s, sleep)
        else:
            self._timeline.after(work_s, sleep if machine.slowdown > 1 else done)

    def _after_sync_delay(self, began: float) -> None:
        """The inner steps that overlap with sending are done: wait for the answer to the last contribution, then take the others."""
        if self.gone:
            return
        if self.awaiting_answer:
            self._timeline.after(self.machine.step_s / 4, self._after_sync_delay, began)
            return
        self._apply_answers()
        self._compute_update(self.updates.sync_delay, began)

    def _compute_update(self, steps_done: int, began: float) -> None:
        """Compute an update from the present weights."""
        seating, have = self._seatings, self.session.have
        batches = self.updates.begin()
        self._compute(max(1, batches - steps_done), self._update_computed, have, began, seating)

    def _update_computed(self, have: int, began: float, seating: int) -> None:
        self._finish_step(self.updates.make(have, None) if seating == self._seatings else None, began, seating)

    def _compute_unit(self, unit: LeasedUnit, done: int, began: float) -> None:
        """Compute a unit batch by batch; abandon it once its version is too old for its result to count."""
        if self.session.oldest > unit.version:
            self.computing, self.unit = False, None
            self._report.abandoned += 1
            self._count_wasted(self._timeline.now - began)
            self.session.give_back(unit.number)
            self._send_requests()
        elif done < unit.batches:
            self._compute(1, self._compute_unit, unit, done + 1, began)
        else:
            self._finish_step(self.updates.make(self.session.have, unit), began, self._seatings)

    def _finish_step(self, update: EncodedUpdate | None, began: float, seating: int) -> None:
        self.computing = False
        self._step_s = self._timeline.now - began
        if update is None or seating != self._seatings:
            self._count_wasted(self._step_s)
            self.unit = None
        else:
            self._unsent = (update, self._step_s)
        if not self.awaiting_answer:
            self._continue()

    def _count_wasted(self, work_s: float) -> None:
        self._report.work_s["wasted"] += work_s

    def _contribute(self) -> None:
        seating = self._seatings
        self._apply_answers()
        assert self._unsent is not None
        ((contribution, frames), took_s), self._unsent, unit, self.unit = self._unsent, None, self.unit, None
        if seating != self._seatings or self.session.done:
            self._count_wasted(took_s)
            self._begin()
            return
        self._contributions += 1
        self._sent_s = took_s
        pulls = unit is None and self._contributions % self._policies.pull.every == 0
        self.session.contribute(contribution, frames, pulls)
        pace = WorkerPace(self._round_trip_s, self._step_s, self._versions_per_step, self._most_lag)
        shard_done = self.session.until is not None and contribution.position >= self.session.until  # the coordinator decides what follows
        overlaps = not shard_done and may_overlap(self._policies, self.updates.sync_delay, pace)
        self._send_requests()
        if overlaps and self.awaiting_answer and not self.computing:
            self._begin()

    # --- answers --------------------------------------------------------------------------------------

    def _apply_answers(self) -> None:
        events, self._events, status = self._events, [], None
        for event in events:
            if isinstance(event, ContributionReceipt):
                status = event.status
                self._count_receipt(event)
            elif isinstance(event, RunNews):
                self._apply_news(event, status)
            elif isinstance(event, SeatAssigned):
                if not self._policies.feed.leased:
                    self._seatings += 1
                    self.updates.take_seat(*event)
            elif event.version == self._version:
                self.unit = event
            else:
                self.session.give_back(event.number)

    def _count_receipt(self, receipt: ContributionReceipt) -> None:
        accepted = receipt.status == "accepted"
        self._report.outcomes[receipt.status] += 1
        self._report.work_s["useful" if accepted else "wasted"] += self._sent_s
        self._confirmed[self.machine.name] += accepted

    def _apply_news(self, news: RunNews, status: str | None) -> None:
        header = news.header
        if not news.afresh:
            passed = header["version"] - self._version
            self._versions_per_step = 0.8 * self._versions_per_step + 0.2 * max(1, passed / self._policies.pull.every)
        self._most_lag = header["most_lag"]
        if "weights" in header:
            self._version = header["version"]
        self.updates.on_answer(news, status)
