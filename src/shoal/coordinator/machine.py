"""The coordinator: `handle(event, now) -> effects`. It opens no file or socket, reads no clock and starts no thread.

`handle` makes one `Turn` and passes it down; the components never refer to the coordinator. A contribution goes through
`rounds/contributions` (accept or reject), `durable/replayed_state` (apply the record), `rounds/closing` (close due rounds) and
`rounds/weights_publisher` (the new weights). Holds: state changes only by records, and no reply confirms anything before its record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.coordinator.durable.replayed_state import ReplayedState
from shoal.coordinator.effects import Effect, Note, Reply
from shoal.coordinator.events import (
    Event,
    Interrupted,
    LeaseResult,
    RequestReceived,
    RunConcluded,
    ServingStarted,
    Tick,
    UnusableResult,
    UpstreamAnswered,
    UpstreamState,
    WorkerExited,
)
from shoal.coordinator.members.authentication import Authenticator
from shoal.coordinator.members.lifecycle import MemberLifecycle
from shoal.coordinator.members.table import Member, MemberTable
from shoal.coordinator.owner_commands import OwnerCommands
from shoal.coordinator.round_policies import CoordinatorPolicies
from shoal.coordinator.rounds.closing import RoundClosing
from shoal.coordinator.rounds.contributions import LONGEST_WAIT_S, ContributionHandler, refuse_older_call
from shoal.coordinator.rounds.plausibility import PlausibilityChecks
from shoal.coordinator.rounds.weights_publisher import MOST_SETS, SubsetPublisher
from shoal.coordinator.run_plan import WAITING_SEAT, Learner, RunPlan
from shoal.coordinator.state import State
from shoal.coordinator.turn import CoordinatorContext, Replies, RunCompletion, Turn
from shoal.coordinator.units.leasing import UnitLeasing
from shoal.coordinator.units.relayed_task import task_assigner
from shoal.errors import printable
from shoal.protocol.messages import (
    NO_TASK,
    Claim,
    Contribute,
    Fail,
    GiveBack,
    Gone,
    Heartbeat,
    Hold,
    Join,
    Leave,
    OwnerCommand,
    Pull,
    WorkerRequest,
)
from shoal.updates.expert_subsets import ExpertIds, format_expert_ids, size_of

_STUCK = "stuck"
"""Heartbeat state of a worker without progress for many leases; its heartbeat thread keeps running regardless."""


class Coordinator:
    """Holds the weights and decides which contributions enter them."""

    def __init__(self, plan: RunPlan, policies: CoordinatorPolicies, learner: Learner) -> None:
        self.plan, self.policies, self.learner = plan, policies, learner
        self.now = 0.0
        """The coordinator's own time: it never goes back."""
        self._clock: float | None = None
        self.refused: dict[str, int] = {}
        """Refused requests by reason."""
        self.replayed = replayed = ReplayedState(plan, policies, learner)
        self.rounds, self.publisher = replayed.rounds, replayed.publisher
        self.completion = completion = RunCompletion(plan, replayed)
        self.members = members = MemberTable(plan.heartbeat_interval_s, plan.bounds.sessions, plan.bounds.failures)
        members.known = self.state.seats
        context = CoordinatorContext(plan, policies, replayed, members, completion)
        self.authenticator = Authenticator(members, plan.bounds)
        subsets = SubsetPublisher(self.publisher, plan.experts)
        quorum = policies.rounds.expected_contributions(plan.expected)
        most_batches = plan.bounds.devices * max(1, plan.batches_per_step // max(1, quorum))
        self.checks = checks = PlausibilityChecks(plan, most_batches, self.refused)
        self.tasks = tasks = task_assigner(context, plan)
        """None in runs without a scheduler."""
        self.replies = replies = Replies(context, subsets, tasks.position_of if tasks else None)
        self.units = units = UnitLeasing(context, plan.cut, quorum, checks, replies) if plan.cut is not None else None
        """None in runs whose data is not leased in units."""
        self.lifecycle = lifecycle = MemberLifecycle(context, self.authenticator, units, tasks, replies)
        self.contributions = ContributionHandler(context, lifecycle, checks, units, tasks, replies)
        self.closing = RoundClosing(context)
        self.owner_commands = OwnerCommands(plan, self.authenticator, members, lifecycle)

    # --- events ------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Effects of an event, to be carried out in order. When the clock jumps back, the coordinator's time stands still."""
        if self._clock is not None and now > self._clock:
            self.now += now - self._clock
        self._clock = now
        turn, more = Turn(self.now, self.replayed, self.refused), False
        if isinstance(event, RequestReceived):  # by far the most events
            self._on_request(turn, event)
        else:
            more = self._on_event(turn, event)
        if self.rounds.open and not more and self.closing.close_due(turn) and self.units is not None:
            self.units.offer(turn)
        if self.units is not None:
            self._lease_units(turn, self.units, more)
        elif self.plan.needed > 1 and not (turn.state.paused or self.completion.finished):
            self.closing.watch_quorum(turn)
        if turn.accepted is not None or turn.release_held:
            self.contributions.reply(turn)
        return turn.effects

    def _on_event(self, turn: Turn, event: Event) -> bool:
        """Handle anything but a request. Return whether more events follow before a round may close."""
        match event:
            case Tick():
                self.lifecycle.tick(turn)
                self.contributions.reassure(turn)
                if self.tasks is not None and not turn.state.paused:
                    self.tasks.tick(turn)
            case LeaseResult():
                assert self.units is not None
                self.units.take(turn, event)
                return event.more
            case UnusableResult():
                assert self.units is not None
                self.units.return_unusable(turn, *event)
            case WorkerExited():
                self.lifecycle.remove_by_name(turn, event.name, "is gone")
            case ServingStarted():
                self.lifecycle.restore(turn)
                if turn.state.paused:
                    turn.emit(Note("the run is paused, as its owner wanted: `shoal resume` lets it go on"))
                if self.units is not None:
                    self.units.offer(turn)
            case Interrupted():
                self.completion.stopped = event.reason
                turn.release_held = True
            case RunConcluded():
                turn.emit(*self.replayed.write_off())
            case UpstreamAnswered():
                self._on_upstream_answer(turn, event)
        return False

    def _lease_units(self, turn: Turn, units: UnitLeasing, more: bool) -> None:
        units.expire(turn)
        if not more:
            units.offer_more(turn)
        units.answer_claims(turn, LONGEST_WAIT_S)
        for name, reason in units.take_blamed():  # last: it may remove the worker
            self.lifecycle.blame(turn, name, reason)

    # --- requests ----------------------------------------------------------------------------------

    def _on_request(self, turn: Turn, event: RequestReceived) -> None:
        asked = event.asked
        if event.guest and (refusal := self.authenticator.check_guest(event.guest)).reason:
            self.lifecycle.remove_guest(turn, event.guest)
            return turn.refuse(event.caller, *refusal)
        if isinstance(asked, OwnerCommand):
            return self.owner_commands.handle(turn, event, asked)
        if isinstance(asked, (Join, Gone)):
            return self.lifecycle.join(turn, event, asked) if isinstance(asked, Join) else self.lifecycle.on_gone(turn, event, asked)
        worker, beats = self.members.by_session.get(asked.session), isinstance(asked, Heartbeat)
        if worker is None:
            return turn.refuse(event.caller, "unknown-session")
        if asked.number <= worker.numbers[beats]:
            return turn.refuse(event.caller, "replayed")
        worker.numbers[beats] = asked.number
        self.members.touch(worker, turn.now)
        if worker.name in self.rounds.absent:
            self.rounds.activate(worker.name)
        if isinstance(asked, Heartbeat):  # most messages: the short path
            return self._on_heartbeat(turn, event.caller, asked, worker)
        return self._on_member_request(turn, event, asked, worker)

    def _on_member_request(self, turn: Turn, event: RequestReceived, asked: WorkerRequest, worker: Member) -> None:
        match asked:
            case Contribute():
                worker.received_bytes += sum(len(frame) for frame in event.frames)
                self.contributions.take(turn, event, asked, worker)
            case Pull():
                if self.tasks is not None and not self.tasks.begin(turn, worker):
                    return turn.refuse(event.caller, NO_TASK, "no part of the task is free yet")
                self.rounds.activate(worker.name)
                self.replies.send(turn, event.caller, {"kind": "weights"}, worker, asked.have)
            case Hold():
                self._hold_experts(turn, event.caller, tuple(asked.experts), worker)
            case Claim() | GiveBack() | Fail():
                self._on_unit_request(turn, event.caller, asked, worker)
            case Leave():
                self.lifecycle.leave(turn, worker, printable(asked.reason))
                self.replies.send(turn, event.caller, {"kind": "goodbye"}, worker)

    def _on_heartbeat(self, turn: Turn, caller: Any, asked: Heartbeat, worker: Member) -> None:
        worker.state, worker.figures = printable(asked.state), self.checks.figures(asked.figures)
        if self.units is not None and asked.state != _STUCK:
            self.units.leases.renew(worker.name, turn.now)
        # Only what a worker reads: heartbeats are by far the most messages.
        header: dict[str, Any] = {"kind": "pulse", "done": self.completion.finished}
        if self.units is not None:
            header["oldest"] = self.units.leases.oldest
        if header["done"]:
            header["outcome"] = self.completion.outcome
        if worker.warning:
            header["word"], worker.warning = worker.warning, ""
        turn.effects.append(Reply(caller, header))

    def _hold_experts(self, turn: Turn, caller: Any, experts: ExpertIds, worker: Member) -> None:
        """Let a worker take part with some of the experts: from now on it gets and sends the weights of these."""
        problem = self.checks.why_not_held(experts)
        if worker.name in self.rounds.active:
            problem = "it has begun with other weights: a worker says what it holds before it asks for weights"
        elif not problem and not self.replies.publisher.has_room_for(experts):
            problem = f"workers hold {MOST_SETS} different sets of experts already: take one of theirs"
        if problem:
            self.lifecycle.announce(turn, f"{worker.name} cannot hold experts {format_expert_ids(experts)}: {problem}")
            return turn.refuse(caller, "unfit", f"experts {format_expert_ids(experts)}: {problem}")
        assert self.plan.experts is not None
        worker.experts = experts
        self.replies.publisher.hold(worker.session, experts)
        self.lifecycle.announce(turn, f"{worker.name} holds experts {format_expert_ids(experts)} of {self.plan.experts.per_layer}")
        return self.replies.send(turn, caller, {"kind": "held", "size": size_of(self.plan.experts, experts)}, worker)

    def _on_unit_request(self, turn: Turn, caller: Any, asked: Claim | GiveBack | Fail, worker: Member) -> None:
        units = self.units
        if units is None or self.plan.leased_elsewhere:
            return turn.refuse(caller, "impossible", "this run has no units on lease here")
        if isinstance(asked, Claim):
            self.rounds.activate(worker.name)
            if (before := units.claim(turn, caller, asked, worker)) is not None:
                refuse_older_call(turn, before.caller)
            return None
        if isinstance(asked, GiveBack):
            units.leases.give_back(worker.name, asked.unit)
        elif units.fail(turn, worker, asked.unit, printable(asked.reason)):
            self.lifecycle.count_failure(turn, worker, printable(asked.reason))
        return self.replies.send(turn, caller, {"kind": "noted"}, worker)

    # --- a relay ------------------------------------------------------------------------------------

    def begin_below(self, upstream: UpstreamState) -> None:
        """Begin a relay's run with the weights of the coordinator above, which the learner has already."""
        self.state.upstream = upstream._asdict()
        self.state.next_piece = WAITING_SEAT + 1
        self.replayed.publish()

    def _on_upstream_answer(self, turn: Turn, event: UpstreamAnswered) -> None:
        """Make the weights of the coordinator above the next version here."""
        relayed = self.replayed.relayed
        assert relayed is not None, "an answer to nothing"
        closed = {name: relayed.record[name] for name in ("round", "contributions")}
        turn.record({"kind": "adopted", **closed, "status": event.status, "upstream": event.upstream._asdict()}, event.frames)
        if event.done:
            self.completion.end_here()
        turn.release_held = True

    # --- state ---------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self.replayed.state

    @property
    def finished(self) -> bool:
        return self.completion.finished

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.replayed.load_state_dict(dict(saved))
        self.members.known = self.state.seats

    def go_on_from(self, version: int, earlier: Mapping[str, Any]) -> None:
        """Continue another run at its version and at its place in the data. Its counts and receipts stay its own."""
        self.state.version = version
        state = earlier.get("state", {})
        self.state.positions, self.state.seats = dict(state.get("positions", {})), dict(state.get("seats", {}))
        self.members.known = self.state.seats
