"""One call of `Coordinator.handle`, whether the run is over, and the replies to workers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from shoal.coordinator.durable.replayed_state import ReplayedState
from shoal.coordinator.effects import Effect, Persist, Reply, StopRun
from shoal.coordinator.members.table import Member, MemberTable
from shoal.coordinator.round_policies import CoordinatorPolicies
from shoal.coordinator.rounds.inner_steps import steps_for
from shoal.coordinator.rounds.weights_publisher import SubsetPublisher
from shoal.coordinator.run_plan import RunPlan
from shoal.coordinator.state import HeldReply, State
from shoal.protocol.messages import Frames

NO_WEIGHTS = -2
"""Sentinel for `have`: reply without weights."""


class Turn:
    """The time of an event, and the effects of handling it. `handle` makes one per event and passes it to every component."""

    __slots__ = ("_refused", "accepted", "effects", "now", "release_held", "replayed")

    def __init__(self, now: float, replayed: ReplayedState, refused: dict[str, int]) -> None:
        self.now, self.replayed, self._refused = now, replayed, refused
        self.effects: list[Effect] = []
        self.accepted: HeldReply | None = None
        """Reply to the contribution that this event brought. It is sent or held back once the rounds that are due have closed."""
        self.release_held = False
        """Whether replies that were held back may be due: a round closed, or the run was resumed or ended."""

    @property
    def state(self) -> State:
        return self.replayed.state

    def emit(self, *effects: Effect) -> None:
        self.effects += effects

    def record(self, record: dict[str, Any], frames: Frames = (), decoded: tuple[Tensor, Tensor] | None = None) -> None:
        """Write a record to the journal, and apply it. The state changes only by records."""
        self.effects.append(Persist(record, frames))
        self.effects += self.replayed.apply(record, frames, decoded)

    def stop(self, completion: RunCompletion, why: str) -> None:
        """End the run, which cannot continue."""
        completion.stopped = why
        self.effects.append(StopRun(why))
        self.release_held = True

    def refuse(self, caller: Any, reason: str, detail: str = "") -> None:
        self._refused[reason] = self._refused.get(reason, 0) + 1
        self.effects.append(Reply(caller, {"kind": "refused", "reason": reason, "detail": detail}))


class RunCompletion:
    """The run is over when its steps or batches are done, when no unit is left that could close a round, or when it was stopped."""

    def __init__(self, plan: RunPlan, replayed: ReplayedState) -> None:
        self.plan, self.replayed = plan, replayed
        self.total_steps = plan.total_steps
        self.stopped = ""
        """Why the run was stopped early; empty: it was not."""

    @property
    def finished(self) -> bool:
        plan, replayed = self.plan, self.replayed
        if replayed.all_units_settled and replayed.rounds.workers(replayed.state.version) < plan.needed:
            return True
        if plan.total_batches is None:
            return replayed.state.version >= self.total_steps or bool(self.stopped)
        return replayed.state.batches >= plan.total_batches or bool(self.stopped)

    @property
    def outcome(self) -> str:
        """How the run ended, for its workers; empty while it goes on."""
        return (self.stopped or "completed") if self.finished else ""

    def end_here(self) -> None:
        """Declare the run complete with the newest version."""
        self.total_steps = self.replayed.state.version


class CoordinatorContext(NamedTuple):
    """Collaborators that most components of a coordinator need."""

    plan: RunPlan
    policies: CoordinatorPolicies
    replayed: ReplayedState
    members: MemberTable
    completion: RunCompletion


class Replies:
    """Replies to workers: where the run stands, and the weights that the worker lacks."""

    def __init__(
        self,
        context: CoordinatorContext,
        publisher: SubsetPublisher,
        task_fields: Callable[[Member], dict[str, int]] | None = None,
    ) -> None:
        """`task_fields`: the fields that say which task a worker has, in runs with a scheduler."""
        self.plan, self.policies, _, self.members, self.completion = context
        self.publisher, self.task_fields = publisher, task_fields
        self.held: OrderedDict[str, HeldReply] = OrderedDict()
        """Replies held back until a round has closed, by session, longest waiting first."""

    def send(self, turn: Turn, caller: Any, header: dict[str, Any], worker: Member, have: int = NO_WEIGHTS) -> None:
        """Reply to a worker that has the weights of version `have`; -1: it has none."""
        fields, frames = self.publisher.since(worker.session, have) if have > NO_WEIGHTS else ({}, ())
        most_lag = self.policies.admission.most_lag(self.members.speed(worker))
        version, step = turn.state.version, turn.replayed.step
        done = self.completion.finished
        header = {**header, "version": version, "step": step, "done": done, "most_lag": most_lag, **fields}
        if done:
            header["outcome"] = self.completion.outcome
        if self.policies.contribution.takes_inner_steps and have > NO_WEIGHTS:
            worker.began_at = turn.now
            steps = steps_for(self.policies, self.plan, version, worker, self.members, turn.now)
            header["inner_steps"] = min(steps, turn.state.upstream.get("inner_steps", steps))
        if self.task_fields is not None:
            header |= self.task_fields(worker)
        turn.effects.append(Reply(caller, header, frames))
