"""What survives: the weights, the counts beside them and the contributions of open rounds.

Only records move it: a coordinator that was killed is the last snapshot with the records since then taken again, in the same order, by
the same code. It knows no clock and no member.

    accepted   a contribution was taken, and waits for its round
    held       the same, at the head of a journal: the snapshot has counted it already
    closed     a round became the next version
    combined   at a relay: a round became one contribution, which goes to the coordinator above
    adopted    at a relay: the answer to that contribution brought the next version
    seated     a worker has a seat at the data, and a name that belongs to its key
    opened     the tasks of an epoch are given out from now on
    cut        a part of a task's piece is a piece of its own
    passed     the rest of a piece is given up: nothing came of it
    forgotten  a name is free again: nothing was ever accepted under it
    failed     a unit of the data was given up
    inexact    what a worker sent for a unit was not computed as it should have been; the unit was given to others
    withdrawn  a person's invitation was withdrawn, and their workers were shown out
    paused     the owner holds the run up, or lets it go on
    evicted    the owner keeps a worker out, or lets it in again
    seen       what a worker sent was turned away again and again: this far it has come
    blamed     a worker could not do so many units in a row
    quarantined  a worker that failed what others manage is kept out for a while, or let in again
    repaired   what followed was lost, and is named; nobody uses those numbers again
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.config.schema.updates import NoCodec, NoMixing
from shoal.coordinator.durable.receipt_seal import digest_of
from shoal.coordinator.effects import Effect, Frames, LedgerEntry, Published
from shoal.coordinator.policies import CoordinatorPolicies
from shoal.coordinator.rounds.open_rounds import Rounds
from shoal.coordinator.state import (
    HeldContribution,
    Learner,
    RunPlan,
    State,
    TaskPiece,
    UpstreamState,
    former_key_of,
    ledger_line,
    mean_metrics,
)
from shoal.coordinator.units.cut import SettledUnits
from shoal.protocol.messages import Contribute
from shoal.updates import codecs
from shoal.updates.answer_frames import digest
from shoal.updates.episodes import EpisodeRows
from shoal.updates.expert_subsets import ExpertIds, HolderVector, mean_of_reports, mean_over_holders, size_of
from shoal.updates.experts import ExpertBlocks, combine_apart, mean_by_experts
from shoal.updates.rules import aggregation

_PLAIN = NoCodec()
_NOTHING = torch.empty(0)
_LEAST_REMEMBERED = 256
_LEAST_MEMORIES = 16
_MOST_SPARE = 4


class RelayedRound(NamedTuple):
    """A round of a relay on its way to the coordinator above."""

    record: dict[str, Any]
    """That the round was combined."""
    kept: list[tuple[dict[str, Any], Frames]]
    """The contributions of the round, as they came."""
    asked: Contribute
    """What is said of them above."""
    frames: Frames
    residual: Tensor | None = None
    """What the codec left of it for the next one, which counts once this one is answered; None: it leaves nothing."""

    def holds(self, record: dict[str, Any]) -> bool:
        return [record["worker"], record["seq"]] in self.record["contributions"]

    def records(self) -> list[tuple[dict[str, Any], Frames]]:
        """What leads to this again."""
        return [*((record | {"kind": "held"}, frames) for record, frames in self.kept), (self.record, ())]


class ReplayedState:
    """State, rounds and weights."""

    def __init__(self, plan: RunPlan, policies: CoordinatorPolicies, learner: Learner) -> None:
        self.plan, self.learner = plan, learner
        self.remembered = max(_LEAST_REMEMBERED, 2 * policies.pull_every) if policies.contribution.own_steps else 0
        """Own versions of a worker that are kept at most: more than it takes between two pulls."""
        self.sends_weights = policies.contribution.sends_weights
        """Whether workers send their weights, of which the new ones are the mean."""
        self.state = State()
        self.settled = SettledUnits()
        self.rounds = Rounds()
        self.centre: Tensor | None = None
        self._spare: list[Tensor] = []
        """Vectors that were combined, for the next ones to be decoded into: fresh memory of that size costs more than the decoding."""
        self.memories: dict[str, Tensor] = {}
        """Of each worker, the running mean of what it sent."""
        self._dropped: list[str] = []
        """Workers whose contributions the rule left out of the round that is being closed."""
        self.upward: RelayedRound | None = None
        """At a relay: what a round made, until the coordinator above has answered."""
        self.residual: Tensor | None = None
        """At a relay: what the codec has left of what was passed on so far."""

    @property
    def step(self) -> float:
        """Where the schedule stands: updates made, or what the batches so far are worth."""
        if self.state.upstream:
            return float(self.state.upstream["step"])
        return self.state.version if self.plan.total_batches is None else self.state.batches / self.plan.batches_per_step

    def decode(self, frames: Frames, number: int = 0, experts: ExpertIds = ()) -> tuple[Tensor, Tensor]:
        """The update and the buffers in a contribution to a round, of these experts. Raises UpdateError."""
        vector, buffers = self._decode_both(frames, number, experts, self.learner.buffers.numel())
        return vector, buffers if self.plan.experts is None else self.plan.experts.checked(buffers)

    def _decode_both(self, frames: Frames, number: int, experts: ExpertIds, extra: int) -> tuple[Tensor, Tensor]:
        """`extra`: numbers beside the update."""
        span = self.plan.span(number)
        size = self.learner.vector.numel() if span is None else span[1] - span[0]
        if experts and self.plan.experts is not None:
            size = size_of(self.plan.experts, experts)
        if not frames or (extra and len(frames) < 2):
            raise codecs.UpdateError("frames are missing")
        body, tail = (frames[:-1], frames[-1:]) if extra else (frames, ())
        vector = codecs.borrow(self.plan.updates.codec, size, body)
        if vector is None:
            vector = self._decode(size, body)
        return vector, codecs.decode(_PLAIN, extra, tail) if extra else _NOTHING

    def decode_unit(self, frames: Frames, unit: int, base: int, worker: str = "", experts: ExpertIds = ()) -> tuple[Tensor, Tensor]:
        """What came of a unit. Raises UpdateError. `worker`: who sent it now; empty: it was taken before."""
        intake = self.plan.intake
        if intake is None:
            return self.decode(frames, experts=experts)
        return intake.read(frames, *self._samples_of(unit), base, self.state.version, worker)

    def _samples_of(self, unit: int) -> tuple[int, int]:
        """The number of a unit's first sample among those of all epochs, and how many it has."""
        cut = self.plan.cut
        assert cut is not None
        epoch, start, batches = cut.unit(unit)
        return epoch * cut.batches_per_epoch + start, batches

    def lease(self, unit: int) -> dict[str, Any]:
        """What a worker is told with a unit, besides which batches of which epoch it is."""
        return {} if self.plan.intake is None else {"given": self.plan.intake.lease(*self._samples_of(unit))}

    def _decode(self, size: int, frames: Frames) -> Tensor:
        room = self._room(size)
        try:
            return codecs.decode(self.plan.updates.codec, size, frames, out=room)
        except codecs.UpdateError:
            self._leave([room])
            raise

    def _room(self, size: int) -> Tensor:
        return self._spare.pop() if self._spare and size == self.learner.vector.numel() else torch.empty(size)

    def _leave(self, rooms: Iterable[Tensor]) -> None:
        """Vectors that nobody needs any more and that no frame holds."""
        whole = [room for room in rooms if room.numel() == self.learner.vector.numel()]
        self._spare.extend(whole[: max(0, _MOST_SPARE - len(self._spare))])

    def take(self, record: dict[str, Any], frames: Frames = (), decoded: tuple[Tensor, Tensor] | None = None) -> list[Effect]:
        """Move on by a record, new or taken again."""
        kind = record["kind"]
        if kind == "closed":
            return self._close(record)
        if kind == "combined":
            self._gather(record)
            return []
        if kind == "adopted":
            return self._adopt(record, frames)
        if kind == "seated":
            self._seat(record)
            return []
        if kind in ("opened", "cut", "passed"):
            self._arrange(record)
            return []
        if kind == "forgotten":
            for names in (self.state.seats, self.state.keys, self.state.seen, self.state.failures):
                names.pop(record["worker"], None)
            return []
        if kind in ("seen", "blamed", "quarantined"):
            self._judge(record)
            return []
        if kind == "paused":
            self.state.paused = record["paused"]
            return []
        if kind in ("failed", "inexact", "withdrawn", "evicted", "repaired"):
            return [LedgerEntry(self._tell(record))]
        if kind == "held" and (self.rounds.holds(record) or (self.upward is not None and self.upward.holds(record))):
            return []
        held = HeldContribution(record, frames, *(decoded or self._decode_again(record, frames)))
        if kind == "held":
            self.rounds.hold(record["round"], held)
            return []
        return self._accept(record, held)

    def _decode_again(self, record: dict[str, Any], frames: Frames) -> tuple[Tensor, Tensor]:
        experts = tuple(record.get("experts", ()))
        try:
            if "unit" in record:
                return self.decode_unit(frames, record["unit"], record["base"], experts=experts)
            return self.decode(frames, record["round"], experts)
        except codecs.UpdateError:
            added = self._told_since()
            if not added:
                raise
            return self._decode_as_formerly(frames, 0 if "unit" in record else record["round"], experts, added)

    def _told_since(self) -> list[tuple[int, int]]:
        """What earlier versions did not tell beside an update: where each begins, and how many numbers it is."""
        blocks, episodes = self.plan.experts, self.plan.episodes
        loads = [] if blocks is None or blocks.loads_at is None else [(blocks.loads_at, len(blocks.spans_X))]
        return sorted(loads + ([] if episodes is None else [(episodes.at, episodes.rows * episodes.width)]))

    def _decode_as_formerly(self, frames: Frames, number: int, experts: ExpertIds, added: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Read a record of an earlier version, with nothing in the place of what was not told then."""
        extra = self.learner.buffers.numel() - sum(count for _, count in added)
        vector, buffers = self._decode_both(frames, number, experts, extra)
        for at, count in added:
            buffers = torch.cat([buffers[:at], buffers.new_zeros(count), buffers[at:]])
        return vector, buffers

    def _tell(self, record: dict[str, Any]) -> dict[str, Any]:
        """Move on by a record of what went wrong, or of whom the owner let in or out; what the ledger says of it."""
        match record["kind"]:
            case "failed":
                self.settled.add(record["unit"])
                self.settled.failed += 1
                return {"failed": [record[name] for name in ("epoch", "start", "batches", "reason")]}
            case "inexact":
                return {"inexact": [record[name] for name in ("worker", "seq", "unit", "base", "digest", "reason")]}
            case "withdrawn":
                return {"withdrawn": record["guest"], "workers": record["workers"]}
            case "evicted":
                self._keep_out(record["worker"], record["out"])
                return {"evicted": record["worker"], "out": record["out"]}
        self.state.sequences |= {worker: last for worker, _, last in record["lost"]}
        return {name: record[name] for name in ("lost", "reason")}

    def _keep_out(self, name: str, out: bool) -> None:
        if out:
            self.state.evicted[name] = self.state.keys.get(name, "")
        else:
            self.state.evicted.pop(name, None)

    def _judge(self, record: dict[str, Any]) -> None:
        """Move on by a record of how a worker stands."""
        state, name = self.state, record["worker"]
        if record["kind"] == "seen":
            state.seen[name] = [record[part] for part in ("seq", "seat", "epoch", "position")]
        elif record["kind"] == "blamed":
            state.failures[name] = record["failed"]
        else:
            state.quarantined.pop(name, None)
            state.failures.pop(name, None)
            if record["out"]:
                state.quarantined[name] = record["guest"]

    def _seat(self, record: dict[str, Any]) -> None:
        state, name, seat = self.state, record["worker"], record["seat"]
        state.seats[name] = seat
        if "key" in record:
            state.keys[name] = record["key"]
        if seat in state.pieces:
            state.pieces[seat] = state.pieces[seat]._replace(holder=name)

    def _arrange(self, record: dict[str, Any]) -> None:
        """Move on by a record of how the tasks are given out."""
        if record["kind"] == "opened":
            self.state.open_epoch(record["epoch"], record["pieces"])
        elif record["kind"] == "cut":
            self.state.cut_piece(record["seat"], record["at"])
        else:
            piece = self.state.pieces[record["seat"]]
            self.state.positions[str(record["seat"])] = [piece.epoch, piece.end]

    def _accept(self, record: dict[str, Any], held: HeldContribution) -> list[Effect]:
        name, state = record["worker"], self.state
        state.sequences[name], state.digests[name] = record["seq"], digest_of(held.line)
        if record["seq"] >= state.seen.get(name, (0,))[0]:
            state.seen.pop(name, None)
        if "unit" in record:
            self.settled.add(record["unit"])
            state.failures.pop(name, None)
        else:
            state.positions[str(record["seat"])] = [record["epoch"], record["position"]]
        if name in state.made:
            state.made[name] = [version for version in state.made[name] if version > record["base"]]
        state.count("accepted")
        self.rounds.hold(record["round"], held)
        return []

    def _close(self, closed: dict[str, Any]) -> list[Effect]:
        """Combine a round's contributions and move the weights."""
        there = self.rounds.open.pop(closed["round"]).held
        if "workers" in closed:
            return self._close_as_formerly(closed["workers"], list(there.values()))
        return self._move([there[worker, seq] for worker, seq in closed["contributions"]])

    def _close_as_formerly(self, names: list[str], there: list[HeldContribution]) -> list[Effect]:
        """Close a round of a journal that an earlier version wrote: a later contribution of a worker took the place of its earlier one."""
        latest = {former_key_of(one.record): one for one in there}
        replaced = [(one, latest[former_key_of(one.record)]) for one in there if one is not latest[former_key_of(one.record)]]
        for _ in replaced:
            self.state.count("replaced")
        entries = [LedgerEntry({"replaced": ledger_line(one.record), "by": by.record["seq"]}) for one, by in replaced]
        return [*entries, *self._move([latest[name] for name in names])]

    def _move(self, held: list[HeldContribution]) -> list[Effect]:
        """Move the weights by what the contributions make together."""
        records = [one.record for one in held]
        if self.plan.intake is not None:
            units = [(*self._samples_of(one.record["unit"]), one.vector, one.buffers) for one in held]
            figures = self.plan.intake.learn(units, self.state.version)
            answers = [[one.record["unit"], one.record["base"], digest(one.frames)] for one in held]
            return self._advance(records, figures, [one.line for one in held], answers=answers)
        lines = [one.line for one in held]
        rooms = [one.vector for one in held] if self.plan.updates.codec.kind != "none" else []
        update, buffers, share = self._combine(held)
        dropped, self._dropped = self._dropped, []
        figures = self.learner.apply(update, buffers, self.step, share)
        if len(held) > 1:
            rooms.append(update)
        if rooms:
            self._leave(rooms)
        return self._advance(records, figures, lines, **({"dropped": dropped} if dropped else {}))

    def _advance(self, records: list[dict[str, Any]], figures: Mapping[str, float], lines: list[list[Any]], **more: Any) -> list[Effect]:
        """There is a new version, made of these contributions. `lines`, `more`: what the ledger says of them, and besides."""
        state = self.state
        state.version += 1
        batches, samples = sum(record["batches"] for record in records), sum(record["samples"] for record in records)
        state.batches, state.samples = state.batches + batches, state.samples + samples
        if self.remembered:
            for name in dict.fromkeys(record["worker"] for record in records):
                state.made[name] = [*state.made.get(name, ()), state.version][-self.remembered :]
        weight = sum(record["weight"] for record in records)
        return [
            LedgerEntry({"version": state.version, "batches": state.batches, "from": lines, **more}),
            Published(state.version, mean_metrics(records) | dict(figures), weight, samples, batches),
        ]

    # --- a relay ------------------------------------------------------------------------------------

    def _gather(self, record: dict[str, Any]) -> None:
        """Make one contribution of a round, for the coordinator above. It has its number from now on, whatever happens to this one."""
        if self.upward is not None:
            return  # a snapshot was begun and not ended: the next journal begins with what the last one ends with
        there = self.rounds.open.pop(record["round"]).held
        held = [there[worker, seq] for worker, seq in record["contributions"]]
        kept = [(one.record, one.frames) for one in held]
        update, buffers, share = self._combine(held)
        codec = self.plan.updates.codec
        residual = codecs.residual_for(codec, update.numel()) if self.residual is None else self.residual.clone()
        frames = [*codecs.encode(codec, update * share, residual), *(codecs.encode(_PLAIN, buffers, None) if buffers.numel() else ())]
        self.upward = RelayedRound(record, kept, self._contribution(held), frames, residual)

    def _contribution(self, held: list[HeldContribution]) -> Contribute:
        """What a relay says of what its workers did: the sums, and the place at the data that its seat has come to by that."""
        records, upstream, above = [one.record for one in held], UpstreamState(**self.state.upstream), self.plan.above
        assert above is not None
        batches = sum(record["batches"] for record in records)
        gone = upstream.begun_at + self.state.batches + batches
        epoch, position = divmod(gone, above.batches_per_shard) if above.batches_per_shard else (0, gone)
        return Contribute(
            session="",
            number=0,
            seq=upstream.seq,
            base=upstream.version,
            round=upstream.version,
            weight=float(sum(record["weight"] for record in records)),
            samples=sum(record["samples"] for record in records),
            epoch=epoch,
            position=position,
            batches=batches,
            have=-1,
            metrics=mean_metrics(records),
        )

    def _adopt(self, record: dict[str, Any], frames: Frames) -> list[Effect]:
        """Go on with the weights of the coordinator above."""
        upward, self.upward = self.upward, None
        assert upward is not None
        sent, self.state.upstream, self.residual = upward.asked, dict(record["upstream"]), upward.residual
        figures = self.learner.apply(*self._whole(frames), self.step, 1.0)
        records, upstream = [one for one, _ in upward.kept], [record["upstream"]["name"], sent.seq, record["status"]]
        return self._advance(records, figures, [ledger_line(one) for one in records], upstream=upstream)

    def _whole(self, frames: Frames) -> tuple[Tensor, Tensor]:
        """Weights and statistics that are sent as they are."""
        extra = self.learner.buffers.numel()
        vector = codecs.decode(_PLAIN, self.learner.vector.numel(), frames[:-1] if extra else frames)
        return vector, codecs.decode(_PLAIN, extra, frames[-1:]) if extra else _NOTHING

    def pending(self) -> list[tuple[dict[str, Any], Frames]]:
        """What is taken and not yet in a version: records that belong to the journal that follows a snapshot."""
        upward = self.upward.records() if self.upward is not None else []
        return [*upward, *self.rounds.pending()]

    def _combine(self, held: list[HeldContribution]) -> tuple[Tensor, Tensor, float]:
        """The update that contributions make together, the buffers, and the share of the update that counts."""
        updates, seed = self.plan.updates, self.plan.seed + self.state.version
        if len(held) == 1 and updates.aggregation.kind == "mean" and not updates.memory:
            return self._alone(held[0]), held[0].buffers, held[0].record["share"]
        for one in held:
            if one.record["share"] != 1.0:
                one.vector = one.vector * one.record["share"]  # not in place: it may lie in a frame
        if updates.compares or updates.memory:
            held = one_of_each_worker(held, self.plan.episodes)
        for one in held if updates.memory else ():
            one.vector = self._remember(one.record["worker"], one.vector, updates.memory or 0.0)
        weights = torch.tensor([one.record["weight"] for one in held], dtype=torch.float64)
        buffers = self._combine_buffers(held, weights)
        if len(held) == 1 and updates.aggregation.kind == "mean":
            return self._alone(held[0]), buffers, 1.0
        if updates.aggregation.kind == "mean" and isinstance(updates.mixing, NoMixing):
            return self._mean(held, weights), buffers, 1.0
        stack, experts = torch.stack([one.vector for one in held]), self._experts(held)
        combine = aggregation.combine if experts is None or not experts.apart else partial(combine_apart, experts)
        dropped: set[int] = set()
        update, self.centre = combine(updates.aggregation, updates.mixing, stack, weights, self.centre, seed, dropped)
        self._dropped = [held[place].record["worker"] for place in sorted(dropped)]
        return update, buffers, 1.0

    def _alone(self, one: HeldContribution) -> Tensor:
        """The update that a contribution makes by itself."""
        return self._mean_over_holders([one], torch.ones(1)) if one.experts else one.vector

    def _mean_over_holders(self, held: list[HeldContribution], weights: Tensor) -> Tensor:
        """The mean of contributions of which some are of some experts only. An expert that none is of does not move."""
        blocks, vector = self.plan.experts, self.learner.vector
        assert blocks is not None
        unmoved = vector.clone() if self.sends_weights else torch.zeros_like(vector)
        loads = None if blocks.cap is None else torch.stack([blocks.loads_of(one.buffers) for one in held])
        return mean_over_holders(blocks, [HolderVector(one.vector, one.experts) for one in held], weights, unmoved, loads)

    def _experts(self, held: list[HeldContribution]) -> ExpertBlocks | None:
        """Where the experts lie in contributions to a round."""
        experts = self.plan.experts
        return None if experts is None else experts.within(self.plan.span(held[0].record["round"]))

    def _mean(self, held: list[HeldContribution], weights: Tensor) -> Tensor:
        if any(one.experts for one in held):
            return self._mean_over_holders(held, weights)
        vectors, room = [one.vector for one in held], self._room(held[0].vector.numel())
        experts = self._experts(held)
        if experts is None or experts.cap is None:
            return aggregation.mean_of_vectors(vectors, weights, room)
        loads = torch.stack([experts.loads_of(one.buffers) for one in held])
        return mean_by_experts(experts, vectors, weights, loads, room)

    def _remember(self, worker: str, vector: Tensor, share: float) -> Tensor:
        """The worker's running mean with this one in it. The longest silent are forgotten, so that many names do not fill the memory."""
        before = self.memories.pop(worker, None)
        now = vector * (1 - share) if before is None else before.mul_(share).add_(vector, alpha=1 - share)
        self.memories[worker] = now
        while len(self.memories) > max(_LEAST_MEMORIES, 4 * self.plan.expected):
            del self.memories[next(iter(self.memories))]
        return now

    def _combine_buffers(self, held: list[HeldContribution], weights: Tensor) -> Tensor:
        """Statistics are averaged; under a rule that withstands false contributions their median is taken, which does too. Of the episodes
        that are told some are taken as they are."""
        if not self.learner.buffers.numel():
            return torch.empty(0)
        stack = torch.stack([one.buffers for one in held])
        if self.plan.experts is not None and any(one.experts for one in held):
            together = mean_of_reports(self.plan.experts, stack, weights, [one.experts for one in held])
        else:
            together = aggregation.mean(stack, weights) if self.plan.updates.aggregation.kind == "mean" else aggregation.median(stack)
        return together if self.plan.episodes is None else self.plan.episodes.put(together, stack)

    def write_off(self) -> list[Effect]:
        """What waits in rounds that will not close is named, and let go."""
        unused = [ledger_line(record) for record, _ in self.rounds.pending()]
        self.rounds.open.clear()
        return [LedgerEntry({"unused": unused})] if unused else []

    def state_dict(self) -> dict[str, Any]:
        """What a snapshot holds besides the learner. Contributions of open rounds are not in it: they begin the journal that follows."""
        state = dict(vars(self.state)) | {"pieces": [[number, *piece] for number, piece in self.state.pieces.items()]}
        cut = None if self.plan.cut is None else list(vars(self.plan.cut).values())  # for an audit
        settled = self.settled.state_dict()
        kept = {"centre": self.centre, "memories": dict(self.memories), "residual": self.residual}
        return {"state": state, "settled": settled, "cut": cut, **kept}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        pieces = {number: TaskPiece(*rest) for number, *rest in saved["state"].get("pieces", ())}
        self.state = State(**saved["state"] | {"pieces": pieces})
        self.settled = SettledUnits.of(saved["settled"])
        self.centre = saved["centre"]
        self.memories, self.residual = dict(saved.get("memories", {})), saved.get("residual")


def one_of_each_worker(held: list[HeldContribution], episodes: EpisodeRows | None = None) -> list[HeldContribution]:
    """The rows that a rule compares: what a worker sent several times is averaged, by what it learned from. None counts twice."""
    by_worker: dict[str, list[HeldContribution]] = {}
    for one in held:
        by_worker.setdefault(one.record["worker"], []).append(one)
    return [group[0] if len(group) == 1 else _mean_of(group, episodes) for group in by_worker.values()]


def _mean_of(held: list[HeldContribution], episodes: EpisodeRows | None) -> HeldContribution:
    weights = torch.tensor([one.record["weight"] for one in held], dtype=torch.float64)
    vector = aggregation.mean_of_vectors([one.vector for one in held], weights, torch.empty_like(held[0].vector))
    reports = torch.stack([one.buffers for one in held])
    buffers = aggregation.mean(reports, weights)
    buffers = buffers if episodes is None else episodes.put(buffers, reports)
    return HeldContribution(held[0].record | {"weight": float(weights.sum())}, (), vector, buffers)
