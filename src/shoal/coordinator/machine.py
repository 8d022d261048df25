"""The coordinator: `handle(event, now) -> effects`. It opens nothing, reads no clock, starts no thread.

What changes the weights goes through `_take`: first it becomes a record, then the record is applied. A coordinator that was
killed is the last snapshot with the records since then taken again, in the same order, by the same code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.config.schema.updates import NoCodec, Updates
from shoal.coordinator.effects import Effect, Entry, Frames, Note, Persist, Published, Reply, Stop
from shoal.coordinator.membership import MOST_SESSIONS, Membership, Worker
from shoal.coordinator.policies import Barrier, Policy
from shoal.coordinator.publisher import Publisher
from shoal.updates import codecs, rules
from shoal.updates.messages import PROTOCOL, Asked, Contribute, Heartbeat, Join, Leave, Pull


class Learner(Protocol):
    """The weights, and what moves them."""

    @property
    def vector(self) -> Tensor: ...
    @property
    def buffers(self) -> Tensor:
        """Statistics that travel beside the weights."""
        ...

    def apply(self, update: Tensor, buffers: Tensor, step: float) -> Mapping[str, float]:
        """Move the weights, as at this step of the schedule. The update may be used up."""
        ...


class Plan(NamedTuple):
    """The run, as far as the coordinator must know it."""

    updates: Updates
    seed: int
    expected: int
    """Workers that the first round waits for."""
    needed: int
    """Contributions without which the aggregation rule cannot work."""
    total_steps: int
    total_batches: int | None
    """Batches to learn from; None: the steps count."""
    batches_per_step: int
    """Batches that an update is expected to be made of; it is what one step of the schedule is worth."""
    heartbeat_interval_s: float
    telemetry_alpha: float


class Called(NamedTuple):
    """A question of a worker, and whom to answer."""

    caller: Any
    asked: Asked
    frames: Frames = ()
    session: str = ""
    """For one who joins: the session to give it."""


class Tick(NamedTuple):
    """Time has passed."""


class Waiting(NamedTuple):
    """A worker that may not go on before a round has closed."""

    caller: Any
    have: int
    round: int
    since: float


@dataclass
class Held:
    """A contribution that waits for its round to close."""

    record: dict[str, Any]
    frames: Frames
    vector: Tensor
    buffers: Tensor


@dataclass
class State:
    """What survives: a snapshot holds it, and records move it on."""

    version: int = 0
    batches: int = 0
    samples: int = 0
    sequences: dict[str, int] = field(default_factory=dict)
    """The last number taken from each worker."""
    positions: dict[str, list[int]] = field(default_factory=dict)
    """Epoch and batch at which each seat goes on."""
    seats: dict[str, int] = field(default_factory=dict)
    made: dict[str, list[int]] = field(default_factory=dict)
    """The newest versions that a worker's own contributions went into."""
    contributions: dict[str, int] = field(default_factory=dict)


LONGEST_WAIT_S = 5.0
"""An answer is never held back longer: a worker that hears nothing may then take the connection for lost."""
_PLAIN = NoCodec()
_REMEMBERED = 256
"""Own versions of a worker that are remembered: more than it takes between two pulls."""


class Coordinator:
    """Holds the weights and decides what enters them."""

    def __init__(self, plan: Plan, policy: Policy, learner: Learner) -> None:
        self.plan, self.policy, self.learner = plan, policy, learner
        self.state = State()
        self.centre: Tensor | None = None
        self.members = Membership(plan.heartbeat_interval_s)
        self.members.seats = self.state.seats
        self.publisher = Publisher(plan.updates.codec)
        self.publisher.publish(0, learner.vector, learner.buffers)
        self.rounds: dict[int, dict[str, Held]] = {}
        self.opened_at: dict[int, float] = {}
        self.waiting: dict[str, Waiting] = {}
        """By session: who is answered when a round has closed."""
        self.gathering = True
        """Until the expected workers have come: at the start, and when a coordinator comes back."""
        self.gathering_since: float | None = None
        self.stopped = ""
        self.refused: dict[str, int] = {}
        self.now = float("-inf")
        self._noted = ""
        self._effects: list[Effect] = []

    # --- events ------------------------------------------------------------------------------------

    def handle(self, event: Called | Tick, now: float) -> list[Effect]:
        """What is to be done about an event. A clock that jumps back stands still."""
        self.now = max(now, self.now)
        self._effects = []
        if isinstance(event, Called):
            self._answer(event)
        else:
            self._evict_silent()
            self._release()
        self._close_what_is_due()
        return self._effects

    @property
    def finished(self) -> bool:
        total = self.plan.total_batches
        return bool(self.stopped) or (self.state.version >= self.plan.total_steps if total is None else self.state.batches >= total)

    @property
    def step(self) -> float:
        """Where the schedule stands: updates made, or what the batches so far are worth."""
        if self.plan.total_batches is None:
            return self.state.version
        return self.state.batches / self.plan.batches_per_step

    def stop(self, reason: str) -> list[Effect]:
        """End the run: who asks from now on is told so, and who waits too."""
        self._effects = []
        self.stopped = reason
        self._release()
        return self._effects

    def conclude(self) -> list[Effect]:
        """The run is over: what waits in rounds that will not close is written off, by name."""
        unused = [[name, held.record["seq"]] for there in self.rounds.values() for name, held in there.items()]
        self.rounds.clear()
        return [Entry({"unused": unused})] if unused else []

    def _answer(self, event: Called) -> None:
        asked = event.asked
        if isinstance(asked, Join):
            return self._join(event, asked)
        worker = self.members.by_session.get(asked.session)
        if worker is None:
            return self._refuse(event.caller, "unknown-session")
        beats = isinstance(asked, Heartbeat)
        if asked.number <= worker.numbers[beats]:
            return self._refuse(event.caller, "replayed")
        worker.numbers[beats] = asked.number
        worker.seen_at = self.now
        if isinstance(asked, Contribute):
            worker.received_bytes += sum(len(frame) for frame in event.frames)
            self._contribute(event, asked, worker)
        elif isinstance(asked, Pull):
            worker.active = True
            self._reply(event.caller, {"kind": "weights"}, worker, asked.have)
        elif isinstance(asked, Heartbeat):
            worker.state = asked.state
            self._reply(event.caller, {"kind": "pulse"}, worker)
        else:
            self._remove(worker, "left")
            self._reply(event.caller, {"kind": "goodbye"}, worker)

    def _refuse(self, caller: Any, reason: str, detail: str = "") -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1
        self._effects.append(Reply(caller, {"kind": "refused", "reason": reason, "detail": detail}))

    def _reply(self, caller: Any, header: dict[str, Any], worker: Worker, have: int = -2) -> None:
        """Answer, with weights for one who has version `have` (-2: none are wanted)."""
        fields, frames = self.publisher.since(worker.session, have) if have >= -1 else ({}, ())
        speed = self.members.speed(worker)
        common = {"version": self.state.version, "step": self.step, "done": self.finished, "most_lag": self.policy.most_lag(speed)}
        self._effects.append(Reply(caller, header | common | fields, frames))

    # --- members -----------------------------------------------------------------------------------

    def _join(self, event: Called, asked: Join) -> None:
        if asked.protocol != PROTOCOL:
            return self._refuse(event.caller, "protocol", f"the coordinator speaks version {PROTOCOL}: install the same version of shoal")
        if len(self.members.by_name) >= MOST_SESSIONS:
            return self._refuse(event.caller, "full")
        name = asked.name or self.members.free_name()
        before = self.members.by_name.get(name)
        if before is not None:
            self._remove(before, "came back")
        seat = self.members.free_seat(name)
        if self.state.seats.get(name) != seat:
            self._take({"kind": "seated", "worker": name, "seat": seat})
        worker = self.members.add(name, event.session, seat, dict(asked.about), self.now)
        if self.gathering_since is None:
            self.gathering_since = self.now
        welcome = {"kind": "welcome", "name": name, "session": event.session, "seat": seat}
        position = self.state.positions.get(str(seat), [0, 0])
        last = self.state.sequences.get(name, -1)
        self._reply(event.caller, welcome | {"epoch": position[0], "position": position[1], "last_seq": last}, worker)
        if before is None:
            self._effects.append(Note(f"{name} joined ({', '.join(asked.about.values())})" if asked.about else f"{name} joined"))

    def _remove(self, worker: Worker, why: str) -> None:
        self.members.remove(worker)
        self.publisher.forget(worker.session)
        waited = self.waiting.pop(worker.session, None)
        if waited is not None:
            self._refuse(waited.caller, "unknown-session")
        self._effects.append(Note(f"{worker.name} {why}"))

    def _evict_silent(self) -> None:
        for worker in self.members.silent(self.now):
            self._remove(worker, f"is taken for dead: silent for {self.now - worker.seen_at:.0f} s")

    # --- contributions -----------------------------------------------------------------------------

    def _contribute(self, event: Called, asked: Contribute, worker: Worker) -> None:
        worker.arrive(self.now, self.plan.telemetry_alpha)
        if asked.seq <= self.state.sequences.get(worker.name, -1):
            return self._receipt(event.caller, worker, asked, "accepted", repeated=True)
        if asked.base > self.state.version or not worker.active:
            return self._refuse(event.caller, "impossible", "an update of weights that were never sent")
        worker.lag = self._lag(worker, asked.base)
        share = self.policy.admission(worker.lag, self.members.speed(worker))
        problem = "finished" if self.finished else self._too_late(asked) or ("stale" if share <= 0 else "")
        if problem:
            worker.rejected += 1
            self._count(problem)
            return self._receipt(event.caller, worker, asked, problem)
        try:
            vector, buffers = self._decode(event.frames)
        except codecs.UpdateError as error:
            worker.rejected += 1
            return self._refuse(event.caller, "malformed", str(error))
        worker.accepted += 1
        self._take(_record(worker, asked, share, self._round_of(asked)), event.frames, vector, buffers)
        self._close_what_is_due()  # the answer then brings the weights that this contribution moved
        return self._receipt(event.caller, worker, asked, "accepted")

    def _count(self, outcome: str) -> None:
        self.state.contributions[outcome] = self.state.contributions.get(outcome, 0) + 1

    def _lag(self, worker: Worker, base: int) -> int:
        """Versions that the update does not know of. A worker that steps its own weights knows those it made itself."""
        lag = self.state.version - base
        if self.policy.worker_steps:
            lag -= sum(1 for version in self.state.made.get(worker.name, ()) if version > base)
        return max(0, lag)

    def _too_late(self, asked: Contribute) -> str:
        if not isinstance(self.policy.rounds, Barrier):
            return ""
        if asked.round < self.state.version:
            return "late"
        return "ahead" if asked.round >= self.state.version + self.policy.rounds.window else ""

    def _round_of(self, asked: Contribute) -> int:
        return asked.round if isinstance(self.policy.rounds, Barrier) else self.state.version

    def _decode(self, frames: Frames) -> tuple[Tensor, Tensor]:
        size, extra = self.learner.vector.numel(), self.learner.buffers.numel()
        if not frames or (extra and len(frames) < 2):
            raise codecs.UpdateError("frames are missing")
        body, tail = (frames[:-1], frames[-1:]) if extra else (frames, ())
        vector = codecs.decode(self.plan.updates.codec, size, body)
        return vector, codecs.decode(_PLAIN, extra, tail) if extra else torch.empty(0)

    def _receipt(self, caller: Any, worker: Worker, asked: Contribute, status: str, repeated: bool = False) -> None:
        """Answer at once, or when the round has closed if the worker may not go on before."""
        rounds = self.policy.rounds
        holds = isinstance(rounds, Barrier) and status == "accepted" and asked.round + 1 >= self.state.version + rounds.window
        if holds and not self.finished:
            before = self.waiting.get(worker.session)
            if before is not None:  # the worker asked again: nobody waits for the first answer any more
                self._effects.append(Reply(before.caller, {"kind": "refused", "reason": "asked-again", "detail": ""}))
            self.waiting[worker.session] = Waiting(caller, asked.have, asked.round, self.now)
            return
        header = {"kind": "receipt", "status": status, "seq": asked.seq, "round": self.state.version, "repeated": repeated}
        self._reply(caller, header, worker, asked.have if asked.have >= 0 or status != "accepted" else -2)

    def _release(self) -> None:
        """Answer those who waited for a round that has closed by now, and tell those who waited long to ask again."""
        window = self.policy.rounds.window if isinstance(self.policy.rounds, Barrier) else 1
        for session, waited in list(self.waiting.items()):
            free = waited.round + 1 < self.state.version + window
            if free or self.finished or self.now - waited.since >= LONGEST_WAIT_S:
                worker = self.members.by_session[session]
                del self.waiting[session]
                status = "accepted" if free else "finished" if self.finished else "wait"
                have = waited.have if waited.have >= 0 and status != "wait" else -2
                header = {"kind": "receipt", "status": status, "round": self.state.version, "repeated": False}
                self._reply(waited.caller, header | {"seq": self.state.sequences[worker.name]}, worker, have)

    # --- rounds ------------------------------------------------------------------------------------

    def _close_what_is_due(self) -> None:
        while not self.finished and self._due():
            number = self.state.version
            self._take({"kind": "closed", "round": number, "workers": sorted(self.rounds[number])})
            self._release()

    def _due(self) -> bool:
        """Whether the open round may close now."""
        there = self.rounds.get(self.state.version)
        active = {worker.name for worker in self.members.active()}
        late = self._deadline_passed()
        if self.gathering:
            if len(active) < self.plan.expected and not late:
                return False
            self.gathering = False
        if not self._enough(len(active | set(there or ())), len(there or ())):
            return False
        if not there:
            return False
        if isinstance(self.policy.rounds, Barrier):
            return late or active <= there.keys()
        return len(there) >= max(self.plan.needed, min(self.policy.rounds.contributions, max(1, len(active))))

    def _deadline_passed(self) -> bool:
        """Has the round been open for too long?"""
        rounds = self.policy.rounds
        if not isinstance(rounds, Barrier):
            return True  # who works without rounds waits for nobody
        opened = self.opened_at.get(self.state.version)
        return opened is not None and self.now >= opened + rounds.deadline_s

    def _enough(self, reachable: int, there: int) -> bool:
        """Too few workers for the rule: wait for more, or stop. It never makes do with a lesser rule."""
        needed, rule = self.plan.needed, self.plan.updates.aggregation.kind
        if reachable < needed and needed > 1 and not self.gathering:
            text = f"{rule} needs {needed} contributions and {reachable} workers are here"
            if self.plan.updates.below_quorum == "stop" and self.state.version > 0:
                self.stopped = f"{text}: stopped, as updates.below_quorum says"
                self._effects.append(Stop(self.stopped))
                self._release()
            elif self._noted != text:
                self._noted = text
                self._effects.append(Note(f"{text}: waiting for {needed - reachable} more"))
        elif reachable >= needed:
            self._noted = ""
        return there >= needed

    # --- what survives -----------------------------------------------------------------------------

    def _take(self, record: dict[str, Any], frames: Frames = (), vector: Tensor | None = None, buffers: Tensor | None = None) -> None:
        self._effects.append(Persist(record, frames))
        self._apply(record, frames, vector, buffers)

    def replay(self, record: dict[str, Any], frames: Frames) -> list[Effect]:
        """Take a record again that was kept before a crash. One that a later journal repeats, because its round was open, is taken once."""
        self._effects = []
        if record["kind"] == "accepted" and record["seq"] <= self.state.sequences.get(record["worker"], -1):
            return []
        self._apply(record, frames, None, None)
        return self._effects

    def _apply(self, record: dict[str, Any], frames: Frames, vector: Tensor | None, buffers: Tensor | None) -> None:
        if record["kind"] == "accepted":
            if vector is None or buffers is None:
                vector, buffers = self._decode(frames)
            self._hold(record, Held(record, frames, vector, buffers))
        elif record["kind"] == "closed":
            self._close(record["round"], record["workers"])
        else:
            self.state.seats[record["worker"]] = record["seat"]

    def _hold(self, record: dict[str, Any], held: Held) -> None:
        name, number = record["worker"], record["round"]
        self.state.sequences[name] = record["seq"]
        self.state.positions[str(record["seat"])] = [record["epoch"], record["position"]]
        self._count("accepted")
        there = self.rounds.setdefault(number, {})
        if not there:
            self.opened_at[number] = self.now
        if name in there:
            old = there[name].record
            self._count("replaced")
            self._effects.append(Entry({"replaced": [name, old["seq"]], "by": record["seq"]}))
        there[name] = held

    def _close(self, number: int, names: Sequence[str]) -> None:
        """Combine a round's contributions and move the weights."""
        there = self.rounds.pop(number)
        self.opened_at.pop(number, None)
        if number + 1 in self.rounds:
            self.opened_at[number + 1] = self.now
        held = [there[name] for name in names]
        records = [one.record for one in held]
        update, buffers = self._combine(held)
        figures = self.learner.apply(update, buffers, self.step)
        state = self.state
        state.version += 1
        batches, samples = sum(record["batches"] for record in records), sum(record["samples"] for record in records)
        state.batches, state.samples = state.batches + batches, state.samples + samples
        for name in names:
            own: deque[int] = deque(state.made.get(name, ()), _REMEMBERED)
            own.append(state.version)
            state.made[name] = list(own)
        self.publisher.publish(state.version, self.learner.vector, self.learner.buffers)
        self._effects.append(Entry({"version": state.version, "batches": state.batches, "from": [_line(record) for record in records]}))
        weight = sum(record["weight"] for record in records)
        metrics = _mean([record["metrics"] for record in records], [record["weight"] for record in records]) | dict(figures)
        self._effects.append(Published(state.version, metrics, weight, samples, batches))

    def _combine(self, held: list[Held]) -> tuple[Tensor, Tensor]:
        updates, seed = self.plan.updates, self.plan.seed + self.state.version
        for one in held:
            if one.record["share"] != 1.0:
                one.vector = one.vector * one.record["share"]
        weights = torch.tensor([one.record["weight"] for one in held], dtype=torch.float64)
        buffers = self._combine_buffers(held, weights)
        if len(held) == 1 and updates.aggregation.kind == "mean":
            return held[0].vector, buffers
        stack = torch.stack([one.vector for one in held])
        update, self.centre = rules.combine(updates.aggregation, updates.mixing, stack, weights, self.centre, seed)
        return update, buffers

    def _combine_buffers(self, held: list[Held], weights: Tensor) -> Tensor:
        """Statistics are averaged; under a rule that withstands false contributions their median is taken, which does too."""
        if not self.learner.buffers.numel():
            return torch.empty(0)
        stack = torch.stack([one.buffers for one in held])
        return rules.mean(stack, weights) if self.plan.updates.aggregation.kind == "mean" else rules.median(stack)

    def state_dict(self) -> dict[str, Any]:
        """What a snapshot holds besides the learner; it is taken when a round has just closed."""
        return {"state": dict(vars(self.state)), "centre": self.centre}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.state = State(**saved["state"])
        self.members.seats = self.state.seats
        self.centre = saved["centre"]
        self.publisher.publish(self.state.version, self.learner.vector, self.learner.buffers)

    def pending(self) -> list[tuple[dict[str, Any], Frames]]:
        """Records of contributions whose rounds are open: they belong to the journal that follows a snapshot."""
        return [(held.record, held.frames) for number in sorted(self.rounds) for held in self.rounds[number].values()]


def _record(worker: Worker, asked: Contribute, share: float, number: int) -> dict[str, Any]:
    return {
        "kind": "accepted",
        "worker": worker.name,
        "seat": worker.seat,
        "share": share,
        "round": number,
        **{name: getattr(asked, name) for name in ("seq", "base", "weight", "samples", "epoch", "position", "batches")},
        "metrics": dict(asked.metrics),
    }


def _line(record: dict[str, Any]) -> list[Any]:
    """A contribution in the ledger: worker, number, base, share, samples, and which batches of which seat."""
    return [record[name] for name in ("worker", "seq", "base", "share", "samples", "seat", "epoch", "position", "batches")]


def _mean(metrics: list[Mapping[str, float]], weights: list[float]) -> dict[str, float]:
    total = sum(weights)
    names = {name: None for one in metrics for name in one}
    return {name: sum(one.get(name, 0.0) * weight for one, weight in zip(metrics, weights, strict=True)) / total for name in names}
