"""`shoal train`: train what a configuration describes."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from shoal.cli.main import report
from shoal.cli.options import load, parse, parser, require
from shoal.config.load import Loaded
from shoal.config.problems import ConfigError


def run(argv: list[str]) -> int:
    made = parser("train", "Train a model.")
    made.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: a new one in output_dir)")
    made.add_argument("--resume", action="store_true", help="go on with the run in --run-dir, or the newest with these settings")
    arguments, overrides = parse(made, argv)
    continued = arguments.resume and arguments.run_dir and not arguments.files and not arguments.config
    if continued:
        arguments.files = [os.path.join(arguments.run_dir, "config.yaml")]
        arguments.dialect = "shoal"
    loaded = require(load(arguments, overrides, resolved=continued))
    if loaded.problems:
        report(ConfigError(loaded.problems))
    return train(loaded, arguments.run_dir, arguments.resume)


def train(loaded: Loaded, run_dir: str | None = None, resume: bool = False) -> int:
    """Train, with progress on standard error and the outcome on standard output."""
    from shoal.strategies.local import prepare
    from shoal.watch.progress import figures, progress_for
    from shoal.watch.sinks import sinks_for

    progress = progress_for(sys.stderr, loaded.run.log_level)
    loop = prepare(loaded, run_dir=run_dir, resume=resume, reporters=[progress, *sinks_for(loaded.run)], progress=_download)
    progress.message(
        f"{loop.engine.task.__class__.__name__} on {loop.engine.device}, {loop.engine.size:,} parameters, in {loop.directory.path}"
    )

    own = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:  # a process that loads data: it ends with this one
            return
        if loop.stopping == "interrupted":
            os._exit(130)
        loop.stopping = "interrupted"
        progress.message("stopping after this step and saving; once more to stop at once")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        summary = loop.train()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    final = summary["metrics"]["eval"] or summary["metrics"]["train"]
    print(f"{summary['status']} after {summary['steps']} steps, {summary['samples']} samples, {summary['wall_s']:.1f} s: {figures(final)}")
    print(f"run: {loop.directory.path}")
    return 130 if summary["status"] == "interrupted" else 0


def _download(what: str, done: int, total: int | None) -> None:
    size = f"{done >> 20} of {total >> 20} MiB" if total else f"{done >> 20} MiB"
    end = "\n" if total and done >= total else "\r"
    sys.stderr.write(f"downloading {what}: {size}{end}")
