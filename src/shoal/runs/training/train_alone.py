"""Builds a run without a coordinator. Each process of its engine calls `prepare`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shoal.config import Run
from shoal.config.load import LoadedConfig
from shoal.config.ranks import RankPlace
from shoal.data import local_fingerprint
from shoal.data.interfaces import Progress
from shoal.engines import World, choose_device, cuda_graph, enter
from shoal.engines.pipeline.engine import PipelineEngine
from shoal.engines.precision import fp8
from shoal.errors import ShoalError
from shoal.protocol.tunnel import LoopbackTunnel
from shoal.runs import stage_placement
from shoal.runs.build_run import (
    RunParts,
    assemble,
    evaluation_batches,
    expect_same_data,
    find_run_to_resume,
    newest_checkpoint,
    sample_writer,
    warn_reporters,
    write_run,
)
from shoal.runs.folder.checkpoint import copy_to_all, find_checkpoint, read_checkpoint
from shoal.runs.folder.run_directory import ReadOnlyDirectory, RunDirectory
from shoal.runs.live_objects import NO_LIVE_OBJECTS, LiveObjects
from shoal.runs.monitoring.recorder import Recorder, Reporter
from shoal.runs.training.loop import TrainingLoop
from shoal.updates.state_packing import Checkpoint


def prepare(
    loaded: LoadedConfig,
    *,
    run_dir: str | None,
    resume: bool,
    reporters: list[Reporter],
    progress: Progress | None = None,
    here: RankPlace | None = None,
    tunnel: LoopbackTunnel | None = None,
    live: LiveObjects = NO_LIVE_OBJECTS,
) -> TrainingLoop:
    """A loop that is ready to train, new or resumed. `here`: rank of this process, where all processes of an engine call this; `tunnel`: to
    the others, where each is on a machine of its own."""
    run = loaded.run
    warn = warn_reporters(reporters)
    device = choose_device(run.training.device, here.local_rank if here else 0)
    fp8.check(run.training, device)
    cuda_graph.check(run.training, device)
    world = enter(here, device, tunnel) if here else None
    own = Path(run_dir or run.output_dir)
    directory, checkpoint, start = _first_decides(world, lambda: _find_start(run, run_dir, resume, here, warn), own)
    parts = assemble(run, progress, directory.path if directory else None, here=here, world=world, live=live)
    if directory is not None and checkpoint is not None and parts.engine.world.first:
        expect_same_data(directory, parts.data)
    if directory is None:
        directory = _created_by_first(world, lambda: RunDirectory.create(run, run_dir, warn), own)
    if world is not None and world.apart:
        _expect_the_same_data(world, parts)
    elif run.placed:
        _report_stages(run, parts, reporters)
    with directory.kept_if_begun():
        return _loop(loaded, parts, directory, reporters, checkpoint, start)


def _report_stages(run: Run, parts: RunParts, reporters: list[Reporter]) -> None:
    """Report the stages of a pipeline, and the machine that each is for. Raises ShoalError where no machine fits a stage."""
    assert isinstance(parts.engine, PipelineEngine)
    stages = stage_placement.stages_of(run, parts.engine.layers, parts.data.info.vocab_size or 0)
    names = stage_placement.listed_machines(run)
    machines = stage_placement.place_stages(run, stages, names) if names else {}
    for reporter in reporters:
        if rest := stage_placement.format_rest(run, stages):
            reporter.message(f"note: {rest}")
        reporter.message(f"stages: {stage_placement.format_stages(stages, machines)}")


def _loop(
    loaded: LoadedConfig,
    parts: RunParts,
    directory: RunDirectory,
    reporters: list[Reporter],
    checkpoint: Checkpoint | None,
    start: Checkpoint | None,
) -> TrainingLoop:
    run = loaded.run
    if checkpoint is None:
        directory.forget_after(-1)
    warmup, steps, warn = run.training.schedule.warmup_steps, parts.engine.total_steps, warn_reporters(reporters)
    if run.training.max_steps is None and warmup >= steps:  # otherwise the settings' check says it
        warn(f"the warm-up of {warmup} steps does not end within the run of {steps}")
    write_run(loaded, parts, directory, reporters)
    recorder = Recorder(run, parts.engine, parts.feed, directory, reporters)
    loop = TrainingLoop(recorder, parts.engine, parts.feed, evaluation_batches(parts), sample_writer(parts, directory))
    for note in parts.engine.notes:
        recorder.message(note)
    parts.feed.start(warn, new=checkpoint is None)
    if (begun := checkpoint or start) is not None:
        loop.resume(begun, same_run=begun is checkpoint)
    return loop


ResumePoint = tuple[RunDirectory | None, Checkpoint | None, Checkpoint | None]


def _find_start(run: Run, run_dir: str | None, resume: bool, here: RankPlace | None, warn: Callable[[str], None]) -> ResumePoint:
    """The run to resume, its checkpoint, and another run's checkpoint to start from; each may be None."""
    directory, checkpoint = None, None
    if resume or (here is not None and here.restart):
        try:
            directory = find_run_to_resume(run, run_dir, warn)
            checkpoint = newest_checkpoint(directory, run, warn)
            directory.occupied()
        except ShoalError:
            if resume:
                raise  # else torchrun has restarted processes that had not created a folder yet
    start = find_checkpoint(run.checkpoint.resume_from, warn) if run.checkpoint.resume_from and checkpoint is None else None
    return directory, checkpoint, start


def _first_decides(world: World | None, decide: Callable[[], ResumePoint], own: Path) -> ResumePoint:
    """The first process finds and verifies the checkpoints for all. `own`: a folder of this process, if none is shared."""
    if world is None:
        return decide()
    found = decide() if world.first else (None, None, None)
    paths = ["" if one is None else str(one.path) for one in found]
    directory, *checkpoints = [Path(path) if path else None for path in world.broadcast_text("\n".join(paths)).split("\n")]
    if world.apart:
        checkpoints = [copy_to_all(path, world, own) if path else None for path in checkpoints]
        directory = own if directory else None
    if world.first:
        return found
    checkpoint, start = [read_checkpoint(path, verify=False) if path else None for path in checkpoints]
    return ReadOnlyDirectory(directory) if directory else None, checkpoint, start


def _expect_the_same_data(world: World, parts: RunParts) -> None:
    """Raises ShoalError where machines that share no folder have different data."""
    first, *others = world.texts(str(local_fingerprint(parts.data)))
    wrong = [rank for rank, one in enumerate(others, 1) if one != first]
    if wrong:
        raise ShoalError(
            f"the data of machine {wrong[0]} of {world.size} is not that of the first: put the same files in place there, "
            "or name them when it joins: --set data.source.path=…"
        )


def _created_by_first(world: World | None, make: Callable[[], RunDirectory], own: Path) -> RunDirectory:
    if world is None:
        return make()
    made = make() if world.first else None
    path = world.broadcast_text(str(made.path) if made else "")
    return made or ReadOnlyDirectory(own if world.apart else Path(path))
