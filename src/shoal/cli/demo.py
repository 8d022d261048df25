"""`shoal demo`: workers train together on this machine while some are killed and others join, in a bounded time."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.demo_scenes import SCENES, DemoEvent, Scene, require
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.launch.demo_processes import DemoProcesses, DemoProgress

SECONDS = 20.0
_NAMES = [*SCENES, "rlhf", "chat"]
_POLL_INTERVAL_S, _PRINT_INTERVAL_S = 0.1, 2.5
_BEGIN_S = 60.0
"""Time limit for the first update; on a slow machine workers take a while to load."""
_USUAL_START_S, _LEAST_S = 20.0, 10.0
"""A start that takes longer than usual shortens the training, down to this minimum, so that the demo ends on slow machines."""
_AFTER_S = 15.0
"""Extra time until the run is seen to continue after the last event, with all workers."""
_ALONE_S = 10.0
_FOREWORD = """\
Everything below runs on this machine and takes about {seconds:.0f} seconds plus the start.
Files are written to {folder}
"""


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "shoal demo",
        description="Train on built-in data with several workers, some of which are killed, and check that nothing was lost. Without a "
        "name: three workers learn to read digits.",
    )
    parser.add_argument("scene", nargs="?", default="", choices=_NAMES, metavar="SCENE", help=f"one of {', '.join(filter(None, _NAMES))}")
    parser.add_argument("--run-dir", metavar="DIR", help="where the runs go (default: a temporary folder)")
    parser.add_argument("--seconds", type=float, help=f"how long to train (default: {SECONDS:.0f}; volunteers: 45)")
    arguments = parser.parse_args(argv)
    if arguments.seconds is not None and not 1 <= arguments.seconds <= 3600:
        parser.error("--seconds takes 1 to 3600")
    folder = Path(arguments.run_dir or tempfile.mkdtemp(prefix="shoal-demo-"))
    if folder.exists() and any(folder.iterdir()):
        raise ShoalError(f"{folder} holds something already: choose another --run-dir")
    if arguments.scene in SCENES:
        _together(SCENES[arguments.scene], folder, arguments.seconds or SCENES[arguments.scene].seconds)
    else:
        from shoal.cli import demo_alone

        demo_alone.SCENES[arguments.scene](folder, arguments.seconds or SECONDS)
    if not arguments.scene:
        _point_onwards()
    return 0


# --- a scene with workers --------------------------------------------------------------------------------


def _together(scene: Scene, folder: Path, seconds: float) -> None:
    """Train with workers, audit the run, show the trained model."""
    require(scene.needs, scene.extra)
    from shoal.launch.demo_processes import DemoProcesses

    print(f"{scene.title}\n{_FOREWORD.format(seconds=seconds, folder=folder)}", flush=True)
    began = time.monotonic()
    settings = [word for setting in (*scene.settings, *scene.together) for word in ("--set", setting)]
    with DemoProcesses(folder, [*scene.files, *settings], len(scene.workers)) as stage:
        _print_at(began, "a coordinator starts (shoal coordinate)")
        stage.open()
        for worker in scene.workers:
            stage.join(worker.name, worker.arguments)
        _print_at(began, f"{_listed([worker.name for worker in scene.workers])} join it (shoal join …)")
        seen = _run_scene(scene, stage, seconds, began)
        _print_at(began, "time is up: the coordinator saves and ends, and the workers leave")
        stage.stop()
    print("\nWas anything lost or counted twice? shoal audit checks the records of the coordinator and of every worker:")
    from shoal.cli import audit

    if audit.run([str(folder / "run")]):
        raise ShoalError(f"the audit of {folder / 'run'} failed. Please report this, with the folder")
    if scene.compares:
        _compare(scene, folder, seen)
    from shoal.cli.demo_results import show

    show(scene.shows, folder / "run")
    print(f"\nyour own: {scene.next}\nthe page: {scene.page}", flush=True)


def _run_scene(scene: Scene, stage: DemoProcesses, seconds: float, began: float) -> DemoProgress:
    """Wait until the time is up and trigger the scene's events; returns the run's progress."""
    _first_update(stage)
    start, reported, waiting = time.monotonic(), 0.0, list(scene.events)
    seconds = max(_LEAST_S, seconds - max(0.0, start - began - _USUAL_START_S))
    back = 0
    while (elapsed := time.monotonic() - start) < seconds or waiting or (elapsed < seconds + _AFTER_S and not _goes_on(stage, back)):
        if waiting and elapsed >= waiting[0].share * seconds:
            _trigger(waiting.pop(0), scene, stage, began)
            reported, back = time.monotonic(), stage.seen().version
        elif time.monotonic() - reported > _PRINT_INTERVAL_S:
            _print_progress(stage.seen(), began)
            reported = time.monotonic()
        if stage.ended():
            break
        time.sleep(_POLL_INTERVAL_S)
    return stage.seen()


def _goes_on(stage: DemoProcesses, back: int) -> bool:
    """Whether the run has progressed and all workers take part; a late one may still be loading."""
    return stage.seen().version > back and all(stage.takes_part(name) for name in stage.workers)


def _first_update(stage: DemoProcesses) -> None:
    until = time.monotonic() + _BEGIN_S
    while not stage.seen().version and not stage.ended():
        if time.monotonic() > until:
            raise ShoalError(f"no update has come in {_BEGIN_S:.0f} s: see {stage.log} and {stage.run / 'workers'}")
        time.sleep(_POLL_INTERVAL_S)


def _trigger(event: DemoEvent, scene: Scene, stage: DemoProcesses, began: float) -> None:
    _print_progress(stage.seen(), began)
    _print_at(began, f"» {event.story}")
    if event.what == "kill":
        stage.kill(event.who)
    elif event.what == "join":
        known = {worker.name: worker.arguments for worker in scene.workers}
        stage.join(event.who, known.get(event.who, ()))
    else:
        stage.crash()
        stage.open(resume=True)
        _print_at(began, "  it is back with the weights that it last confirmed; the workers reconnect")


def _print_progress(seen: DemoProgress, began: float) -> None:
    figures = "   ".join(f"{name} {value:.3g}" for name, value in seen.figures.items())
    _print_at(began, f"  version {seen.version:>5}   {seen.samples:>7,} samples   {figures}".rstrip())


def _print_at(began: float, text: str) -> None:
    print(f"{time.monotonic() - began:5.1f} s  {text}", flush=True)


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


# --- beside one process ----------------------------------------------------------------------------------


def _compare(scene: Scene, folder: Path, seen: DemoProgress) -> None:
    """Compare the run with one process that learned from as many samples."""
    from shoal.cli.eval import evaluate

    name, together = scene.compares, evaluate(str(folder / "run")).metrics
    print(f"\nOne process learns from as many samples ({seen.samples:,}), undisturbed …", flush=True)
    samples = _alone(scene, folder / "alone", seen.samples)
    short = f", {samples:,} samples, for which its time was enough" if samples < 0.9 * seen.samples else ""
    alone = evaluate(str(folder / "alone")).metrics
    print(f"  {name} of one process     {alone[name]:.3f}{short}")
    print(f"  {name} of these workers   {together[name]:.3f}")


def _alone(scene: Scene, folder: Path, samples: int) -> int:
    """Train in this process for at most `_ALONE_S` seconds; returns the number of samples."""
    from shoal.config.load import ConfigFile, LoadedConfig, Override, parse_override, resolve
    from shoal.launch.start import start_run
    from shoal.launch.start_mode import StartOptions, plan_start

    overrides = [parse_override(text) for text in (*scene.settings, "strategy.kind=local", "evaluation.strategy=never")]
    files = [ConfigFile(name) for name in scene.files]
    batch = resolve(files, overrides, environ={}).run.training.batch_size or 1
    overrides.append(parse_override(f"training.max_steps={max(1, samples // batch)}"))

    def load(more: Sequence[Override]) -> LoadedConfig:
        return resolve(files, [*overrides, *more], environ={})

    with start_run(plan_start(load, StartOptions(str(folder))), []) as ready:
        late = threading.Timer(_ALONE_S, ready.loop.interrupt)
        late.start()
        try:
            summary = ready.train().summary
        finally:
            late.cancel()
    return int(summary["samples"])


def _point_onwards() -> None:
    print("\nWhich of these are you?")
    rows = {
        "a class of laptops": "shoal demo classroom",
        "a shelf of Macs, Pis and a Windows box": "shoal demo shelf",
        "volunteers across the internet": "shoal demo volunteers",
        "islands of GPUs": "shoal demo islands",
        "a rack, and a mixture of experts to pretrain": "shoal demo mixture",
        "a model to chat with": "shoal demo chat",
        "a model that learns from feedback": "shoal demo rlhf",
        "a notebook, a network and data of your own": "docs/python.md",
    }
    for who, what in rows.items():
        print(f"  {who:<46} {what}")
    if shutil.which("shoal") is None:  # `make demo` installs into a virtual environment that is not active
        print(f"\nTo type shoal in this terminal, once:  {activation(Path(sys.prefix), Path.cwd(), windows=os.name == 'nt')}")
    sys.stdout.flush()


def activation(environment: Path, here: Path, *, windows: bool) -> str:
    """The shell command that activates a virtual environment."""
    shown = environment.relative_to(here) if environment.is_relative_to(here) else environment
    return str(shown / "Scripts" / "activate") if windows else f". {shown}/bin/activate"
