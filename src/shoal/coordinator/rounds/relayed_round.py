"""A relay's round on its way up: the contributions of its workers, combined into one for the coordinator above."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from shoal.coordinator.events import UpstreamState
from shoal.coordinator.run_plan import RunPlan
from shoal.coordinator.state import HeldContribution, State, mean_metrics
from shoal.protocol.messages import Contribute, Frames
from shoal.updates import codecs


class RelayedRound(NamedTuple):
    """A combined round, until the coordinator above has answered."""

    record: dict[str, Any]
    """The record that the round was combined."""
    kept: list[tuple[dict[str, Any], Frames]]
    """The contributions of the round, as they came."""
    asked: Contribute
    """The header of the contribution to the coordinator above."""
    frames: Frames
    residual: Tensor | None = None
    """The codec's residual for the next contribution, valid once this one is answered; None: the codec has none."""

    def holds(self, record: dict[str, Any]) -> bool:
        return [record["worker"], record["seq"]] in self.record["contributions"]

    def records(self) -> list[tuple[dict[str, Any], Frames]]:
        """Records that lead to this round again."""
        return [*((record | {"kind": "held"}, frames) for record, frames in self.kept), (self.record, ())]


def relay_round(
    record: dict[str, Any],
    held: list[HeldContribution],
    update: Tensor,
    buffers: Tensor,
    before: Tensor | None,
    plan: RunPlan,
    state: State,
) -> RelayedRound:
    """Encode the update of a round for the coordinator above. `before`: the residual that the codec left the last time."""
    codec = plan.updates.codec
    residual = codecs.residual_for(codec, update.numel()) if before is None else before.clone()
    frames = [*codecs.encode(codec, update, residual), *(codecs.encode(codecs.PLAIN, buffers, None) if buffers.numel() else ())]
    return RelayedRound(record, [(one.record, one.frames) for one in held], _header(held, plan, state), frames, residual)


def _header(held: list[HeldContribution], plan: RunPlan, state: State) -> Contribute:
    """The sums over the round, and the place at the data, or in its task, that the relay has reached with it."""
    records, upstream, above = [one.record for one in held], UpstreamState(**state.upstream), plan.above
    assert above is not None
    batches = sum(record["batches"] for record in records)
    gone = upstream.begun_at + state.batches + batches
    epoch, position = divmod(gone, above.batches_per_shard) if above.batches_per_shard else (0, gone)
    if plan.tasks is not None:
        epoch, position = max((record["epoch"], record["position"]) for record in records)
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
