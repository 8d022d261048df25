"""Tasks: shares of the data that workers have as their seats, one after the other, matched by a scheduler.

Every epoch of a task is a piece: a stretch of the epoch's batches, in the order that all workers share. A piece is a seat: whoever has it
learns from its batches one after the other, and a worker that takes it over goes on where the last accepted contribution ended. A worker
that is through is given another piece: one that nobody has, or whose worker is gone or stuck. In the last epoch, where no such piece is
left, one that somebody has is cut in two. Otherwise the next epoch begins.

Decisions are made from what the coordinator knows now (who is here, how fast they are), and become records; a coordinator that comes back
takes the records again, and decides nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from shoal.coordinator.effects import Effect, Note
from shoal.coordinator.members.table import Member, MemberTable
from shoal.coordinator.rounds.open_rounds import Rounds
from shoal.coordinator.state import State, TaskPiece, TaskPlan
from shoal.protocol.messages import Contribute
from shoal.scheduling import PendingTask, RemainingWork, WorkerSpec, lacking, worth_stealing
from shoal.scheduling.matching import estimate_speeds, fits

_STUCK_INTERVALS = 10
"""A worker that has sent nothing for so many of its usual intervals has its piece given to others."""
_KEPT_PIECES = 2
"""Contributions that a worker keeps when others take over the rest of its piece: it is at them already."""
_MOST_PASSED = 3
"""Workers that may go past the end of a piece without sending what they learned from it; then it is given up."""


class Owner(Protocol):
    """The coordinator, as far as tasks are concerned."""

    members: MemberTable
    rounds: Rounds
    now: float

    @property
    def state(self) -> State: ...
    @property
    def finished(self) -> bool: ...
    def record(self, record: dict[str, Any]) -> None: ...
    def emit(self, *effects: Effect) -> None: ...


class PieceProgress(NamedTuple):
    """A piece, and how far it is."""

    number: int
    piece: TaskPiece
    next: int
    """The first batch that nobody has learned from."""

    @property
    def left(self) -> int:
        return self.piece.end - self.next


class TaskAssigner:
    """Gives out pieces."""

    def __init__(self, coordinator: Owner, tasks: TaskPlan) -> None:
        self.coordinator, self.tasks = coordinator, tasks
        self._passed: dict[int, set[str]] = {}
        """Workers that went past a piece's end without sending all of it."""
        self._told: set[str] = set()

    @property
    def _state(self) -> State:
        return self.coordinator.state

    # --- what the machine asks ---------------------------------------------------------------------

    def seat_for(self, name: str) -> int | None:
        """The piece of a worker that comes back; None: one is still to be found."""
        return next((place.number for place in self._undone() if place.piece.holder == name), None)

    def unfit(self, name: str) -> str:
        """Why no task of the run can be done by a worker of this name, for people; empty: some can."""
        machine = self._claimed(name)
        jobs = [PendingTask(task.id, 1.0, task.memory_gb) for task in self.tasks.tasks]
        if any(fits(job, machine) for job in jobs):
            return ""
        return f"no task fits: {min(jobs, key=lambda job: job.memory_gb).id} {lacking(min(jobs, key=lambda job: job.memory_gb), [machine])}"

    def begin(self, worker: Member) -> None:
        """A worker is about to begin: match it and the others that have not, so that nobody has a piece only because it came first."""
        waiting = [one for one in self.coordinator.members.by_name.values() if self._is_fresh(one)]
        if worker in waiting:
            self._deal(waiting)

    def seat(self, worker: Member) -> None:
        """Find a piece for a worker that has none."""
        self._deal([worker])

    def is_at(self, worker: Member, asked: Contribute) -> bool:
        """Whether a contribution was made of what this worker has to do. A piece that others have finished is forgotten."""
        piece, begin = self._state.pieces.get(worker.seat), asked.position - asked.batches
        if piece is None:
            return False
        own = piece.holder == worker.name and asked.epoch == piece.epoch
        return own and piece.first <= begin and asked.position <= piece.end

    def move_on(self, worker: Member, asked: Contribute) -> None:
        """A worker has sent something, whatever became of it: where its piece ends with that, it is given another one."""
        if self.coordinator.finished:
            return None
        piece = self._state.pieces.get(worker.seat)
        if piece is None or piece.holder != worker.name:
            return self._deal([worker])
        begin, ends = asked.position - asked.batches, (asked.epoch, asked.position) >= (piece.epoch, piece.end)
        if ends and (asked.epoch, begin) >= (piece.epoch, piece.end):
            self._pass(worker)
        if ends or (self._is_beyond(piece.epoch) and self._can_go_back(worker)):
            self._deal([worker])
        return None

    def place(self, worker: Member) -> dict[str, int]:
        """Where a worker is to be: told with every answer, so that none is missed."""
        place = self._place(worker.seat)
        if place is None:
            return {}
        return {"seat": place.number, "epoch": place.piece.epoch, "position": place.next, "until": place.piece.end}

    def look_around(self) -> None:
        """Time has passed: name the tasks that fit nobody who is here."""
        machines = [self._claimed(name) for name in self.coordinator.members.by_name]
        for task in self.tasks.tasks:
            lack = lacking(PendingTask(task.id, 1.0, task.memory_gb), machines)
            text = f"warning: task {task.id} {lack}: it waits for a worker with more" if lack else ""
            if text and text not in self._told:
                self._told.add(text)
                self.coordinator.emit(Note(text))

    def table(self) -> list[dict[str, Any]]:
        """One row for each piece that is not done, for people."""
        here = self.coordinator.members.by_name
        return [
            {
                "task": self.tasks.tasks[place.piece.task].id,
                "epoch": place.piece.epoch,
                "batches": [place.piece.first, place.piece.end],
                "done": place.next - place.piece.first,
                "worker": place.piece.holder if place.piece.holder in here else "",
            }
            for place in self._undone()
        ]

    @property
    def finished(self) -> int:
        """Pieces that are done."""
        return self._state.next_piece - sum(1 for _ in self._undone())

    def task_of(self, worker: Member) -> str:
        piece = self._state.pieces.get(worker.seat)
        return self.tasks.tasks[piece.task].id if piece is not None else ""

    # --- matching ----------------------------------------------------------------------------------

    def _deal(self, workers: Sequence[Member]) -> None:
        """Give each of these workers a piece. What they have now and have not begun may go to another of them."""
        names = {worker.name for worker in workers}
        machines = {machine.name: machine for machine in self._machines() if machine.name in names}
        left = {worker.name: worker for worker in workers}
        while left:
            for jobs in self._jobs(names, left):
                match = self.tasks.match(jobs, [machines[name] for name in left])
                for name, (number, *_) in match.items():
                    self._give(left.pop(name), int(number))
            for name in [name for name in left if self._steal(left[name])]:
                del left[name]
            if left:
                self._open_epoch()

    def _jobs(self, names: set[str], left: Mapping[str, Member]) -> Iterator[list[PendingTask]]:
        """What these workers may have, one epoch after the other, for as long as some of them have nothing."""
        free = [place for place in self._undone() if self._is_free(place, names) and not self._is_shunned(place, left)]
        for epoch in sorted({place.piece.epoch for place in free}):
            if not left:
                return
            yield [self._job(place) for place in free if place.piece.epoch == epoch]

    def _job(self, place: PieceProgress) -> PendingTask:
        task, left = self.tasks.tasks[place.piece.task], place.left
        return PendingTask(
            str(place.number), left * task.work, task.memory_gb, task.priority, left / self.tasks.grain * self.tasks.megabits
        )

    def _is_free(self, place: PieceProgress, names: set[str]) -> bool:
        """Whether nobody has a piece, or only somebody who is gone, stuck, or to be given another one with these workers."""
        holder = self.coordinator.members.by_name.get(place.piece.holder)
        if holder is None or holder.seat != place.number or holder.name in names:
            return True
        return self._is_stuck(holder)

    def _is_shunned(self, place: PieceProgress, left: Mapping[str, Member]) -> bool:
        return any(name in self._passed.get(place.number, ()) for name in left)

    def _is_fresh(self, worker: Member) -> bool:
        """Whether a worker has not begun, and neither has anybody begun what it is to do."""
        return worker.name not in self.coordinator.rounds.active and str(worker.seat) not in self._state.positions

    def _is_stuck(self, worker: Member) -> bool:
        members, now = self.coordinator.members, self.coordinator.now
        if worker.arrived_at is None or len(members.by_name) < 2:
            return False
        return now - worker.arrived_at > max(members.timeout_s, _STUCK_INTERVALS * (worker.interval_s or 0.0))

    def _can_go_back(self, worker: Member) -> bool:
        """Whether something of the run's own epochs can be had again, for a worker that has gone beyond them."""
        return any(self._is_free(place, set()) and not self._is_beyond(place.piece.epoch) for place in self._undone())

    def _is_beyond(self, epoch: int) -> bool:
        return self.tasks.epochs is not None and epoch >= self.tasks.epochs

    def _give(self, worker: Member, number: int) -> None:
        if worker.seat != number or self._state.pieces[number].holder != worker.name:
            worker.seat = number
            self.coordinator.record({"kind": "seated", "worker": worker.name, "seat": number})

    def _open_epoch(self) -> None:
        """Let the next epoch begin, with the tasks that fit somebody who is here."""
        machines = [self._claimed(name) for name in self.coordinator.members.by_name]
        pieces = [
            [number, task.first, task.end]
            for number, task in enumerate(self.tasks.tasks)
            if not lacking(PendingTask(task.id, 1.0, task.memory_gb), machines)
        ]
        self.coordinator.record({"kind": "opened", "epoch": self._state.epochs, "pieces": pieces})
        self._passed = {number: names for number, names in self._passed.items() if number in self._state.pieces}

    def _pass(self, worker: Member) -> None:
        """A worker is past the end of its piece and has not sent all of it: its gradients were not finite. Others may try."""
        names = self._passed.setdefault(worker.seat, set())
        names.add(worker.name)
        if len(names) >= _MOST_PASSED or names >= self.coordinator.members.by_name.keys():
            self.coordinator.record({"kind": "passed", "seat": worker.seat})

    # --- stealing ----------------------------------------------------------------------------------

    def _steal(self, worker: Member) -> bool:
        """In the last epoch: take over a part of what somebody else has. Return whether that was worth it."""
        if self.tasks.epochs is None or self._state.epochs < self.tasks.epochs:
            return False
        speeds, machine = self._speeds(), self._claimed(worker.name)
        held = {str(place.number): place for place in self._undone() if self._may_be_cut(place, machine)}
        burdens = [
            RemainingWork(number, place.left // self.tasks.grain, self._piece_s(place.piece.holder, place, speeds))
            for number, place in held.items()
        ]
        if not burdens:
            return False
        own_s = self._piece_s(worker.name, next(iter(held.values())), speeds)
        theft = worth_stealing(burdens, own_s, _KEPT_PIECES)
        if theft is None:
            return False
        place, number = held[theft.job], self._state.next_piece
        self.coordinator.record({"kind": "cut", "seat": place.number, "at": place.next + theft.keep * self.tasks.grain})
        self._give(worker, number)
        return True

    def _may_be_cut(self, place: PieceProgress, thief: WorkerSpec) -> bool:
        beyond, job = self._is_beyond(place.piece.epoch), self._job(place)
        return not beyond and place.piece.holder not in ("", thief.name) and fits(job, thief)

    def _piece_s(self, name: str, place: PieceProgress, speeds: Mapping[str, float]) -> float:
        """How long a worker takes for one contribution to a piece. One that has been silent for longer than usual takes longer."""
        worker = self.coordinator.members.by_name.get(name)
        usual = self.tasks.grain * self.tasks.tasks[place.piece.task].work / speeds[name] if name in speeds else 1.0
        if worker is None or worker.arrived_at is None:
            return usual
        return max(usual, self.coordinator.now - worker.arrived_at)

    # --- what is known -----------------------------------------------------------------------------

    def _undone(self) -> Iterator[PieceProgress]:
        for number in self._state.pieces:
            place = self._place(number)
            if place is not None and place.left > 0:
                yield place

    def _place(self, number: int) -> PieceProgress | None:
        piece = self._state.pieces.get(number)
        if piece is None:
            return None
        gone = self._state.positions.get(str(number))
        return PieceProgress(number, piece, piece.first if gone is None else min(gone[1], piece.end))

    def _claimed(self, name: str) -> WorkerSpec:
        claim = self.tasks.claims.get(name)
        return WorkerSpec(name) if claim is None else WorkerSpec(name, claim.speed or 1.0, claim.memory_gb, claim.bandwidth_mbps)

    def _speeds(self) -> dict[str, float]:
        members = self.coordinator.members.by_name
        claims = {name: claim.speed if (claim := self.tasks.claims.get(name)) is not None else None for name in members}
        return estimate_speeds(claims, {name: self._measured(worker) for name, worker in members.items()})

    def _measured(self, worker: Member) -> float | None:
        """Work a second, from the smoothed time between a worker's contributions."""
        piece = self._state.pieces.get(worker.seat)
        if worker.rate is None or piece is None:
            return None
        return worker.rate * worker.batches * self.tasks.tasks[piece.task].work

    def _machines(self) -> list[WorkerSpec]:
        speeds, members = self._speeds(), self.coordinator.members.by_name
        return [self._claimed(name)._replace(speed=speeds[name], measured=members[name].rate is not None) for name in members]
