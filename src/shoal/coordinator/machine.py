"""The coordinator: `handle(event, now) -> effects`. It opens nothing, reads no clock, starts no thread.

Who takes part is the matter of `attendance`, what is taken of them that of `intake`, units and tasks those of `lending` and `tasking`.
What changes the weights goes through `record`: first it becomes a record, then the book takes the record. Nothing is confirmed before that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shoal.coordinator.durable.replayed_state import ReplayedState
from shoal.coordinator.effects import Effect, Frames, Note, Persist, Published, Reply, StopRun
from shoal.coordinator.members.authentication import Authenticator
from shoal.coordinator.members.lifecycle import MemberLifecycle
from shoal.coordinator.members.table import Member, MemberTable
from shoal.coordinator.owner_commands import OwnerCommands
from shoal.coordinator.policies import CoordinatorPolicies
from shoal.coordinator.rounds.closing import RoundClosing
from shoal.coordinator.rounds.contributions import LONGEST_WAIT_S, NO_WEIGHTS, ContributionHandler
from shoal.coordinator.rounds.inner_steps import steps_for
from shoal.coordinator.rounds.plausibility import PlausibilityChecks
from shoal.coordinator.rounds.weights_publisher import MOST_SETS, SubsetPublisher, WeightsPublisher
from shoal.coordinator.state import (
    Event,
    HeldReply,
    Interrupted,
    Learner,
    LeaseResult,
    RequestReceived,
    RunConcluded,
    RunPlan,
    ServingStarted,
    State,
    Tick,
    UnusableResult,
    UpstreamAnswered,
    UpstreamState,
    WorkerExited,
)
from shoal.coordinator.units.leasing import UnitLeasing
from shoal.coordinator.units.tasks import TaskAssigner
from shoal.errors import printable
from shoal.protocol.messages import Asked, Claim, Contribute, Fail, GiveBack, Gone, Heartbeat, Hold, Join, Leave, Order, Pull
from shoal.updates.expert_subsets import ExpertIds, format_expert_ids, size_of

_STUCK = "stuck"
"""What a worker says that has made no progress for many leases: the thread that gives signs of life goes on whatever happens."""


class Coordinator:
    """Holds the weights and decides what enters them."""

    def __init__(self, plan: RunPlan, policies: CoordinatorPolicies, learner: Learner) -> None:
        self.plan, self.policies, self.learner = plan, policies, learner
        self.book = ReplayedState(plan, policies, learner)
        self.rounds = self.book.rounds
        self.closing = RoundClosing(plan, policies, self.book)
        self.members = MemberTable(plan.heartbeat_interval_s, plan.bounds.sessions)
        self.members.known = self.state.seats
        self.door = Authenticator(self.members, plan.bounds)
        self.attendance = MemberLifecycle(self)
        self.publisher = WeightsPublisher(plan.updates.codec)
        self.publisher.publish(0, learner.vector, learner.buffers)
        self.parts = SubsetPublisher(self.publisher, plan.experts)
        contributions = policies.rounds.expected_contributions(plan.expected)
        self.lender = UnitLeasing(self, plan.cut, contributions) if plan.cut is not None else None
        """Where the data is leased in units."""
        self.tasks = TaskAssigner(self, plan.tasks) if plan.tasks is not None else None
        """Where a scheduler gives out shares of the data."""
        self.waiting: OrderedDict[str, HeldReply] = OrderedDict()
        """By session, longest first: who is answered when a round has closed."""
        self.stopped = ""
        self.refused: dict[str, int] = {}
        self.now = 0.0
        """Time as the coordinator sees it: it never goes back."""
        self.claims = PlausibilityChecks(plan, plan.bounds.devices * max(1, plan.batches_per_step // max(1, contributions)), self.refused)
        self.intake = ContributionHandler(self)
        self.orders = OwnerCommands(self)
        """What the run's owner wants."""
        self._clock: float | None = None
        self._effects: list[Effect] = []

    # --- events ------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What is to be done about an event. When the clock jumps back, time stands still for a moment and then goes on from there."""
        if self._clock is not None and now > self._clock:
            self.now += now - self._clock
        self._clock, self._effects = now, []
        more = False
        if isinstance(event, RequestReceived):  # by far the most
            self._answer(event)
        else:
            more = self._happen(event)
        if self.rounds.open and not more:
            self.close_what_is_due()
        if self.lender is not None:
            self._lend(self.lender, more)
        if self.plan.needed > 1 and not self.state.paused:
            self._watch_quorum()
        return self._effects

    def _happen(self, event: Event) -> bool:
        """Do what the event asks for. Return whether others follow that belong to it."""
        match event:
            case Tick():
                self.attendance.look_around()
                self.intake.reassure()
                if self.tasks is not None and not self.state.paused:
                    self.tasks.look_around()
            case LeaseResult():
                assert self.lender is not None
                self.lender.take(event)
                return event.more
            case UnusableResult():
                assert self.lender is not None
                self.lender.spoil(*event)
            case WorkerExited():
                self.lose(event.name, "is gone")
            case ServingStarted():
                self.attendance.recall()
                if self.state.paused:
                    self.emit(Note("the run is paused, as its owner wanted: `shoal resume` lets it go on"))
                if self.lender is not None:
                    self.lender.offer()
            case Interrupted():
                self.stop_for(event.reason)
            case RunConcluded():
                self.emit(*self.book.write_off())
            case UpstreamAnswered():
                self._adopt(event)
        return False

    def emit(self, *effects: Effect) -> None:
        self._effects += effects

    @property
    def state(self) -> State:
        return self.book.state

    @property
    def finished(self) -> bool:
        plan, state = self.plan, self.book.state
        if plan.cut is not None and self.closing.all_settled and self.rounds.workers(state.version) < plan.needed:
            return True  # what is left, if anything, will never be enough
        reached = state.version >= plan.total_steps if plan.total_batches is None else state.batches >= plan.total_batches
        return reached or bool(self.stopped)

    @property
    def step(self) -> float:
        """Where the schedule stands: updates made, or what the batches so far are worth."""
        return self.book.step

    def end_here(self) -> None:
        """The run is complete with the newest version: its data was read as often as it was to be."""
        self.plan = self.plan._replace(total_steps=self.state.version)

    def stop_for(self, reason: str) -> None:
        """End the run: a worker that asks from now on, or waits, is told so."""
        self.stopped = reason
        self.intake.release()

    # --- questions ---------------------------------------------------------------------------------

    def _answer(self, event: RequestReceived) -> None:
        asked = event.asked
        if event.guest and (refusal := self.door.welcomes(event.guest)).reason:
            self.attendance.show_out(event.guest)
            return self.refuse(event.caller, *refusal)
        if isinstance(asked, Order):
            return self.orders.hear(event, asked)
        if isinstance(asked, (Join, Gone)):
            return self.attendance.join(event, asked) if isinstance(asked, Join) else self.attendance.hear_of_end(event, asked)
        worker, beats = self.members.by_session.get(asked.session), isinstance(asked, Heartbeat)
        if worker is None:
            return self.refuse(event.caller, "unknown-session")
        if asked.number <= worker.numbers[beats]:
            return self.refuse(event.caller, "replayed")
        worker.numbers[beats] = asked.number
        self.members.hear(worker, self.now)
        if worker.name in self.rounds.absent:
            self.rounds.activate(worker.name)  # a sign of it: rounds wait for it again
        # Most of what a crowd says are signs of life, so they take the short way.
        return self._pulse(event.caller, asked, worker) if isinstance(asked, Heartbeat) else self._answer_member(event, asked, worker)

    def _answer_member(self, event: RequestReceived, asked: Asked, worker: Member) -> None:
        match asked:
            case Contribute():
                worker.received_bytes += sum(len(frame) for frame in event.frames)
                self.intake.take(event, asked, worker)
            case Pull():
                if self.tasks is not None:
                    self.tasks.begin(worker)
                self.rounds.activate(worker.name)
                self.answer(event.caller, {"kind": "weights"}, worker, asked.have)
            case Hold():
                self._hold(event.caller, tuple(asked.experts), worker)
            case Claim() | GiveBack() | Fail():
                self._answer_about_unit(event.caller, asked, worker)
            case Leave():
                self.attendance.remove(worker, f"left: {printable(asked.reason)}" if asked.reason else "left", left=True)
                self.answer(event.caller, {"kind": "goodbye"}, worker)

    def _hold(self, caller: Any, experts: ExpertIds, worker: Member) -> None:
        """A worker takes part with some of the experts. What it is sent, and what it may send, is of these from now on."""
        problem = self.claims.why_not_held(experts)
        if worker.name in self.rounds.active:
            problem = "it has begun with other weights: a worker says what it holds before it asks for weights"
        elif not problem and not self.parts.has_room_for(experts):
            problem = f"workers hold {MOST_SETS} different sets of experts already: take one of theirs"
        if problem:
            self.attendance.tell(f"{worker.name} cannot hold experts {format_expert_ids(experts)}: {problem}")
            return self.refuse(caller, "unfit", f"experts {format_expert_ids(experts)}: {problem}")
        assert self.plan.experts is not None
        worker.experts = experts
        self.parts.hold(worker.session, experts)
        self.attendance.tell(f"{worker.name} holds experts {format_expert_ids(experts)} of {self.plan.experts.per_layer}")
        return self.answer(caller, {"kind": "held", "size": size_of(self.plan.experts, experts)}, worker)

    def _pulse(self, caller: Any, asked: Heartbeat, worker: Member) -> None:
        worker.state, worker.figures = printable(asked.state), self.claims.figures(asked.figures)
        if self.lender is not None and asked.state != _STUCK:
            self.lender.renew(worker)
        # What a worker reads of the answer, and no more: there are many more signs of life than anything else.
        header: dict[str, Any] = {"kind": "pulse", "version": self.book.state.version, "done": self.finished}
        if worker.word:
            header["word"], worker.word = worker.word, ""
        self._effects.append(Reply(caller, header))

    def _answer_about_unit(self, caller: Any, asked: Claim | GiveBack | Fail, worker: Member) -> None:
        lender = self.lender
        if lender is None or lender.leases is None:
            return self.refuse(caller, "impossible", "this run has no units on lease here")
        if isinstance(asked, Claim):
            self.rounds.activate(worker.name)
            return self.intake.answer_no_longer(lender.claim(caller, asked, worker))
        if isinstance(asked, GiveBack):
            lender.give_back(worker, asked.unit)
        elif lender.fail(worker, asked.unit, printable(asked.reason)):
            self.attendance.count_failure(worker, printable(asked.reason))
        return self.answer(caller, {"kind": "noted"}, worker)

    def refuse(self, caller: Any, reason: str, detail: str = "") -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1
        self.emit(Reply(caller, {"kind": "refused", "reason": reason, "detail": detail}))

    def answer(self, caller: Any, header: dict[str, Any], worker: Member, have: int = NO_WEIGHTS) -> None:
        """Answer, with weights for a worker that has version `have`."""
        fields, frames = self.parts.since(worker.session, have) if have > NO_WEIGHTS else ({}, ())
        most_lag = self.policies.admission.most_lag(self.members.speed(worker))
        version = self.book.state.version
        header = {**header, "version": version, "step": self.book.step, "done": self.finished, "most_lag": most_lag, **fields}
        if self.policies.contribution.takes_inner_steps and have > NO_WEIGHTS:
            worker.began_at = self.now
            steps = steps_for(self.policies, self.plan, version, worker, self.members, self.now)
            header["inner_steps"] = min(steps, self.state.upstream.get("inner_steps", steps))
        if self.tasks is not None:
            header |= self.tasks.place(worker)
        self._effects.append(Reply(caller, header, frames))

    # --- rounds ------------------------------------------------------------------------------------

    def close_what_is_due(self) -> None:
        while self._may_close() and self.closing.due(self.state.version, self.now):
            number = self.state.version
            held = sorted(self.rounds.open[number].held)
            if (word := self.closing.judge(self.rounds.workers(number))) is not None:
                self.emit(word)
            if self.policies.rounds.waits_for_all:
                self.rounds.miss(number)
            kind = "closed" if self.plan.above is None else "combined"
            self.record({"kind": kind, "round": number, "contributions": [list(key) for key in held]})
            if self.lender is not None:
                self.lender.offer()
            self.intake.release()

    def _may_close(self) -> bool:
        return bool(self.rounds.open) and not (self.finished or self.state.paused) and self.book.upward is None

    def lose(self, name: str, why: str) -> None:
        """A worker takes part no longer, and has not said so itself: rounds that waited for it may close."""
        if (worker := self.members.by_name.get(name)) is not None:
            self.attendance.remove(worker, why)
            self.close_what_is_due()

    def go_on(self) -> None:
        """The run is not held up any more: rounds that are due close, and those who waited for that are answered."""
        self.close_what_is_due()
        self.intake.release()

    # --- a relay ------------------------------------------------------------------------------------

    def begin_below(self, upstream: UpstreamState) -> None:
        """Begin a relay's run with the weights of the coordinator above, which the learner has already."""
        self.state.upstream = upstream._asdict()
        self.publisher.publish(self.state.version, self.learner.vector, self.learner.buffers)

    def _adopt(self, event: UpstreamAnswered) -> None:
        """The coordinator above has answered: its weights are the next version here."""
        upward = self.book.upward
        assert upward is not None, "an answer to nothing"
        closed = {name: upward.record[name] for name in ("round", "contributions")}
        self.record({"kind": "adopted", **closed, "status": event.status, "upstream": event.upstream._asdict()}, event.frames)
        if event.done:
            self.end_here()
        self.intake.release()

    def _lend(self, lender: UnitLeasing, more: bool) -> None:
        lender.expire()
        if not more:
            lender.offer_more()
        lender.serve(LONGEST_WAIT_S)
        lender.blame()

    def _watch_quorum(self) -> None:
        if self.plan.cut is not None or self.finished:
            return
        word = self.closing.watch(self.state.version, self.now)
        if word is not None:
            self.emit(word)
        if isinstance(word, StopRun):
            self.stop_for(word.reason)

    # --- what survives -----------------------------------------------------------------------------

    def record(self, record: dict[str, Any], frames: Frames = (), decoded: tuple[Tensor, Tensor] | None = None) -> None:
        """Have a record kept, and move on by it."""
        self.emit(Persist(record, frames))
        self.emit(*self._publish(self.book.take(record, frames, decoded)))

    def _publish(self, effects: list[Effect]) -> list[Effect]:
        if any(isinstance(effect, Published) for effect in effects):
            span = self.plan.span(self.state.version - 1)
            self.publisher.publish(self.state.version, self.learner.vector, self.learner.buffers, span)
        return effects

    def replay(self, record: dict[str, Any], frames: Frames) -> list[Effect]:
        """Move on by a record that was kept before a crash."""
        return self._publish(self.book.take(record, frames))

    def state_dict(self) -> dict[str, Any]:
        """What a snapshot holds besides the learner."""
        return self.book.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.book.load_state_dict(dict(saved))
        self.members.known = self.state.seats
        self.publisher.publish(self.state.version, self.learner.vector, self.learner.buffers)

    def go_on_from(self, version: int, earlier: Mapping[str, Any]) -> None:
        """Continue another run at its version, with the data where that left it. What it counted and confirmed stays its own."""
        self.state.version = version
        state = earlier.get("state", {})
        self.state.positions, self.state.seats = dict(state.get("positions", {})), dict(state.get("seats", {}))
        self.members.known = self.state.seats

    def pending(self) -> list[tuple[dict[str, Any], Frames]]:
        """Records of contributions whose rounds are open: they belong to the journal that follows a snapshot."""
        return self.book.pending()
