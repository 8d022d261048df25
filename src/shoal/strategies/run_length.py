"""Length of a run: `max_steps` or the epochs, whichever ends first."""

from __future__ import annotations

from collections.abc import Callable

from shoal.config import Run
from shoal.config.rules.training import fitting
from shoal.coordinator.round_policies import Every
from shoal.coordinator.units.cut import DataCut
from shoal.errors import ShoalError
from shoal.strategies.policy_set import DataExtent, RunLength

_ENDLESS = "a stream has no end that is known beforehand: set training.max_steps; a run ends with training.epochs if those are over sooner"


def alone(run: Run, batches_per_epoch: int | None, ranks: int = 1) -> int:
    """Steps of a run without other workers."""
    accumulation, batch_size, whole = run.training.gradient_accumulation_steps, run.training.batch_size or 0, run.training.global_batch_size
    if whole is not None and whole != batch_size * accumulation * ranks:
        devices = (
            f"{ranks} devices take {batch_size} × {accumulation} × {ranks}"
            if ranks > 1
            else f"one device takes {batch_size} × {accumulation}"
        )
        raise ShoalError(
            f"training.global_batch_size is {whole}, and {devices} samples a step "
            f"(training.batch_size × training.gradient_accumulation_steps{' × devices' if ranks > 1 else ''}): "
            f"{fitting(whole, batch_size, accumulation, ranks)}"
        )
    return steps_of(run, batches_per_epoch)


def steps_of(run: Run, batches_per_epoch: int | None) -> int:
    """Steps of one worker whose epoch has `batches_per_epoch` batches."""
    accumulation = run.training.gradient_accumulation_steps
    if batches_per_epoch and accumulation > batches_per_epoch * (run.training.epochs or accumulation):
        raise ShoalError(f"training.gradient_accumulation_steps: the run has fewer than {accumulation} batches")
    limits = [run.training.max_steps] if run.training.max_steps else []
    if run.training.epochs and batches_per_epoch:
        limits.append(max(1, run.training.epochs * batches_per_epoch // accumulation))
    if not limits:
        raise ShoalError(_ENDLESS)
    return min(limits)


def in_updates(run: Run, rounds: Every) -> Callable[[DataExtent], RunLength]:
    """A step is an update of the weights, made of one contribution or of several; each is made of a gradient."""

    def length(extent: DataExtent) -> RunLength:
        each = run.training.gradient_accumulation_steps * extent.ranks
        per_step = each * rounds.expected_contributions(extent.expected)
        check_global_batch(run, per_step, extent, rounds)
        shard = extent.batches_of_shard(extent.shards)
        if extent.whole:
            shard = _of_tasks(shard, each)
        per_epoch = shard * extent.shards if shard else None
        batches = run.training.epochs * per_epoch if run.training.epochs and per_epoch else None
        by_epochs = max(1, batches // per_step) if batches is not None else None
        most = run.training.max_steps
        if by_epochs is not None and (most is None or by_epochs <= most):
            return RunLength(by_epochs, by_epochs * per_step, each, per_step, shard, per_epoch, by_epochs)
        if most is None:
            raise ShoalError(_ENDLESS)
        return RunLength(most, None, each, per_step, shard, per_epoch, most)

    return length


def _of_tasks(batches: int | None, each: int) -> int:
    """Batches of an epoch that tasks can have: contributions are whole."""
    if batches is None:
        raise ShoalError("tasks are shares of data that has an end; a stream has none: set scheduler.kind to none")
    if batches < each:
        raise ShoalError(f"an epoch has {batches} batches, and a contribution takes {each}: take more data, or a smaller batch")
    return batches // each * each


def in_units(run: Run, rounds: Every, batches_per_unit: int) -> Callable[[DataExtent], RunLength]:
    """Units cover every sample of every epoch, to the last one."""

    def length(extent: DataExtent) -> RunLength:
        check_global_batch(run, batches_per_unit * rounds.contributions, extent, rounds)
        per_epoch = extent.batches_of_shard(1)
        if per_epoch is None:
            raise ShoalError("work units are pieces of data that has an end; a stream has none: choose another strategy")
        most, contributions = run.training.max_steps, rounds.contributions
        per_unit = -(-per_epoch // batches_per_unit)
        cut = DataCut(per_epoch, batches_per_unit, run.training.epochs or -(-(most or 1) * contributions // per_unit))
        by_epochs = -(-cut.total // contributions)
        batches = None if most is not None and most < by_epochs else per_epoch * cut.total_epochs
        steps = min(most or by_epochs, by_epochs)
        return RunLength(steps, batches, batches_per_unit, batches_per_unit * contributions, per_epoch, per_epoch, steps, cut)

    return length


def in_rollouts(run: Run, prompts_per_unit: int) -> Callable[[DataExtent], RunLength]:
    """A batch is a prompt with its answers, an epoch the prompts of one rollout, and each rollout makes a version."""

    def length(extent: DataExtent) -> RunLength:
        assert run.rlhf is not None
        prompts, steps = run.rlhf.ppo.rollout_size // run.rlhf.group, run.rlhf.ppo.steps
        cut = DataCut(prompts, prompts_per_unit, steps)
        return RunLength(steps, None, prompts_per_unit, prompts, prompts, prompts, steps, cut, run.rlhf.group)

    return length


def in_rounds(run: Run, rounds: Every, inner_steps: int, by_data: bool) -> Callable[[DataExtent], RunLength]:
    """Every worker takes the steps of a run alone, divided into rounds. `by_data`: the data counts, not the rounds, as late or slow workers
    make rounds differ."""

    def length(extent: DataExtent) -> RunLength:
        accumulation = run.training.gradient_accumulation_steps
        check_global_batch(run, accumulation * extent.ranks * extent.expected, extent, rounds)
        shard = extent.batches_of_shard(extent.expected)
        steps = steps_of(run, shard and max(1, shard // extent.ranks))
        count, each = -(-steps // inner_steps), inner_steps * accumulation * extent.ranks
        batches = steps * accumulation * extent.ranks * extent.expected if by_data else None
        return RunLength(count, batches, each, each * extent.expected, shard, shard * extent.expected if shard else None, steps)

    return length


def check_global_batch(run: Run, batches_per_step: int, extent: DataExtent, rounds: Every) -> None:
    """Samples of an update are what `training.global_batch_size` says, where it says something. Raises ShoalError."""
    whole, size = run.training.global_batch_size, (run.training.batch_size or 0) * batches_per_step
    if whole is not None and whole != size:
        devices = f" × {extent.ranks} devices" if extent.ranks > 1 else ""
        raise ShoalError(
            f"training.global_batch_size is {whole}, and an update is made of {size} samples: training.batch_size × "
            f"training.gradient_accumulation_steps × {rounds.expected_contributions(extent.expected)} contributions{devices}"
        )
