"""A run alone, put together. Its engine may be made of several processes, each of which comes here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shoal.config import Run
from shoal.config.load import Loaded
from shoal.config.ranks import Place
from shoal.engines import World, choose_device, enter
from shoal.errors import ShoalError
from shoal.runs.assembly import (
    Parts,
    Progress,
    assemble,
    continued,
    expect_same_data,
    held_out,
    sampler,
    tell_changes,
    warner,
    write_info,
)
from shoal.runs.beginnings import keep_start
from shoal.runs.checkpoint import Checkpoint, find, read
from shoal.runs.given import NOTHING, Given
from shoal.runs.loop import Loop
from shoal.runs.recorder import Recorder, Reporter
from shoal.runs.rollouts import RolloutFeed
from shoal.runs.run_directory import RunDirectory, SilentDirectory


def prepare(
    loaded: Loaded,
    *,
    run_dir: str | None,
    resume: bool,
    reporters: list[Reporter],
    progress: Progress | None = None,
    here: Place | None = None,
    given: Given = NOTHING,
) -> Loop:
    """A loop that is ready to train, new or continued. `here`: as one of several processes, which all must get here."""
    run = loaded.run
    warn = warner(reporters)
    world = enter(here, choose_device(run.training.device, here.local_rank)) if here else None
    directory, checkpoint, start = _first_decides(world, lambda: _begin_with(run, run_dir, resume, here, warn))
    parts = assemble(run, progress, directory.path if directory else None, here=here, world=world, given=given)
    if directory is not None and checkpoint is not None and parts.engine.world.first:
        expect_same_data(directory, parts.data)
    if directory is None:
        directory = _made_by_first(world, lambda: RunDirectory.create(run, run_dir))
    with directory.kept_if_begun():
        return _loop(loaded, parts, directory, reporters, checkpoint, start)


def _loop(
    loaded: Loaded,
    parts: Parts,
    directory: RunDirectory,
    reporters: list[Reporter],
    checkpoint: Checkpoint | None,
    start: Checkpoint | None,
) -> Loop:
    run = loaded.run
    if checkpoint is None:
        directory.forget_after(-1)
    if run.training.schedule.warmup_steps >= parts.engine.total_steps:
        warner(reporters)(
            f"the warm-up of {run.training.schedule.warmup_steps} steps does not end within the run of {parts.engine.total_steps}"
        )
    tell_changes(directory.write_config(loaded), reporters)
    if parts.engine.world.first:
        write_info(directory, parts.data)
        keep_start(run, parts.engine.task.players, directory.path)
    recorder = Recorder(run, parts.engine, parts.feed, directory, reporters)
    judged = held_out(run, parts.data.eval)
    loop = Loop(recorder, parts.engine, parts.feed, judged, sampler(parts, directory))
    if isinstance(parts.feed, RolloutFeed):
        parts.feed.warn = warner(reporters)
        if checkpoint is None and parts.feed.starts_at_random:
            parts.feed.warn("rlhf.policy is not given: the policy starts from random weights")
        loop.held_out = parts.feed.judged if parts.feed.held_out and run.evaluation.strategy != "never" else None
    if checkpoint is not None:
        loop.resume(checkpoint, same_run=True)
    elif start is not None:
        loop.resume(start, same_run=False)
    return loop


Beginning = tuple[RunDirectory | None, Checkpoint | None, Checkpoint | None]


def _begin_with(run: Run, run_dir: str | None, resume: bool, here: Place | None, warn: Callable[[str], None]) -> Beginning:
    """The run to go on with, its checkpoint, and another run's checkpoint to start from, where there are such."""
    directory, checkpoint = None, None
    if resume or (here is not None and here.restart):
        try:
            directory, checkpoint = continued(run, run_dir, warn)
        except ShoalError:
            if resume:
                raise  # else torchrun has started processes again that had not got as far as a folder
    start = find(run.checkpoint.resume_from, warn) if run.checkpoint.resume_from and checkpoint is None else None
    return directory, checkpoint, start


def _first_decides(world: World | None, decide: Callable[[], Beginning]) -> Beginning:
    """One process looks and verifies; the others read what it chose."""
    if world is None:
        return decide()
    found = decide() if world.first else (None, None, None)
    paths = ["" if one is None else str(one.path) for one in found]
    directory, *checkpoints = [Path(path) if path else None for path in world.broadcast_text("\n".join(paths)).split("\n")]
    if world.first:
        return found
    checkpoint, start = [read(path, verify=False) if path else None for path in checkpoints]
    return SilentDirectory(directory) if directory else None, checkpoint, start


def _made_by_first(world: World | None, make: Callable[[], RunDirectory]) -> RunDirectory:
    if world is None:
        return make()
    made = make() if world.first else None
    path = world.broadcast_text(str(made.path) if made else "")
    return made or SilentDirectory(Path(path))
