"""What a coordinator and its workers must agree on: the strategy's policies, how long the run is, and that their data is the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from shoal import data
from shoal.config import Run
from shoal.config.derive import quorum
from shoal.config.schema.strategy import DiLoCo, WorkUnits
from shoal.config.schema.updates import Bucketing, NearestNeighbours
from shoal.coordinator import Barrier, Policy
from shoal.coordinator.units import Cut
from shoal.errors import ShoalError
from shoal.runs.assembly import feed_of, total_steps
from shoal.strategies import asynchronous, diloco, edp, syncps, workunits
from shoal.updates.fragments import Span, spans
from shoal.updates.layout import Layout

POLICIES = {
    "workunits": workunits.policy,
    "syncps": syncps.policy,
    "edp": edp.policy,
    "async": asynchronous.policy,
    "diloco": diloco.policy,
}


def policy_of(run: Run, expected: int) -> Policy:
    return POLICIES[run.strategy.kind](run, expected)


def needed(run: Run) -> int:
    """Contributions without which the aggregation rule cannot work."""
    rule, mixing = run.updates.aggregation, run.updates.mixing
    byzantine = getattr(rule, "byzantine", None) or 0
    least = quorum(rule.kind, byzantine, mixing.size if isinstance(mixing, Bucketing) else 1)
    return max(least, quorum("nearest-neighbours", mixing.byzantine or 0)) if isinstance(mixing, NearestNeighbours) else least


def ranks_of(run: Run) -> int:
    """Processes of a worker, as far as the settings say; each takes batches of its own. A worker may have others, and counts its own."""
    return 1 if run.engine.kind == "single" else (run.launch.devices_per_node or 1) * (run.launch.nodes or 1)


class Length(NamedTuple):
    """How long the run is."""

    steps: int
    batches: int | None
    """Batches to learn from; None: the steps count."""
    batches_per_contribution: int
    batches_per_step: int
    batches_per_shard: int | None
    """Batches of an epoch that one worker has."""
    batches_per_epoch: int | None
    worker_steps: int
    """Steps of a worker, by which its schedule goes."""
    cut: Cut | None = None
    """How the data is cut into units, where they are leased."""


def length_of(run: Run, samples: data.Data, policy: Policy, expected: int) -> Length:
    """max_steps or the epochs, whichever comes first. A step is an update of the weights, made of one contribution or of several."""
    contributions = expected if isinstance(policy.rounds, Barrier) else policy.rounds.contributions
    units = isinstance(run.strategy, WorkUnits)
    each = run.strategy.batches_per_unit if isinstance(run.strategy, WorkUnits) else run.training.gradient_accumulation_steps
    ranks = ranks_of(run)
    per_step = each * contributions * ranks
    whole, size = run.training.global_batch_size, (run.training.batch_size or 0) * per_step
    if whole is not None and whole != size:
        devices = f" × {ranks} devices" if ranks > 1 else ""
        raise ShoalError(
            f"training.global_batch_size is {whole}, and an update is made of {size} samples: training.batch_size × "
            f"training.gradient_accumulation_steps × {contributions} contributions{devices}"
        )
    if isinstance(run.strategy, DiLoCo):
        return _length_in_rounds(run, samples, policy, expected)
    if units:
        return _length_in_units(run, samples, each, contributions)
    shard = feed_of(run, samples, 0, expected).batches_per_epoch
    per_epoch = shard * expected if shard else None
    batches = run.training.epochs * per_epoch if run.training.epochs and per_epoch else None
    by_epochs = max(1, batches // per_step) if batches is not None else None
    most = run.training.max_steps
    if by_epochs is None and most is None:
        raise ShoalError("a stream has no end: set training.max_steps")
    if by_epochs is None or (most is not None and most < by_epochs):
        assert most is not None
        return Length(most, None, each * ranks, per_step, shard, per_epoch, most)
    assert batches is not None
    return Length(by_epochs, by_epochs * per_step, each * ranks, per_step, shard, per_epoch, by_epochs)


def _length_in_units(run: Run, samples: data.Data, each: int, contributions: int) -> Length:
    """Units cover every sample of every epoch, to the last one."""
    per_epoch = feed_of(run, samples).batches_per_epoch
    if per_epoch is None:
        raise ShoalError("work units are pieces of data that has an end; a stream has none: choose another strategy")
    most = run.training.max_steps
    per_unit = -(-per_epoch // each)
    cut = Cut(per_epoch, each, run.training.epochs or -(-(most or 1) * contributions // per_unit))
    by_epochs = -(-cut.total // contributions)
    batches = None if most is not None and most < by_epochs else per_epoch * cut.total_epochs
    steps = min(most or by_epochs, by_epochs)
    return Length(steps, batches, each, each * contributions, per_epoch, per_epoch, steps, cut)


def _length_in_rounds(run: Run, samples: data.Data, policy: Policy, expected: int) -> Length:
    """Every worker takes the steps of a run alone; each round has some of them, and the last what is left.

    Where rounds differ in what they are made of, because some workers are late or slow, the data counts, not the rounds.
    """
    settings, inner = run.strategy, policy.inner
    assert isinstance(settings, DiLoCo)
    assert inner is not None
    shard = feed_of(run, samples, 0, expected).batches_per_epoch
    ranks = ranks_of(run)
    steps = total_steps(run.replace(training=run.training.replace(global_batch_size=None)), shard and max(1, shard // ranks))
    rounds, each = -(-steps // inner.steps), inner.steps * run.training.gradient_accumulation_steps * ranks
    by_data = settings.quorum is not None or settings.balance_speeds
    batches = steps * run.training.gradient_accumulation_steps * ranks * expected if by_data else None
    return Length(rounds, batches, each, each * expected, shard, shard * expected if shard else None, steps)


def fragments_of(layouts: Mapping[str, Layout], policy: Policy) -> tuple[Span, ...]:
    """The parts of the weights that rounds take in turn; none: each round moves all of them."""
    if policy.inner is None or policy.inner.fragments == 1:
        return ()
    return spans((slot.size for layout in layouts.values() for slot in layout.slots), policy.inner.fragments)


def fingerprint(samples: data.Data) -> str:
    """Tells different data apart: its size, and a few samples of it. A stream is only known by its name."""
    digest = hashlib.sha256(samples.info.name.encode() if not isinstance(samples.train, data.Samples) else b"")
    if isinstance(samples.train, data.Samples):
        count = len(samples.train)
        digest.update(str(count).encode())
        chosen = sorted({count * i // 16 for i in range(16)}) if count else []
        for name, value in sorted(samples.train.batch(chosen).items()):
            digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()
