"""Nobody else: one worker, one loop."""

from __future__ import annotations

from shoal.config.load import Loaded
from shoal.strategies.assembly import Progress, assemble, continued, held_out, refuse_unbuilt, sampler, warner, write_info
from shoal.worker import Loop, Reporter, RunDirectory
from shoal.worker.checkpoint import find


def prepare(loaded: Loaded, *, run_dir: str | None, resume: bool, reporters: list[Reporter], progress: Progress | None = None) -> Loop:
    """A loop that is ready to train, new or continued."""
    refuse_unbuilt(loaded)
    run = loaded.run
    warn = warner(reporters)
    directory, checkpoint = continued(run, run_dir, warn) if resume else (None, None)
    start = find(run.checkpoint.resume_from, warn) if run.checkpoint.resume_from and checkpoint is None else None
    parts = assemble(run, progress, directory.path if directory else None)
    if directory is None:
        directory = RunDirectory.create(run, run_dir)
    if checkpoint is None:
        directory.forget_after(-1)
    if run.training.schedule.warmup_steps >= parts.engine.total_steps:
        warn(f"the warm-up of {run.training.schedule.warmup_steps} steps does not end within the run of {parts.engine.total_steps}")
    directory.write_config(loaded)
    write_info(directory, parts.data.info)
    loop = Loop(run, parts.engine, parts.feed, held_out(run, parts.data.eval), directory, reporters, sampler(parts, directory))
    if checkpoint is not None:
        loop.resume(checkpoint, same_run=True)
    elif start is not None:
        loop.resume(start, same_run=False)
    return loop
