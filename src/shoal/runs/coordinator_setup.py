"""Builds a coordinator: a new one, or one restored from its storage."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from shoal import data, strategies
from shoal.config import Run
from shoal.config.load import LoadedConfig
from shoal.config.plugins import needed_by
from shoal.config.schema.cluster import Transport
from shoal.coordinator import Coordinator
from shoal.coordinator.durable.contribution_files import ContributionFiles
from shoal.coordinator.round_policies import WholeBlock
from shoal.coordinator.run_plan import MemberLimits, RelayPlace, RunPlan
from shoal.data.interfaces import Progress
from shoal.data.text.tokenizers.files import saved_files
from shoal.engines import choose_device
from shoal.engines.expert_layout import episode_rows, expert_blocks
from shoal.engines.learners.apply import AdoptWeights, EngineLearner
from shoal.engines.single import free_memory
from shoal.errors import ShoalError
from shoal.runs.build_run import assemble, expect_same_data, warn_reporters, write_run
from shoal.runs.coordinator_run import CoordinatorLoop, RunAgreement
from shoal.runs.folder.checkpoint import find_checkpoint, load_weights
from shoal.runs.folder.repair import confirmed_in, refuse_forgotten
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.invitation import Invitation
from shoal.runs.live_objects import NO_LIVE_OBJECTS, LiveObjects
from shoal.runs.monitoring.recorder import Reporter
from shoal.runs.owner import write_owner_file
from shoal.runs.relay import Relay
from shoal.runs.run_size import data_extent, needed_contributions, ranks_per_worker, weight_per_sample
from shoal.runs.storage import RunStorage, storage_for
from shoal.runs.task_split import SplitInput, TaskSplit, listed_workers, relayed_tasks, split_into_tasks
from shoal.runs.training.contribution_scorer import HeldOutScorer
from shoal.runs.worker_run import JoinedWorker
from shoal.strategies import RunLength
from shoal.transports import Message
from shoal.transports.connect import needs_keys
from shoal.updates import codecs

_ENDLESS = 2**31
_MOST_DEVICES = 8
"""Devices of a worker where the settings give no number: those of one large machine."""


class ReadyCoordinator(NamedTuple):
    loop: CoordinatorLoop
    invitation: Invitation


def prepare(
    loaded: LoadedConfig,
    *,
    run_dir: str | None,
    resume: bool,
    reporters: list[Reporter],
    progress: Progress | None = None,
    workers: int | None = None,
    hosts: tuple[str, ...] = (),
    transport: Transport | None = None,
    live: LiveObjects = NO_LIVE_OBJECTS,
    above: JoinedWorker | None = None,
) -> ReadyCoordinator:
    """A coordinator, new or resumed, that listens. `above`: for a relay, its membership at the coordinator above."""
    run = loaded.run
    place = transport or run.transport
    home = storage_for(run, run_dir, resume, place, hosts, warn_reporters(reporters))
    expected = home.expected or workers or run.cluster.num_workers or max(1, needed_contributions(run))
    if above is None:
        agreed = agree(run, expected, home.directory, progress, live)
    else:
        agreed = _agree_below(run, expected, above, home.directory, progress)
    directory = home.directory or RunDirectory.create(run, run_dir, warn_reporters(reporters))
    if home.directory is not None:
        expect_same_data(directory, agreed.parts.data)
    with directory.kept_if_begun():
        made = _coordinating(loaded, home, directory, agreed, place, hosts, resume, reporters)
        if above is not None:
            loop = made.loop
            loop.relay = Relay(above, loop.coordinator, loop.learner, loop.driver, directory.path, loop.server.wake, loop.message)
        return made


def _coordinating(
    loaded: LoadedConfig,
    home: RunStorage,
    directory: RunDirectory,
    agreed: RunAgreement,
    place: Transport,
    hosts: tuple[str, ...],
    resume: bool,
    reporters: list[Reporter],
) -> ReadyCoordinator:
    run, warn = loaded.run, warn_reporters(reporters)
    write_run(loaded, agreed.parts, directory, reporters)
    _warn_of_gaps(place, hosts, run, agreed, warn)
    learner = agreed.policies.apply.learner(agreed.parts.single, agreed.spans, agreed.parts.feed)
    welcome = _welcome(run, directory, agreed, learner)
    opened = home.open(directory, welcome, _largest_frame(run, learner, welcome), agreed.expected)
    opened = opened._replace(board=opened.board if agreed.policies.feed.leased else None)
    plan = plan_for(run, agreed)._replace(rollouts=learner.intake)
    if run.updates.scorer.enabled and agreed.above is None:
        plan = plan._replace(scorer=HeldOutScorer(agreed.parts, random.SystemRandom()))
    for reporter in reporters if run.scheduled and agreed.above is None and _cut(run, agreed).note else ():
        reporter.message(_cut(run, agreed).note)
    bounds = plan.bounds._replace(guests=opened.guests)
    # Threads of this process have no address, so their run has no owner file
    owner = write_owner_file(directory.path, opened.invitation) if place.kind != "in-process" else ""
    plan = plan._replace(leased_elsewhere=opened.board is not None, receipt_key=opened.store.receipt_key, bounds=bounds, owner_key=owner)
    plan = plan._replace(held_files=_held_files(run, plan, learner, directory, warn))
    coordinator = Coordinator(plan, agreed.policies, learner)
    loop = CoordinatorLoop(agreed, coordinator, learner, directory, opened, reporters, welcome, _evaluation_device(run, warn))
    agreed.parts.feed.start(lambda text: loop.message(f"warning: {text}"), new=not resume)
    try:
        _go_on(loop, run, resume, warn)
    except BaseException:
        loop.driver.close()  # releases the lock of the folder
        opened.server.close()
        raise
    warning = loop.privacy.warning(loaded.settings.spelling("updates.privacy.noise_multiplier")) if run.updates.privacy.enabled else ""
    if warning:
        loop.message(warning)
    return ReadyCoordinator(loop, opened.invitation)


def _held_files(
    run: Run, plan: RunPlan, learner: EngineLearner, directory: RunDirectory, tell: Callable[[str], None]
) -> ContributionFiles | None:
    """Where contributions wait, if not in memory."""
    wanted, decoded = run.coordinator.held_in, 4 * learner.vector.numel() * plan.expected
    reason = _not_in_files(run, plan)
    if wanted == "file" and reason:
        raise ShoalError(f"coordinator.held_in: file: contributions of this run wait in memory, since {reason}")
    memory = free_memory(torch.device("cpu"))
    large = memory is not None and decoded > memory / 4
    if wanted == "memory" or not (wanted or large):
        return None
    if reason:
        tell(f"contributions of {plan.expected} workers take {decoded / 1e9:.1f} GB of memory until their round closes, since {reason}")
        return None
    tell(
        f"contributions wait in files in {directory.path}: decoded, those of {plan.expected} workers would take {decoded / 1e9:.1f} GB "
        "(coordinator.held_in)"
    )
    return ContributionFiles(directory.path)


def _not_in_files(run: Run, plan: RunPlan) -> str:
    """Why contributions of a run cannot wait in files; empty: they can."""
    if plan.rollouts is not None:
        return "they are answers"
    if plan.experts is not None:
        return "workers may hold some experts only"
    if run.updates.scorer.enabled:
        return "updates.scorer measures all of a round"
    if run.updates.memory:
        return "updates.memory keeps a mean of each worker there"
    return ""


def agree(
    run: Run, expected: int, directory: RunDirectory | None, progress: Progress | None, live: LiveObjects, known: data.Data | None = None
) -> RunAgreement:
    """The parts of the run and what its workers must agree on. `known`: the data, if loaded."""
    if run.engine.experts is not None:
        raise ShoalError(
            "engine.experts: a coordinator holds all experts; a worker names its own: shoal join … --set 'engine.experts=[0,1]'"
        )
    policies, lengths = strategies.policies_for(run, expected), list[RunLength]()

    def steps(samples: data.Data) -> int:
        lengths.append(policies.length(data_extent(run, samples, expected)))
        return lengths[0].steps

    coordinated = run if policies.apply.computes else run.replace(training=run.training.replace(device="cpu", compile=False))
    parts = assemble(coordinated, progress, directory.path if directory else None, steps, live=live, known=known)
    return RunAgreement(parts, policies, lengths[0], policies.spans(parts.single.layouts), expected)


def _agree_below(run: Run, expected: int, joined: JoinedWorker, directory: RunDirectory | None, progress: Progress | None) -> RunAgreement:
    """The same for a relay's own workers. The length of the run and its data are those of the coordinator above."""
    header, policies = joined.welcome.header, strategies.policies_for(run, expected)
    if reason := strategies.no_relay(run, policies, strategies.policies_for(joined.run, header["shards"])):
        raise ShoalError(f"this run cannot have relays: {reason}")
    most = devices_per_worker(run) // ranks_per_worker(run)
    if expected > most:
        raise ShoalError(
            f"a relay for {expected} workers, and the run above lets one that joins count for {most} "
            f"(coordinator.devices_per_worker): take fewer, or raise it there"
        )
    made = agree(run, header["shards"], directory, progress, NO_LIVE_OBJECTS)
    above = RelayPlace(header["seat"], header["shards"], made.length.batches_per_shard)
    rounds = WholeBlock(deadline_s=policies.rounds.deadline_s) if run.scheduled else policies.rounds
    return made._replace(policies=replace(policies, apply=AdoptWeights(), rounds=rounds), expected=expected, above=above)


def plan_for(run: Run, agreed: RunAgreement) -> RunPlan:
    """The plan of the coordinator. A relay's run ends when the coordinator above ends it."""
    plan, above = _plan_of(run, agreed), agreed.above
    if above is None:
        return plan
    return plan._replace(
        total_steps=_ENDLESS,
        total_batches=None,
        worker_steps=_ENDLESS,
        batches_per_step=agreed.length.batches_per_contribution * agreed.expected,
        batches_per_shard=data_extent(run, agreed.parts.data, agreed.shards).batches_of_shard(agreed.shards),
        tasks=relayed_tasks(run, agreed.length.batches_per_contribution) if run.scheduled else None,
        above=above,
    )


def devices_per_worker(run: Run) -> int:
    """The largest number of devices that one worker may count for."""
    return run.coordinator.devices_per_worker or max(_MOST_DEVICES, ranks_per_worker(run))


def _plan_of(run: Run, agreed: RunAgreement) -> RunPlan:
    feed, length, samples, task = agreed.policies.feed, agreed.length, agreed.parts.data.train, agreed.parts.engine.task
    return RunPlan(
        updates=run.updates,
        seed=run.seed,
        expected=agreed.expected,
        needed=needed_contributions(run),
        total_steps=length.steps,
        total_batches=length.batches,
        batches_per_step=length.batches_per_step,
        heartbeat_interval_s=run.coordinator.heartbeat_interval_s,
        telemetry_alpha=run.coordinator.telemetry_alpha,
        cut=length.cut,
        lease_s=feed.lease_s,
        attempts=feed.attempts,
        most_lag=feed.most_lag,
        pull_every=agreed.policies.pull.every,
        worker_steps=length.worker_steps,
        spans=agreed.spans,
        experts=expert_blocks(agreed.parts.single, agreed.policies.expert_cap, run.updates.experts_apart),
        episodes=episode_rows(agreed.parts.single),
        figures=("loss", task.headline, *(f"{player}_loss" for player in task.players)),
        samples_per_batch=length.samples_per_batch or run.training.batch_size,
        samples_per_epoch=_samples_per_epoch(length, samples),
        weight_per_sample=weight_per_sample(run, samples),
        batches_per_shard=None if feed.leased else length.batches_per_shard,
        bounds=MemberLimits(
            joins_per_minute=run.coordinator.joins_per_minute,
            failures=run.coordinator.failures_per_worker,
            sessions=run.coordinator.workers_at_once,
            devices=devices_per_worker(run),
        ),
        tasks=_cut(run, agreed).tasks if run.scheduled and agreed.above is None else None,
        listed=listed_workers(run),
    )


def _samples_per_epoch(length: RunLength, samples: object) -> int | None:
    if length.samples_per_batch is not None and length.batches_per_epoch is not None:
        return length.samples_per_batch * length.batches_per_epoch
    return len(samples) if isinstance(samples, data.Samples) else None


def _cut(run: Run, agreed: RunAgreement) -> TaskSplit:
    """The data divided into tasks. The bytes of a contribution decide how much a worker's bandwidth counts."""
    length, size = agreed.length, agreed.parts.engine.vector.numel()
    extent = SplitInput(
        batches=length.batches_per_epoch or 0,
        grain=length.batches_per_contribution,
        workers=max(agreed.expected, needed_contributions(run)),
        parameters=size,
        vocabulary=agreed.parts.data.info.vocab_size or 0,
        megabits=8e-6 * (codecs.encoded_bytes(run.updates.codec, size) + 4 * size),
        frozen_bytes=agreed.parts.frozen_bytes,
    )
    return split_into_tasks(run, extent)


def _go_on(loop: CoordinatorLoop, run: Run, resume: bool, warn: Callable[[str], None]) -> None:
    """Restore the run from its last snapshot, start from another run's weights, or leave the initial weights."""
    for note in loop.engine.notes:
        loop.message(note)
    snapshots, weights = loop.store.snapshots, run.coordinator.checkpoint_path
    snapshot = snapshots.newest(warn) if resume else None
    if snapshot is not None:
        loop.recover(snapshot)
        confirmed = confirmed_in(loop.directory.path / "workers", loop.coordinator.plan.receipt_key, warn)
        refuse_forgotten(Path(str(snapshot.path)).parents[1], loop.coordinator.state.sequences, confirmed)
    elif resume and snapshots.all():
        raise ShoalError(
            "no snapshot of the coordinator can be read: put one back from a backup, or start a new run with the weights of the last "
            f"checkpoint: --set checkpoint.resume_from={loop.directory.path}"
        )
    elif weights and Path(weights).exists():
        loop.engine.load_weights(load_weights(Path(weights)))
        loop.coordinator.publisher.publish(0, loop.learner.vector, loop.learner.buffers)
        warn(f"going on with the weights in {weights}")
    elif run.checkpoint.resume_from:
        loop.begin_from(find_checkpoint(run.checkpoint.resume_from, warn))


def _evaluation_device(run: Run, warn: Callable[[str], None]) -> torch.device:
    """The device for evaluations: the one that a worker would use, if this machine has it, else the CPU."""
    try:
        return choose_device(run.training.device)
    except ShoalError:
        if run.evaluation.batches != 0:
            warn(f"there is no {run.training.device} here: workers may have it, and evaluations are done on the CPU")
        return torch.device("cpu")


def _warn_of_gaps(transport: Transport, hosts: tuple[str, ...], run: Run, agreed: RunAgreement, warn: Callable[[str], None]) -> None:
    """Warn of a transport that is not encrypted, and of evaluations in another precision."""
    if transport.kind == "xmlrpc" and needs_keys(transport, hosts):
        warn("XML-RPC is not encrypted, and the token travels in clear: use it for debugging, on a network you trust")
    if run.training.precision.kind == "fp8" and agreed.parts.engine.scales is None and run.evaluation.batches != 0:
        warn("the workers train in fp8, and evaluations are done in bf16: the coordinator multiplies on the CPU, which has no fp8")


def _largest_frame(run: Run, learner: EngineLearner, welcome: Message) -> int:
    """Upper bound of the bytes of a frame in this run. LoRA matrices may be smaller than a file of the tokenizer."""
    size = learner.vector.numel()
    files = (len(frame) for frame in welcome.frames)
    return max(4 * size, codecs.encoded_bytes(run.updates.codec, size), 4 * learner.buffers.numel(), *files) + (1 << 20)


def _welcome(run: Run, directory: RunDirectory, agreed: RunAgreement, learner: EngineLearner) -> Message:
    """The welcome message of every worker: the configuration, the fingerprint of the data, and the tokenizer's files."""
    text = (directory.path / "config.yaml").read_text(encoding="utf-8")
    files = saved_files(directory.path / "tokenizer")
    return Message(
        {
            "config": text,
            "plugins": needed_by(run),
            "digest": hashlib.sha256(text.encode()).hexdigest(),
            "data": data.fingerprint(agreed.parts.data),
            "shards": agreed.shards,
            "total_steps": agreed.length.worker_steps,
            "heartbeat_s": run.coordinator.heartbeat_interval_s,
            "tokenizer": list(files),
            "size": learner.vector.numel(),
        },
        tuple(path.read_bytes() for path in files.values()),
    )
