"""A relay's task, which the coordinator above gave it, divided among the relay's workers.

The relay does its task block by block. A block is the next batches of the task: one piece for every worker that asks for work, so it grows
while workers come. The round closes when all of the block is in, whichever worker did it, and goes to the coordinator above as one
contribution. Holds: what a relay sends covers its task in order, without gaps, so that any other worker can continue it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.coordinator.events import UpstreamState
from shoal.coordinator.members.table import Member
from shoal.coordinator.run_plan import RunPlan, TaskPlan
from shoal.coordinator.turn import CoordinatorContext, Turn
from shoal.coordinator.units.tasks import PieceProgress, TaskAssigner


class RelayTaskAssigner(TaskAssigner):
    """Assigns pieces of the relay's current block to its workers."""

    def __init__(self, context: CoordinatorContext, tasks: TaskPlan) -> None:
        super().__init__(context, tasks)
        self.deadline_s = context.policies.rounds.deadline_s
        """Time after which a piece whose worker has not sent it goes to another worker."""
        self._given_at: dict[int, float] = {}

    def why_unfit(self, name: str) -> str:
        return ""

    def on_join(self, turn: Turn, worker: Member) -> None:
        """A worker gets a piece when it is ready: until then the block need not wait for it."""

    def begin(self, turn: Turn, worker: Member) -> bool:
        return self.has_piece(turn, worker)

    def assign(self, turn: Turn, workers: Sequence[Member]) -> None:
        """Give each of these workers a piece, as long as there are any."""
        for worker in workers:
            self.has_piece(turn, worker)

    def has_piece(self, turn: Turn, worker: Member) -> bool:
        if self.completion.finished:
            return True
        undone = list(self._undone())
        if any(progress.number == worker.seat and self._is_at_work(turn, worker, progress) for progress in undone):
            return True
        free = (progress.number for progress in undone if self._may_take(turn, worker, progress))
        number = next(free, None)
        if number is None:
            number = self._add_piece(turn, worker)
        if number is None:
            return False
        self._given_at[number] = turn.now
        self._give(turn, worker, number)
        return True

    def tick(self, turn: Turn) -> None:
        """Let workers that wait for the round do what its missing workers have not done. End a relay that cannot go on."""
        undone = list(self._undone())
        turn.release_held |= any(self._is_abandoned(turn, progress) for progress in undone)
        stands = not undone and not self.replayed.rounds.open and self.replayed.relayed is None and not self.completion.finished
        if stands and self._state.pieces and self._next_batch() >= self._task[2]:
            turn.stop(self.completion, "no worker of this relay has a finite gradient of the rest of its task: lower the learning rate")

    def _may_take(self, turn: Turn, worker: Member, progress: PieceProgress) -> bool:
        return worker.name not in self._passed.get(progress.number, ()) and self._is_abandoned(turn, progress)

    def _is_abandoned(self, turn: Turn, progress: PieceProgress) -> bool:
        holder = self.members.by_name.get(progress.piece.holder)
        return holder is None or holder.seat != progress.number or not self._is_at_work(turn, holder, progress)

    def _is_at_work(self, turn: Turn, holder: Member, progress: PieceProgress) -> bool:
        """Whether a worker may still send its piece: it has not passed the end, and the deadline has not passed."""
        since = max(self._given_at.setdefault(progress.number, turn.now), holder.arrived_at or 0.0)
        own = progress.piece.holder == holder.name and holder.name not in self._passed.get(progress.number, ())
        return own and turn.now - since < self.deadline_s

    def _add_piece(self, turn: Turn, worker: Member) -> int | None:
        """Make the next batches of the task a piece, for a worker that has sent nothing for this round; None: there are none."""
        first, (epoch, _, until) = self._next_batch(), self._task
        if self.replayed.relayed is not None or self.replayed.rounds.sent_by(worker.name, self._state.version) or first >= until:
            return None
        number, end = self._state.next_piece, min(until, first + self.tasks.grain * worker.workers)
        turn.record({"kind": "added", "task": 0, "epoch": epoch, "first": first, "end": end})
        self._given_at = {known: at for known, at in self._given_at.items() if known in self._state.pieces}
        self._passed = {known: names for known, names in self._passed.items() if known in self._state.pieces}
        return number

    def _next_batch(self) -> int:
        """The first batch of the task that is in no piece of the block."""
        return max([self._task[1], *(piece.end for piece in self._state.pieces.values())])

    @property
    def _task(self) -> Sequence[int]:
        return UpstreamState(**self._state.upstream).task


def task_assigner(context: CoordinatorContext, plan: RunPlan) -> TaskAssigner | None:
    """What assigns the tasks of a run, or of a relay's part of it; None: the run has no scheduler."""
    if plan.tasks is None:
        return None
    return TaskAssigner(context, plan.tasks) if plan.above is None else RelayTaskAssigner(context, plan.tasks)
