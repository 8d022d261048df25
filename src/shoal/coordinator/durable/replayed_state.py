"""State that survives a crash: the weights, the counts beside them, and the contributions of open rounds.

Only records change it: after a crash, the last snapshot is loaded and the records since then are applied again, in the same order, by the
same code. It knows neither time nor members.

    accepted   a contribution was accepted, and waits for its round
    held       the same, at the head of a journal: the snapshot has counted it already
    closed     a round became the next version
    combined   at a relay: a round became one contribution to the coordinator above
    adopted    at a relay: the answer to that contribution brought the next version
    seated     a worker has a seat at the data, and a name that belongs to its key
    opened     the tasks of an epoch can be assigned
    cut        a part of a task's piece became a piece of its own
    added      a task can be assigned in an epoch that has begun, or at a relay: the next batches of its task became a piece
    passed     the rest of a piece is given up: no worker sent a usable contribution
    forgotten  a name is free again: no contribution under it was ever accepted
    failed     a unit of the data was given up
    inexact    a unit's result was not computed as it should have been; the unit goes to others
    withdrawn  a person's invitation was withdrawn, and their workers were removed
    paused     the owner paused the run, or resumed it
    away       a worker left for a while, and why, or came back
    evicted    the owner keeps a worker out, or lets it in again
    seen       how far a worker has come whose contributions were rejected many times in a row
    blamed     how many units in a row a worker has failed
    quarantined  a worker that failed units which others manage is kept out for a while, or let in again
    repaired   what followed was lost, and is named; its numbers are not used again
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.config.schema.updates import NoMixing
from shoal.coordinator.durable.contribution_files import ContributionFiles
from shoal.coordinator.durable.receipt_seal import digest_of
from shoal.coordinator.effects import Effect, LedgerEntry, Published
from shoal.coordinator.round_policies import CoordinatorPolicies
from shoal.coordinator.rounds.open_rounds import Rounds
from shoal.coordinator.rounds.relayed_round import RelayedRound, relay_round
from shoal.coordinator.rounds.weights_publisher import WeightsPublisher
from shoal.coordinator.rounds.worker_scores import WorkerScores
from shoal.coordinator.run_plan import Learner, RunPlan
from shoal.coordinator.state import HeldContribution, State, TaskPiece, ledger_line, mean_metrics
from shoal.coordinator.units.cut import SettledUnits
from shoal.errors import ShoalError
from shoal.files import check_format
from shoal.protocol.messages import Frames
from shoal.updates import codecs
from shoal.updates.answer_frames import digest
from shoal.updates.episodes import EpisodeRows
from shoal.updates.expert_subsets import ExpertIds, HolderVector, mean_of_reports, mean_over_holders, size_of
from shoal.updates.experts import ExpertBlocks, combine_apart, mean_by_experts
from shoal.updates.fragments import Span
from shoal.updates.rules import aggregation

FORMAT = 1
"""Format of `state_dict`, and of records in a journal."""
_NOTHING = torch.empty(0)
_LEAST_REMEMBERED = 256
_LEAST_MEMORIES = 16
_MOST_SPARE = 4


class ReplayedState:
    """State, open rounds and weights. `apply` is the only way to change them."""

    def __init__(self, plan: RunPlan, policies: CoordinatorPolicies, learner: Learner) -> None:
        self.plan, self.learner = plan, learner
        self.remembered = max(_LEAST_REMEMBERED, 2 * plan.pull_every) if policies.contribution.own_steps else 0
        """Bound on remembered versions per worker: more than a worker makes between two pulls."""
        self.sends_weights = policies.contribution.sends_weights
        """Whether workers send weights, whose mean are the new ones, instead of updates."""
        self.state = State()
        self.settled = SettledUnits()
        self.rounds = Rounds()
        self.publisher = WeightsPublisher(plan.updates.codec)
        self.publish()
        self.centre: Tensor | None = None
        """State of the aggregation rule, where it has one."""
        self._spare: list[Tensor] = []
        """Buffer pool for decoding: fresh memory of that size costs more than the decoding."""
        self.memories: dict[str, Tensor] = {}
        """By worker: running mean of its updates (`updates.memory`)."""
        self.scores = WorkerScores(plan.updates, plan.needed) if plan.updates.scorer.enabled and plan.above is None else None
        """Weighs contributions by the scores of their workers; None: all count in full."""
        self._dropped: list[str] = []
        """Workers whose contributions the aggregation rule left out of the round that is being closed."""
        self.relayed: RelayedRound | None = None
        """At a relay: the combined round, until the coordinator above has answered."""
        self.residual: Tensor | None = None
        """At a relay: the codec's residual of the contributions to the coordinator above."""

    def publish(self, span: Span | None = None) -> None:
        """Make the learner's weights those that workers get; since the version before only those in `span` have changed."""
        self.publisher.publish(self.state.version, self.learner.vector, self.learner.buffers, span)

    @property
    def all_units_settled(self) -> bool:
        """Whether the data is cut into units, and none is left to do."""
        return self.plan.cut is not None and self.settled.all_of(self.plan.cut.total)

    @property
    def round_is_complete(self) -> bool:
        """Whether nothing more can come into the open round: no unit of the data is left, or all pieces of a relay's task are in it."""
        if self.plan.above is not None and self.plan.tasks is not None:
            return all(map(self.state.piece_is_done, self.state.pieces))
        return self.all_units_settled

    @property
    def step(self) -> float:
        """Step of the learning-rate schedule: updates made, or batches learned from over batches of an expected update."""
        if self.state.upstream:
            return float(self.state.upstream["step"])
        return self.state.version if self.plan.total_batches is None else self.state.batches / self.plan.batches_per_step

    def decode(self, frames: Frames, number: int = 0, experts: ExpertIds = ()) -> tuple[Tensor, Tensor]:
        """The update and the buffers in a contribution to round `number`, of these experts. Raises UpdateError."""
        span, extra = self.plan.span(number), self.learner.buffers.numel()
        size = self.learner.vector.numel() if span is None else span[1] - span[0]
        if experts and self.plan.experts is not None:
            size = size_of(self.plan.experts, experts)
        if not frames or (extra and len(frames) < 2):
            raise codecs.UpdateError("frames are missing")
        body, tail = (frames[:-1], frames[-1:]) if extra else (frames, ())
        vector = codecs.borrow(self.plan.updates.codec, size, body)
        if vector is None:
            vector = self._decode_into_pool(size, body)
        if self.plan.held_files is not None:  # it was checked, and is decoded again when its round closes
            self._return_buffers([] if self.plan.updates.codec.kind == "none" else [vector])
            vector = _NOTHING
        buffers = codecs.decode(codecs.PLAIN, extra, tail) if extra else _NOTHING
        return vector, buffers if self.plan.experts is None else self.plan.experts.checked(buffers)

    def decode_unit(self, frames: Frames, unit: int, base: int, worker: str = "", experts: ExpertIds = ()) -> tuple[Tensor, Tensor]:
        """The decoded result of a unit. Raises UpdateError. `worker`: its sender; empty: a record is replayed."""
        rollouts = self.plan.rollouts
        if rollouts is None:
            return self.decode(frames, experts=experts)
        return rollouts.read(frames, *self._samples_of(unit), base, self.state.version, worker)

    def _samples_of(self, unit: int) -> tuple[int, int]:
        """The number of a unit's first sample, counted through all epochs, and how many samples it has."""
        cut = self.plan.cut
        assert cut is not None
        epoch, start, batches = cut.unit(unit)
        return epoch * cut.batches_per_epoch + start, batches

    def lease_fields(self, unit: int) -> dict[str, Any]:
        """Fields of a unit's lease besides its batches and epoch."""
        return {} if self.plan.rollouts is None else {"given": self.plan.rollouts.lease(*self._samples_of(unit))}

    def _kept(self, frames: Frames) -> Frames:
        """The frames, where contributions wait for their round."""
        return frames if self.plan.held_files is None else self.plan.held_files.keep(frames)

    def _decode_into_pool(self, size: int, frames: Frames) -> Tensor:
        buffer = self._buffer(size)
        try:
            return codecs.decode(self.plan.updates.codec, size, frames, out=buffer)
        except codecs.UpdateError:
            self._return_buffers([buffer])
            raise

    def _buffer(self, size: int) -> Tensor:
        return self._spare.pop() if self._spare and size == self.learner.vector.numel() else torch.empty(size)

    def _mean_buffer(self, size: int) -> Tensor:
        """Where the mean of a round is computed: where the optimizer reads it, if that is possible."""
        gradient = self.learner.gradient_buffer
        return gradient if gradient is not None and gradient.numel() == size else self._buffer(size)

    def _return_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Return unused vectors to the pool. None of them may lie in a frame."""
        whole = [buffer for buffer in buffers if buffer.numel() == self.learner.vector.numel()]
        self._spare.extend(whole[: max(0, _MOST_SPARE - len(self._spare))])

    def apply(self, record: dict[str, Any], frames: Frames = (), decoded: tuple[Tensor, Tensor] | None = None) -> list[Effect]:
        """Apply a record, new or replayed. `decoded`: its frames, where they were decoded already."""
        match record["kind"]:
            case "accepted":
                decoded = decoded or self._decode_again(record, frames)
                self._accept(HeldContribution(record, self._kept(frames), *decoded))
            case "held":
                if not self.rounds.holds(record) and not (self.relayed is not None and self.relayed.holds(record)):
                    self.rounds.hold(record["round"], HeldContribution(record, self._kept(frames), *self._decode_again(record, frames)))
            case "closed":
                held = self.rounds.open.pop(record["round"]).held
                return self._move_weights([held[worker, seq] for worker, seq in record["contributions"]], record.get("scores"))
            case "combined":
                self._relay(record)
            case "adopted":
                return self._adopt(record, frames)
            case "failed" | "inexact" | "withdrawn" | "evicted" | "repaired":
                return [LedgerEntry(self._ledger_entry(record))]
            case _:
                self._change_state(record)
        return []

    def _change_state(self, record: dict[str, Any]) -> None:
        """Apply a record of a seat, a task, or the standing of a worker."""
        state = self.state
        name, seat = record.get("worker", ""), record.get("seat", -1)
        match record["kind"]:
            case "seated":
                state.seats[name] = seat
                if "key" in record:
                    state.keys[name] = record["key"]
                if seat in state.pieces:
                    state.pieces[seat] = state.pieces[seat]._replace(holder=name)
            case "opened":
                state.open_epoch(record["epoch"], record["pieces"])
            case "cut":
                state.cut_piece(seat, record["at"])
            case "added":
                state.add_piece(TaskPiece(record["task"], record["epoch"], record["first"], record["end"]))
            case "passed":
                state.positions[str(seat)] = [state.pieces[seat].epoch, state.pieces[seat].end]
            case "forgotten":
                for names in (state.seats, state.keys, state.seen, state.failures):
                    names.pop(name, None)
            case "seen":
                state.seen[name] = [record[part] for part in ("seq", "seat", "epoch", "position")]
            case "blamed":
                state.failures[name] = record["failed"]
            case "quarantined":
                state.quarantined.pop(name, None)
                state.failures.pop(name, None)
                if record["out"]:
                    state.quarantined[name] = record["guest"]
            case "paused":
                state.paused = record["paused"]
            case "away":
                state.away.pop(name, None)
                state.away |= {name: record["why"]} if record["why"] else {}
                if len(state.away) > self.plan.bounds.sessions:
                    del state.away[next(iter(state.away))]
            case kind:
                raise ShoalError(f"the journal has a record of the unknown kind {kind!r}: another version of Shoal wrote it")

    def _decode_again(self, record: dict[str, Any], frames: Frames) -> tuple[Tensor, Tensor]:
        experts = tuple(record.get("experts", ()))
        if "unit" in record:
            return self.decode_unit(frames, record["unit"], record["base"], experts=experts)
        return self.decode(frames, record["round"], experts)

    def _ledger_entry(self, record: dict[str, Any]) -> dict[str, Any]:
        """Apply a record of a failure or an eviction; return its line in the ledger."""
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
                self.state.evicted.pop(record["worker"], None)
                self.state.away.pop(record["worker"], None)
                if record["out"]:
                    self.state.evicted[record["worker"]] = self.state.keys.get(record["worker"], "")
                return {"evicted": record["worker"], "out": record["out"]}
        self.state.sequences |= {worker: last for worker, _, last in record["lost"]}
        return {name: record[name] for name in ("lost", "reason")}

    def _accept(self, contribution: HeldContribution) -> None:
        record, state = contribution.record, self.state
        name = record["worker"]
        state.sequences[name], state.digests[name] = record["seq"], digest_of(contribution.line)
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
        state.accepted[name] = state.accepted.get(name, 0) + 1
        self.rounds.hold(record["round"], contribution)

    def _move_weights(self, contributions: list[HeldContribution], measured: list[Any] | None) -> list[Effect]:
        """Combine a round's contributions and move the weights. `measured`: the fields of a `HeldOutLosses`, if the round was measured."""
        if self.plan.rollouts is not None:
            units = [(*self._samples_of(one.record["unit"]), one.vector, one.buffers) for one in contributions]
            figures = self.plan.rollouts.learn(units, self.state.version)
            answers = [[one.record["unit"], one.record["base"], digest(one.frames)] for one in contributions]
            return self._advance(contributions, figures, answers=answers)
        unused = [one.vector for one in contributions] if self.plan.updates.codec.kind != "none" else []
        counted, scored = self.scores.weigh(contributions, measured, self.state) if self.scores is not None else (contributions, {})
        update, buffers, share = self._combine(counted)
        dropped, self._dropped = self._dropped, []
        figures = self.learner.apply(update, buffers, self.step, share)
        if len(counted) > 1 and update is not self.learner.gradient_buffer:
            unused.append(update)
        if unused:
            self._return_buffers(unused)
        return self._advance(contributions, figures, **({"dropped": dropped} if dropped else {}), **scored)

    def _advance(self, contributions: list[HeldContribution], figures: Mapping[str, float], **more: Any) -> list[Effect]:
        """Count and publish the next version, made of these contributions. `more`: further fields of its line in the ledger."""
        state, records = self.state, [one.record for one in contributions]
        span = self.plan.span(state.version)
        state.version += 1
        self.publish(span)
        batches, samples = sum(record["batches"] for record in records), sum(record["samples"] for record in records)
        state.batches, state.samples = state.batches + batches, state.samples + samples
        if self.remembered:
            for name in dict.fromkeys(record["worker"] for record in records):
                state.made[name] = [*state.made.get(name, ()), state.version][-self.remembered :]
        weight = sum(record["weight"] for record in records)
        return [
            LedgerEntry({"version": state.version, "batches": state.batches, "from": [one.line for one in contributions], **more}),
            Published(state.version, mean_metrics(records) | dict(figures), weight, samples, batches),
        ]

    # --- relays ------------------------------------------------------------------------------------

    def _relay(self, record: dict[str, Any]) -> None:
        """Combine a round into one contribution to the coordinator above. Its sequence number is fixed from now on."""
        if self.relayed is not None:
            return  # a snapshot was begun and not finished: the next journal begins with the end of the last one
        held = self.rounds.open.pop(record["round"]).held
        contributions = [held[worker, seq] for worker, seq in record["contributions"]]
        update, buffers, share = self._combine(contributions)
        self.relayed = relay_round(record, contributions, update * share, buffers, self.residual, self.plan, self.state)

    def _adopt(self, record: dict[str, Any], frames: Frames) -> list[Effect]:
        """Continue with the weights of the coordinator above."""
        relayed, self.relayed = self.relayed, None
        assert relayed is not None
        self.state.upstream, self.residual = dict(record["upstream"]), relayed.residual
        if self.plan.tasks is not None:
            self.state.forget_pieces()
        figures = self.learner.apply(*self._whole(frames), self.step, 1.0)
        contributions = [HeldContribution(kept_record, (), _NOTHING, _NOTHING) for kept_record, _ in relayed.kept]
        return self._advance(contributions, figures, upstream=[record["upstream"]["name"], relayed.asked.seq, record["status"]])

    def _whole(self, frames: Frames) -> tuple[Tensor, Tensor]:
        """Weights and buffers that were sent without a codec."""
        extra = self.learner.buffers.numel()
        vector = codecs.decode(codecs.PLAIN, self.learner.vector.numel(), frames[:-1] if extra else frames)
        return vector, codecs.decode(codecs.PLAIN, extra, frames[-1:]) if extra else _NOTHING

    def pending(self) -> list[tuple[dict[str, Any], Frames]]:
        """Records of contributions that are in no version yet: the journal after a snapshot begins with them."""
        relayed = self.relayed.records() if self.relayed is not None else []
        return [*relayed, *self.rounds.pending()]

    # --- combining contributions ---------------------------------------------------------------------

    def _combine(self, contributions: list[HeldContribution]) -> tuple[Tensor, Tensor, float]:
        """The combined update, the combined buffers, and the share of the update that counts."""
        updates, seed = self.plan.updates, self.plan.seed + self.state.version
        if self.plan.held_files is not None:
            return self._combine_kept(contributions, self.plan.held_files)
        if len(contributions) == 1 and updates.aggregation.kind == "mean" and not updates.memory:
            return self._alone(contributions[0]), contributions[0].buffers, contributions[0].record["share"]
        for contribution in contributions:
            if contribution.record["share"] != 1.0:
                contribution.vector = contribution.vector * contribution.record["share"]  # not in place: it may lie in a frame
        if updates.compares or updates.memory:
            contributions = one_of_each_worker(contributions, self.plan.episodes)
        for contribution in contributions if updates.memory else ():
            contribution.vector = self._remember(contribution.record["worker"], contribution.vector, updates.memory or 0.0)
        weights = torch.tensor([one.record["weight"] for one in contributions], dtype=torch.float64)
        buffers = self._combine_buffers(contributions, weights)
        if len(contributions) == 1 and updates.aggregation.kind == "mean":
            return self._alone(contributions[0]), buffers, 1.0
        if updates.aggregation.kind == "mean" and isinstance(updates.mixing, NoMixing):
            return self._mean(contributions, weights), buffers, 1.0
        stack, experts = torch.stack([one.vector for one in contributions]), self._experts(contributions)
        combine = aggregation.combine if experts is None or not experts.apart else partial(combine_apart, experts)
        dropped: set[int] = set()
        update, self.centre = combine(updates.aggregation, updates.mixing, stack, weights, self.centre, seed, dropped)
        self._dropped = [contributions[index].record["worker"] for index in sorted(dropped)]
        return update, buffers, 1.0

    def _combine_kept(self, contributions: list[HeldContribution], files: ContributionFiles) -> tuple[Tensor, Tensor, float]:
        """The same, bit for bit, of contributions that wait encoded: one is decoded at a time, and rules that compare read a file."""
        updates, size, is_mean = self.plan.updates, self._size_of(contributions[0]), self.plan.updates.aggregation.kind == "mean"
        if len(contributions) == 1 and is_mean:
            return self._decoded(contributions[0], self._mean_buffer(size)), contributions[0].buffers, contributions[0].record["share"]
        rows = one_of_each_worker(contributions) if updates.compares else contributions
        weights = torch.tensor([one.record["weight"] for one in rows], dtype=torch.float64)
        buffers = self._combine_buffers(rows, weights)
        if is_mean and isinstance(updates.mixing, NoMixing):
            return self._mean_kept(contributions, weights, self._mean_buffer(size)), buffers, 1.0
        stack, by_worker = files.rows(len(rows), size), grouped_by_worker(contributions) if updates.compares else [[one] for one in rows]
        for row, group in zip(stack, by_worker, strict=True):
            self._mean_kept(group, torch.tensor([one.record["weight"] for one in group], dtype=torch.float64), row)
        dropped: set[int] = set()
        seed = self.plan.seed + self.state.version
        update, self.centre = aggregation.combine(updates.aggregation, updates.mixing, stack, weights, self.centre, seed, dropped)
        self._dropped = [rows[index].record["worker"] for index in sorted(dropped)]
        return update, buffers, 1.0

    def _size_of(self, contribution: HeldContribution) -> int:
        span = self.plan.span(contribution.record["round"])
        return self.learner.vector.numel() if span is None else span[1] - span[0]

    def _decoded(self, contribution: HeldContribution, out: Tensor) -> Tensor:
        """The vector of a contribution that waits encoded; in `out`, if it is not a view of its frames."""
        frames = contribution.frames[:-1] if self.learner.buffers.numel() else contribution.frames
        codec = self.plan.updates.codec
        vector = codecs.borrow(codec, out.numel(), frames)
        return codecs.decode(codec, out.numel(), frames, out=out) if vector is None else vector

    def _mean_kept(self, contributions: list[HeldContribution], weights: Tensor, out: Tensor) -> Tensor:
        """The mean of contributions that wait encoded, in `out`."""
        one_decoded = self._buffer(out.numel())

        def vectors() -> Iterator[Tensor]:
            for contribution in contributions:
                vector, share = self._decoded(contribution, one_decoded), contribution.record["share"]
                yield vector if share == 1.0 else torch.mul(vector, share, out=one_decoded)

        if len(contributions) == 1:
            out.copy_(next(vectors()))
        else:
            aggregation.mean_one_by_one(vectors(), weights, out)
        self._return_buffers([one_decoded])
        return out

    def _alone(self, contribution: HeldContribution) -> Tensor:
        """The update of a single contribution."""
        return self._mean_over_holders([contribution], torch.ones(1)) if contribution.experts else contribution.vector

    def _mean_over_holders(self, contributions: list[HeldContribution], weights: Tensor) -> Tensor:
        """The mean of contributions of which some hold only some experts. An expert in none of them does not move."""
        blocks, vector = self.plan.experts, self.learner.vector
        assert blocks is not None
        unmoved = vector.clone() if self.sends_weights else torch.zeros_like(vector)
        loads = None if blocks.cap is None else torch.stack([blocks.loads_of(one.buffers) for one in contributions])
        return mean_over_holders(blocks, [HolderVector(one.vector, one.experts) for one in contributions], weights, unmoved, loads)

    def _experts(self, contributions: list[HeldContribution]) -> ExpertBlocks | None:
        """Positions of the experts in contributions to a round."""
        experts = self.plan.experts
        return None if experts is None else experts.within(self.plan.span(contributions[0].record["round"]))

    def _mean(self, contributions: list[HeldContribution], weights: Tensor) -> Tensor:
        if any(one.experts for one in contributions):
            return self._mean_over_holders(contributions, weights)
        vectors, out = [one.vector for one in contributions], self._mean_buffer(contributions[0].vector.numel())
        experts = self._experts(contributions)
        if experts is None or experts.cap is None:
            return aggregation.mean_of_vectors(vectors, weights, out)
        loads = torch.stack([experts.loads_of(one.buffers) for one in contributions])
        return mean_by_experts(experts, vectors, weights, loads, out)

    def _remember(self, worker: str, vector: Tensor, share: float) -> Tensor:
        """The worker's running mean with this contribution in it. The longest silent workers are forgotten, to bound the memory."""
        before = self.memories.pop(worker, None)
        now = vector * (1 - share) if before is None else before.mul_(share).add_(vector, alpha=1 - share)
        self.memories[worker] = now
        while len(self.memories) > max(_LEAST_MEMORIES, 4 * self.plan.expected):
            del self.memories[next(iter(self.memories))]
        return now

    def _combine_buffers(self, contributions: list[HeldContribution], weights: Tensor) -> Tensor:
        """The mean of the buffers; under a robust rule their median. Some of the reported episodes are kept as they are."""
        if not self.learner.buffers.numel():
            return torch.empty(0)
        stack = torch.stack([one.buffers for one in contributions])
        if self.plan.experts is not None and any(one.experts for one in contributions):
            together = mean_of_reports(self.plan.experts, stack, weights, [one.experts for one in contributions])
        else:
            together = aggregation.mean(stack, weights) if self.plan.updates.aggregation.kind == "mean" else aggregation.median(stack)
        return together if self.plan.episodes is None else self.plan.episodes.put(together, stack)

    def write_off(self) -> list[Effect]:
        """Drop the contributions of rounds that will not close; the ledger names them."""
        unused = [ledger_line(record) for record, _ in self.rounds.pending()]
        self.rounds.open.clear()
        return [LedgerEntry({"unused": unused})] if unused else []

    def state_dict(self) -> dict[str, Any]:
        """What a snapshot holds besides the learner. Contributions of open rounds are in the journal that follows (`pending`)."""
        state = dict(vars(self.state)) | {"pieces": [[number, *piece] for number, piece in self.state.pieces.items()]}
        cut = None if self.plan.cut is None else list(vars(self.plan.cut).values())  # for an audit
        settled = self.settled.state_dict()
        kept = {"centre": self.centre, "memories": dict(self.memories), "residual": self.residual}
        return {"format": FORMAT, "state": state, "settled": settled, "cut": cut, **kept}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a snapshot. Raises ShoalError for one of another format."""
        check_format("the snapshot", "coordinator", saved["format"], FORMAT)
        pieces = {number: TaskPiece(*rest) for number, *rest in saved["state"]["pieces"]}
        self.state = State(**saved["state"] | {"pieces": pieces})
        self.settled = SettledUnits.of(saved["settled"])
        self.centre = saved["centre"]
        self.memories, self.residual = dict(saved["memories"]), saved["residual"]
        self.publish()


def one_of_each_worker(contributions: list[HeldContribution], episodes: EpisodeRows | None = None) -> list[HeldContribution]:
    """One row per worker, for rules that compare workers: several contributions of one worker are averaged by weight."""
    return [group[0] if len(group) == 1 else _mean_of(group, episodes) for group in grouped_by_worker(contributions)]


def grouped_by_worker(contributions: list[HeldContribution]) -> list[list[HeldContribution]]:
    by_worker: dict[str, list[HeldContribution]] = {}
    for contribution in contributions:
        by_worker.setdefault(contribution.record["worker"], []).append(contribution)
    return list(by_worker.values())


def _mean_of(contributions: list[HeldContribution], episodes: EpisodeRows | None) -> HeldContribution:
    weights = torch.tensor([one.record["weight"] for one in contributions], dtype=torch.float64)
    vector = aggregation.mean_of_vectors([one.vector for one in contributions], weights, torch.empty_like(contributions[0].vector))
    reports = torch.stack([one.buffers for one in contributions])
    buffers = aggregation.mean(reports, weights)
    buffers = buffers if episodes is None else episodes.put(buffers, reports)
    return HeldContribution(contributions[0].record | {"weight": float(weights.sum())}, (), vector, buffers)
