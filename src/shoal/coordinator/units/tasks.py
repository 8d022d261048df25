"""Tasks: shares of the data that a scheduler assigns to workers as their seats.

Every epoch of a task is a piece: a range of the epoch's batches, in the order that all workers share. A piece is a seat: its worker learns
from its batches in order, and a worker that takes it over continues after the last accepted contribution. A worker that is done gets
another piece: one without a worker, or one whose worker is gone or stuck. In the last epoch, when no such piece is left, a piece is cut in
two. Otherwise the next epoch begins.

Decisions depend on what the coordinator knows now (members, speeds) and become records. A restarted coordinator replays the records and
decides nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.coordinator.effects import Note
from shoal.coordinator.members.table import Member
from shoal.coordinator.run_plan import TaskPlan
from shoal.coordinator.state import State, TaskPiece
from shoal.coordinator.turn import CoordinatorContext, Turn
from shoal.protocol.messages import Contribute
from shoal.scheduling import PendingTask, RemainingWork, WorkerSpec, lacking, worth_stealing
from shoal.scheduling.matching import estimate_speeds, fits

_STUCK_INTERVALS = 10
"""Usual intervals without a contribution after which a worker counts as stuck, and its piece goes to others."""
_KEPT_PIECES = 2
"""Contributions that a worker keeps when the rest of its piece is taken over: it computes them already."""
_MOST_PASSED = 3
"""Workers that may pass the end of a piece without an accepted contribution before the piece is given up."""


class PieceProgress(NamedTuple):
    """A piece, and how much of it is done."""

    number: int
    piece: TaskPiece
    next: int
    """The first batch that no accepted contribution has."""

    @property
    def left(self) -> int:
        return self.piece.end - self.next


class TaskAssigner:
    """Assigns pieces of tasks to workers."""

    def __init__(self, context: CoordinatorContext, tasks: TaskPlan) -> None:
        _, _, self.replayed, self.members, self.completion = context
        self.tasks = tasks
        self._passed: dict[int, set[str]] = {}
        """By piece: workers that passed its end without sending all of it."""
        self._warned: set[str] = set()

    @property
    def _state(self) -> State:
        return self.replayed.state

    def seat_for(self, name: str) -> int | None:
        """The piece of a worker that comes back; None: it has none."""
        return next((progress.number for progress in self._undone() if progress.piece.holder == name), None)

    def why_unfit(self, name: str) -> str:
        """Why a worker of this name can do no task of the run; empty: it can."""
        machine = self._declared(name)
        jobs = [PendingTask(task.id, 1.0, task.memory_gb) for task in self.tasks.tasks]
        if any(fits(job, machine) for job in jobs):
            return ""
        smallest = min(jobs, key=lambda job: job.memory_gb)
        return f"no task fits: {smallest.id} {lacking(smallest, [machine])}"

    def on_join(self, turn: Turn, worker: Member) -> None:
        """Assign a piece to a worker that joined and has none."""
        self.assign(turn, [worker])

    def begin(self, turn: Turn, worker: Member) -> bool:
        """Match a worker that is about to begin together with the others that have not begun, so that arrival order does not decide. Return
        whether it has a piece now: others may join within the scheduling interval."""
        waiting = [one for one in self.members.by_name.values() if self._is_fresh(one)]
        if worker not in waiting or self.completion.finished:
            return True
        complete = 1 < self.tasks.workers == len(self.members.by_name)
        if turn.now - worker.joined_at < self.tasks.interval_s and not complete:
            return False
        self.assign(turn, waiting)
        return True

    def has_piece(self, turn: Turn, worker: Member) -> bool:
        """Whether a worker has a piece to continue with, or can be given one now."""
        return True

    def is_assigned(self, worker: Member, asked: Contribute) -> bool:
        """Whether a contribution was made of the worker's own piece. A piece that others have finished is forgotten."""
        piece, begin = self._state.pieces.get(worker.seat), asked.position - asked.batches
        if piece is None:
            return False
        own = piece.holder == worker.name and asked.epoch == piece.epoch
        return own and piece.first <= begin and asked.position <= piece.end

    def move_on(self, turn: Turn, worker: Member, asked: Contribute) -> None:
        """Assign another piece to a worker whose contribution, accepted or not, ends its piece."""
        if self.completion.finished:
            return None
        piece = self._state.pieces.get(worker.seat)
        if piece is None or piece.holder != worker.name:
            return self.assign(turn, [worker])
        begin, ends = asked.position - asked.batches, (asked.epoch, asked.position) >= (piece.epoch, piece.end)
        if ends and (asked.epoch, begin) >= (piece.epoch, piece.end):
            self._pass(turn, worker)
        if ends or (self._is_beyond(piece.epoch) and self._can_go_back(turn)):
            self.assign(turn, [worker])
        return None

    def position_of(self, worker: Member) -> dict[str, int]:
        """The worker's piece and next batch, as fields of every reply, so that no change is missed."""
        progress = self._progress_of(worker.seat)
        if progress is None:
            return {}
        return {"seat": progress.number, "epoch": progress.piece.epoch, "position": progress.next, "until": progress.piece.end}

    def tick(self, turn: Turn) -> None:
        """Warn of tasks that fit no worker that is here."""
        machines = [self._declared(name) for name in self.members.by_name]
        for task in self.tasks.tasks:
            lack = lacking(PendingTask(task.id, 1.0, task.memory_gb), machines)
            text = f"warning: task {task.id} {lack}: it waits for a worker with more" if lack else ""
            if text and text not in self._warned:
                self._warned.add(text)
                turn.emit(Note(text))

    def table(self) -> list[dict[str, Any]]:
        """One row for each piece that is not done, for the user."""
        here = self.members.by_name
        return [
            {
                "task": self.tasks.tasks[progress.piece.task].id,
                "epoch": progress.piece.epoch,
                "batches": [progress.piece.first, progress.piece.end],
                "done": progress.next - progress.piece.first,
                "worker": progress.piece.holder if progress.piece.holder in here else "",
            }
            for progress in self._undone()
        ]

    @property
    def finished_pieces(self) -> int:
        return self._state.next_piece - sum(1 for _ in self._undone())

    def task_of(self, worker: Member) -> str:
        piece = self._state.pieces.get(worker.seat)
        return self.tasks.tasks[piece.task].id if piece is not None else ""

    # --- matching ----------------------------------------------------------------------------------

    def assign(self, turn: Turn, workers: Sequence[Member]) -> None:
        """Give each of these workers a piece. A piece that one of them has and has not begun may go to another of them."""
        names = {worker.name for worker in workers}
        machines = {machine.name: machine for machine in self._machines() if machine.name in names}
        left = {worker.name: worker for worker in workers}
        self._complete_epoch(turn)
        while left:
            for jobs in self._jobs(turn, names, left):
                match = self.tasks.match(jobs, [machines[name] for name in left])
                for name, (number, *_) in match.items():
                    self._give(turn, left.pop(name), int(number))
            for name in [name for name in left if self._steal(turn, left[name])]:
                del left[name]
            if left:
                self._open_epoch(turn)

    def _jobs(self, turn: Turn, names: set[str], left: Mapping[str, Member]) -> Iterator[list[PendingTask]]:
        """Free pieces for these workers, one epoch after the other, while some workers have none."""
        free = [progress for progress in self._undone() if self._is_free(turn, progress, names)]
        free = [progress for progress in free if self._passed.get(progress.number, set()).isdisjoint(left)]
        for epoch in sorted({progress.piece.epoch for progress in free}):
            if not left:
                return
            yield [self._job(progress) for progress in free if progress.piece.epoch == epoch]

    def _job(self, progress: PieceProgress) -> PendingTask:
        task, left = self.tasks.tasks[progress.piece.task], progress.left
        return PendingTask(
            str(progress.number), left * task.work, task.memory_gb, task.priority, left / self.tasks.grain * self.tasks.megabits
        )

    def _is_free(self, turn: Turn, progress: PieceProgress, names: set[str]) -> bool:
        """Whether a piece has no worker, or its worker is gone, stuck, or among the `names` that are being matched."""
        holder = self.members.by_name.get(progress.piece.holder)
        if holder is None or holder.seat != progress.number or holder.name in names:
            return True
        return self._is_stuck(turn, holder)

    def _is_fresh(self, worker: Member) -> bool:
        """Whether a worker has not begun, and no other worker has begun its piece."""
        return worker.name not in self.replayed.rounds.active and str(worker.seat) not in self._state.positions

    def _is_stuck(self, turn: Turn, worker: Member) -> bool:
        if worker.arrived_at is None or len(self.members.by_name) < 2:
            return False
        return turn.now - worker.arrived_at > max(self.members.timeout_s, _STUCK_INTERVALS * (worker.interval_s or 0.0))

    def _can_go_back(self, turn: Turn) -> bool:
        """Whether a piece of the run's own epochs is free, for a worker that computes beyond them."""
        return any(self._is_free(turn, progress, set()) and not self._is_beyond(progress.piece.epoch) for progress in self._undone())

    def _is_beyond(self, epoch: int) -> bool:
        return self.tasks.epochs is not None and epoch >= self.tasks.epochs

    def _give(self, turn: Turn, worker: Member, number: int) -> None:
        if worker.seat != number or self._state.pieces[number].holder != worker.name:
            worker.seat = number
            turn.record({"kind": "seated", "worker": worker.name, "seat": number})

    def _open_epoch(self, turn: Turn) -> None:
        """Begin the next epoch with the tasks that fit some worker that is here."""
        machines = [self._declared(name) for name in self.members.by_name]
        pieces = [
            [number, task.first, task.end]
            for number, task in enumerate(self.tasks.tasks)
            if not lacking(PendingTask(task.id, 1.0, task.memory_gb), machines)
        ]
        turn.record({"kind": "opened", "epoch": self._state.epochs, "pieces": pieces})
        self._passed = {number: names for number, names in self._passed.items() if number in self._state.pieces}

    def _complete_epoch(self, turn: Turn) -> None:
        """Add to the newest epoch the tasks that fitted no worker when it began and fit one that has joined since."""
        newest, machines = self._state.epochs - 1, [self._declared(name) for name in self.members.by_name]
        there = {piece.task for piece in self._state.pieces.values() if piece.epoch == newest}
        for number, task in enumerate(self.tasks.tasks):
            if newest >= 0 and number not in there and not lacking(PendingTask(task.id, 1.0, task.memory_gb), machines):
                turn.record({"kind": "added", "task": number, "epoch": newest, "first": task.first, "end": task.end})

    def _pass(self, turn: Turn, worker: Member) -> None:
        """Note that a worker passed the end of its piece and has not sent all of it: its gradients were not finite. Others may try."""
        names = self._passed.setdefault(worker.seat, set())
        names.add(worker.name)
        if len(names) >= _MOST_PASSED or names >= self.members.by_name.keys():
            turn.record({"kind": "passed", "seat": worker.seat})

    # --- stealing ----------------------------------------------------------------------------------

    def _steal(self, turn: Turn, worker: Member) -> bool:
        """In the last epoch: take over a part of another worker's piece; return whether that was worth it."""
        if self.tasks.epochs is None or self._state.epochs < self.tasks.epochs:
            return False
        speeds, machine = self._speeds(), self._declared(worker.name)
        held = {str(progress.number): progress for progress in self._undone() if self._may_be_cut(progress, machine)}
        burdens = [
            RemainingWork(
                number,
                progress.left // self.tasks.grain,
                self._piece_s(turn, progress.piece.holder, progress, speeds),
                _KEPT_PIECES * self._grains(progress.piece.holder),
            )
            for number, progress in held.items()
        ]
        if not burdens:
            return False
        own_s = self._piece_s(turn, worker.name, next(iter(held.values())), speeds)
        theft = worth_stealing(burdens, own_s)
        if theft is None:
            return False
        progress, number = held[theft.job], self._state.next_piece
        turn.record({"kind": "cut", "seat": progress.number, "at": progress.next + theft.keep * self.tasks.grain})
        self._give(turn, worker, number)
        return True

    def _may_be_cut(self, progress: PieceProgress, thief: WorkerSpec) -> bool:
        beyond, job = self._is_beyond(progress.piece.epoch), self._job(progress)
        return not beyond and progress.piece.holder not in ("", thief.name) and fits(job, thief)

    def _piece_s(self, turn: Turn, name: str, progress: PieceProgress, speeds: Mapping[str, float]) -> float:
        """Seconds that a worker takes for the batches of one usual contribution, at least by the time since its last one."""
        worker = self.members.by_name.get(name)
        usual = self.tasks.grain * self.tasks.tasks[progress.piece.task].work / speeds[name] if name in speeds else 1.0
        if worker is None or worker.arrived_at is None:
            return usual
        return max(usual, (turn.now - worker.arrived_at) / self._grains(name))

    def _grains(self, name: str) -> int:
        """Pieces that one contribution of a worker has: one, or as many as a relay has workers."""
        worker = self.members.by_name.get(name)
        return 1 if worker is None else max(1, worker.batches // self.tasks.grain)

    # --- progress and speeds ------------------------------------------------------------------------

    def _undone(self) -> Iterator[PieceProgress]:
        for number in self._state.pieces:
            progress = self._progress_of(number)
            if progress is not None and progress.left > 0:
                yield progress

    def _progress_of(self, number: int) -> PieceProgress | None:
        piece = self._state.pieces.get(number)
        if piece is None:
            return None
        gone = self._state.positions.get(str(number))
        return PieceProgress(number, piece, piece.first if gone is None else min(gone[1], piece.end))

    def _declared(self, name: str) -> WorkerSpec:
        claim = self.tasks.claims.get(name)
        return WorkerSpec(name) if claim is None else WorkerSpec(name, claim.flops or 1.0, claim.memory_gb, claim.bandwidth_mbps)

    def _speeds(self) -> dict[str, float]:
        """Work a second of each member. A relay that was not measured yet counts as its number of usual workers."""
        members, claims = self.members.by_name, self.tasks.claims
        claimed = {name: (claims[name].flops or 0.0) / one.workers if name in claims else None for name, one in members.items()}
        measured = {name: (self._measured(one) or 0.0) / one.workers for name, one in members.items()}
        return {name: speed * members[name].workers for name, speed in estimate_speeds(claimed, measured).items()}

    def _measured(self, worker: Member) -> float | None:
        """Work a second, from the smoothed time between a worker's contributions."""
        piece = self._state.pieces.get(worker.seat)
        if worker.rate is None or piece is None:
            return None
        return worker.rate * worker.batches * self.tasks.tasks[piece.task].work

    def _machines(self) -> list[WorkerSpec]:
        speeds, members = self._speeds(), self.members.by_name
        return [self._declared(name)._replace(speed=speeds[name], measured=members[name].rate is not None) for name in members]
