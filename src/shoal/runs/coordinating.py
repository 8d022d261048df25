"""A coordinator put together: new, or as it was when it ended."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from shoal import data
from shoal.config import Run
from shoal.config.load import Loaded
from shoal.config.schema.cluster import Transport
from shoal.config.schema.strategy import DiLoCo
from shoal.coordinator import Coordinator
from shoal.coordinator.machine import Plan
from shoal.engines import choose_device
from shoal.errors import ShoalError
from shoal.runs.agreement import Length, fingerprint, fragments_of, length_of, needed, policy_of
from shoal.runs.assembly import Parts, Progress, assemble, refuse_unbuilt, warner, write_info
from shoal.runs.checkpoint import find, load_weights
from shoal.runs.cluster_loop import ClusterLoop
from shoal.runs.given import NOTHING, Given
from shoal.runs.homes import home_of
from shoal.runs.inviting import Invitation
from shoal.runs.learners import EngineLearner, OuterLearner
from shoal.runs.reporter import Reporter
from shoal.runs.run_directory import RunDirectory
from shoal.strategies.diloco import averages
from shoal.transports import Message
from shoal.transports.connect import needs_keys
from shoal.updates import codecs


class Coordinating(NamedTuple):
    """A coordinator that is ready to serve."""

    loop: ClusterLoop
    invitation: Invitation


def prepare(
    loaded: Loaded,
    *,
    run_dir: str | None,
    resume: bool,
    reporters: list[Reporter],
    progress: Progress | None = None,
    workers: int | None = None,
    hosts: tuple[str, ...] = (),
    transport: Transport | None = None,
    given: Given = NOTHING,
) -> Coordinating:
    """A coordinator, new or continued, that listens."""
    refuse_unbuilt(loaded)
    run, warn = loaded.run, warner(reporters)
    place = transport or run.transport
    home = home_of(run, run_dir, resume, place, hosts)
    expected = home.expected or workers or run.cluster.num_workers or max(1, needed(run))
    policy = policy_of(run, expected)
    lengths: list[Length] = []

    def steps(samples: data.Data) -> int:
        lengths.append(length_of(run, samples, policy, expected))
        return lengths[0].steps

    coordinated = run.replace(training=run.training.replace(device="cpu", compile=False))
    parts = assemble(coordinated, progress, home.directory.path if home.directory else None, steps, given=given)
    directory = home.directory or RunDirectory.create(run, run_dir)
    directory.write_config(loaded)
    write_info(directory, parts.data.info)
    welcome = _welcome(run, directory, parts, lengths[0], expected)
    spans = fragments_of(parts.single.layouts, policy)
    learner = EngineLearner(parts.single)
    if isinstance(run.strategy, DiLoCo):
        learner = OuterLearner(parts.single, run.strategy, spans, averages=averages(run))
    plan = Plan(
        updates=run.updates,
        seed=run.seed,
        expected=expected,
        needed=needed(run),
        total_steps=lengths[0].steps,
        total_batches=lengths[0].batches,
        batches_per_step=lengths[0].batches_per_step,
        heartbeat_interval_s=run.coordinator.heartbeat_interval_s,
        telemetry_alpha=run.coordinator.telemetry_alpha,
        cut=lengths[0].cut,
        worker_steps=lengths[0].worker_steps,
        spans=spans,
    )
    _tell_what_is_left_out(run, place, hosts, lengths[0], warn)
    opened = home.open(directory, welcome, _largest_frame(run, learner), expected)
    coordinator = Coordinator(plan, policy, learner)
    loop = ClusterLoop(parts, lengths[0], coordinator, opened.server, opened.store, directory, reporters, welcome, _judging(run, warn))
    snapshot = loop.snapshots.newest(warn) if resume else None
    if snapshot is not None:
        loop.recover(snapshot)
    elif resume and loop.snapshots.all():
        raise ShoalError("no snapshot of the coordinator can be read: restore one, or start a new run")
    elif run.coordinator.checkpoint_path and Path(run.coordinator.checkpoint_path).exists():
        parts.engine.load_weights(load_weights(Path(run.coordinator.checkpoint_path)))
        coordinator.publisher.publish(0, learner.vector, learner.buffers)
        warn(f"going on with the weights in {run.coordinator.checkpoint_path}")
    elif run.checkpoint.resume_from:
        start = find(run.checkpoint.resume_from, warn)
        loop.resume(start, same_run=False)
        coordinator.go_on_from(loop.step, start.state.get("coordinator", {}))
        coordinator.publisher.publish(loop.step, learner.vector, learner.buffers)
    return Coordinating(loop, opened.invitation)


def _judging(run: Run, warn: Callable[[str], None]) -> torch.device:
    """Where to evaluate: on the device that a worker would take, if this machine has it."""
    try:
        return choose_device(run.training.device)
    except ShoalError:
        if run.evaluation.batches != 0:
            warn(f"there is no {run.training.device} here: workers may have it, and evaluations are done on the CPU")
        return torch.device("cpu")


def _tell_what_is_left_out(run: Run, transport: Transport, hosts: tuple[str, ...], length: Length, warn: Callable[[str], None]) -> None:
    """What somebody might rely on, and cannot."""
    if transport.kind == "xmlrpc" and needs_keys(transport, hosts):
        warn("XML-RPC is not encrypted, and the token travels in clear: use it for debugging, on a network you trust")
    if length.batches_per_epoch is None:
        for section, settings in (("evaluation", run.evaluation), ("checkpoint", run.checkpoint)):
            if settings.strategy == "epoch":
                warn(f"a coordinator cannot see the epochs of a stream: {section} only at the end, unless {section}.every_steps is set")


def _largest_frame(run: Run, learner: EngineLearner) -> int:
    """Bytes that any frame of this run can have, and some more."""
    size = learner.vector.numel()
    return max(4 * size, codecs.encoded_bytes(run.updates.codec, size), 4 * learner.buffers.numel()) + (1 << 20)


def _welcome(run: Run, directory: RunDirectory, parts: Parts, length: Length, expected: int) -> Message:
    """What every worker is told: the configuration, what the data must be, and the tokenizer's files."""
    text = (directory.path / "config.yaml").read_text(encoding="utf-8")
    folder = directory.path / "tokenizer"
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    return Message(
        {
            "config": text,
            "digest": hashlib.sha256(text.encode()).hexdigest(),
            "data": fingerprint(parts.data),
            "shards": expected,
            "total_steps": length.worker_steps,
            "heartbeat_s": run.coordinator.heartbeat_interval_s,
            "tokenizer": [path.name for path in files],
            "size": parts.engine.vector.numel(),
        },
        tuple(path.read_bytes() for path in files),
    )
