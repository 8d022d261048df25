"""Does a class learn as well as one process? DCGAN on digits: three students with work units against one process, with the same images.

The class runs in virtual time with the real coordinator, the real sessions of workers and real gradients (`shoal simulate --learn`), so the
speed of this machine plays no part. Two classes, three equal students and three of speeds 1:2:4, each once with late results counted (the
default of `strategy.max_lag`) and once with late results dropped (0). The judge is a small classifier of ours, trained on digits: the
Fréchet distance between its features of drawn and of real digits. An update is made of the same number of images everywhere, and all runs
make the same number of updates. A GAN's quality differs from run to run by a tenth and more, so it takes several seeds to tell anything.
`python benchmarks/classroom_quality.py 1 2 3` prints each run of these seeds.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import sys
import tempfile
from typing import Any, NamedTuple

import torch
from run import Row
from torch import Tensor, nn

from shoal import data
from shoal.config.load import LoadedConfig, resolve_data
from shoal.runs.training.train_alone import prepare
from shoal.simulate.machines import SimulatedMachine, weather_of
from shoal.simulate.simulation import agreed_for, scenario_of
from shoal.simulate.virtual_run import VirtualRun
from shoal.tasks.gan import Gan

SEEDS = (1, 2, 3, 4)
STUDENTS = 3
BATCH = 16
"""Images of a unit; an update is made of a unit for each student."""
EPOCHS = 50
UPDATES_PER_EPOCH = 30
LOOK_EVERY = UPDATES_PER_EPOCH
UPDATES = EPOCHS * UPDATES_PER_EPOCH
DRAWN = 2000
STEP_S = 2.0
"""Time of the slowest student for a unit, with a few percent of jitter."""
CLASSES: dict[str, tuple[float, ...]] = {"equal": (1.0, 1.0, 1.0), "1:2:4": (1.0, 2.0, 4.0)}
LATE: dict[str, int | None] = {"counted": None, "dropped": 0}


def settings(seed: int, batch_size: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "model": {"kind": "dcgan", "image_size": 8, "latent_dim": 32, "generator_features": 32, "discriminator_features": 32},
        "task": "gan",
        "data": {"source": {"kind": "builtin", "name": "digits"}, "loader": {"drop_last": False}},
        "training": {"batch_size": batch_size, "epochs": EPOCHS, "optimizer": {"name": "Adam", "learning_rate": 0.0005, "beta1": 0.5}},
        "evaluation": {"strategy": "never"},
        "checkpoint": {"strategy": "never"},
    }


def resolved(tree: dict[str, Any]) -> LoadedConfig:
    loaded = resolve_data(tree, name="quality", dialect="shoal", environ={})
    if not loaded.ok:
        raise RuntimeError(str(loaded.problems))
    return loaded


# --- the judge -------------------------------------------------------------------------------------------


class Judge:
    """A classifier of digits, whose last hidden layer says what a picture is like."""

    def __init__(self) -> None:
        samples = data.load(resolved(settings(0, 64)).run)
        everything = samples.train.batch(range(len(samples.train)))
        self.real, labels = everything["image"], everything["label"]
        torch.manual_seed(0)
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(256, 32), nn.ReLU()),
        )
        head = nn.Linear(32, 10)
        optimizer = torch.optim.Adam([*self.features.parameters(), *head.parameters()], lr=1e-3)
        for _ in range(30):
            for index in torch.randperm(len(labels)).split(64):
                optimizer.zero_grad()
                nn.functional.cross_entropy(head(self.features(self.real[index])), labels[index]).backward()
                optimizer.step()

    @torch.no_grad()
    def distance(self, drawn: Tensor) -> float:
        """Fréchet: of the means, and of the covariances."""
        (mean, covariance), (real_mean, real_covariance) = (_moments(self.features(images)) for images in (drawn, self.real))
        both = torch.linalg.eigvals(covariance @ real_covariance).real.clamp(min=0).sqrt().sum()
        return float((mean - real_mean).square().sum() + covariance.trace() + real_covariance.trace() - 2 * both)


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    return features.double().mean(0), torch.cov(features.double().T)


@functools.cache
def judge() -> Judge:
    return Judge()


class Watch:
    """The median distance over the second half of a run: a GAN's quality goes up and down, and any one moment says little."""

    def __init__(self, task: Any) -> None:
        assert isinstance(task, Gan)
        self.task, self.updates, self.found = task, 0, list[float]()

    def on_update(self) -> None:
        self.updates += 1
        if self.updates % LOOK_EVERY == 0 and self.updates > UPDATES // 2:
            self.found.append(judge().distance(self.task.images(DRAWN)))

    @property
    def distance(self) -> float:
        return statistics.median(self.found)


# --- one process, and classes ----------------------------------------------------------------------------


class Found(NamedTuple):
    """One run."""

    distance: float
    hours: float = 0.0
    """Virtual time of a class."""
    unused: float = 0.0
    """Share of the computed units that was dropped."""
    lag: float = 0.0


def alone(seed: int) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        loop = prepare(resolved(settings(seed, STUDENTS * BATCH)), run_dir=f"{folder}/alone", resume=False, reporters=[])
        watch, advance = Watch(loop.recorder.engine.task), loop.advance

        def watched(*arguments: Any) -> None:
            advance(*arguments)
            watch.on_update()

        loop.advance = watched  # type: ignore[method-assign]
        loop.train()
    return Found(watch.distance)


def in_class(seed: int, speeds: str, late: str) -> Found:
    tree = settings(seed, BATCH)
    tree["strategy"] = {"kind": "workunits", "batches_per_unit": 1, "units_per_update": STUDENTS, "max_lag": LATE[late]}
    run = resolved(tree).run
    agreed = agreed_for(run, STUDENTS, data.load(run), learns=True)
    scenario = scenario_of(run, agreed, learns=True)
    watch, apply = Watch(agreed.parts.single.task), scenario.learner.apply

    def watched(*arguments: Any) -> Any:
        figures = apply(*arguments)
        watch.on_update()
        return figures

    scenario.learner.apply = watched  # type: ignore[method-assign]
    machines = [SimulatedMachine(f"s{number}", STEP_S / speed, start_s=0.0) for number, speed in enumerate(CLASSES[speeds])]
    report = VirtualRun(scenario, weather_of(machines), 24.0, seed).run()
    if report.violations or not report.finished:
        raise RuntimeError(f"the class did not end well: {report.violations}")
    return Found(watch.distance, report.hours, 1 - report.outcomes["accepted"] / report.judged, report.mean_lag)


def one(job: tuple[int, str, str]) -> Found:
    """One run, in a process of its own."""
    torch.set_num_threads(1)
    judge()  # before any run draws random numbers
    seed, speeds, late = job
    return alone(seed) if speeds == "alone" else in_class(seed, speeds, late)


def table(seeds: tuple[int, ...]) -> dict[tuple[str, str], list[Found]]:
    """All runs by class and setting, of all seeds; each is printed when it is there."""
    kinds = [("alone", ""), *((speeds, late) for speeds in CLASSES for late in LATE)]
    jobs = [(seed, *kind) for seed in seeds for kind in kinds]
    found: dict[tuple[str, str], list[Found]] = {kind: [] for kind in kinds}
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        for (seed, *kind), run in zip(jobs, pool.imap(one, jobs), strict=True):
            found[kind[0], kind[1]].append(run)
            text = f"distance {run.distance:6.2f}  {run.hours:5.2f} h  unused {run.unused:6.1%}  lag {run.lag:4.2f}"
            print(f"seed {seed}  {' '.join(kind):<15} {text}", file=sys.stderr, flush=True)
    return found


def measure() -> list[Row]:
    found = table(SEEDS)
    distances = {kind: statistics.mean(run.distance for run in runs) for kind, runs in found.items()}
    note = f"DCGAN on digits, {UPDATES} updates, {len(SEEDS)} seeds"
    rows = []
    for speeds, goal in {"equal": "≤ 1.05", "1:2:4": ""}.items():
        ours, dropped = distances[speeds, "counted"], distances[speeds, "dropped"]
        rows.append(
            Row(
                f"students {speeds} ÷ one process",
                ours,
                distances["alone", ""],
                "Fréchet distance",
                ours / distances["alone", ""],
                goal,
                note,
            )
        )
        rows.append(
            Row(f"students {speeds}, late results counted ÷ dropped", ours, dropped, "Fréchet distance", ours / dropped, goal, note)
        )
        hours = [statistics.mean(run.hours for run in found[speeds, late]) for late in LATE]
        rows.append(
            Row(f"time of students {speeds}, counted ÷ dropped", hours[0], hours[1], "virtual hours", hours[0] / hours[1], "≤ 1", note)
        )
    return rows


if __name__ == "__main__":
    for kind, runs in table(tuple(map(int, sys.argv[1:])) or SEEDS).items():
        means = [statistics.mean(values) for values in zip(*runs, strict=True)]
        print(f"{' '.join(kind):<15} distance {means[0]:6.2f}  {means[1]:5.2f} h  unused {means[2]:6.1%}  lag {means[3]:4.2f}")
