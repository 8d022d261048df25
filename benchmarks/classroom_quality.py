"""Does a class learn as well as one process? DCGAN on digits: three workers with work units against one process, with the same images.

The judge is a small classifier of ours, trained on digits: the Fréchet distance between its features of drawn and of real digits. Each pair
has a seed of its own; an update is made of the same number of images on both sides, and both see the same number of images.
`python benchmarks/classroom_quality.py 1 2 3` prints each run of these seeds. A GAN's quality differs from run to run by a tenth and more,
so it takes several to tell anything.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from run import Row
from torch import Tensor, nn

from shoal import data
from shoal.config.fields import Secret
from shoal.config.load import LoadedConfig, resolve_data
from shoal.config.schema.cluster import Postgres
from shoal.launch.postgres.server import EmbeddedPostgres
from shoal.runs.connections import JoinOptions
from shoal.runs.coordinator_setup import prepare as prepare_class
from shoal.runs.training.recorded_loop import RecordedLoop
from shoal.runs.training.train_alone import prepare as prepare_alone
from shoal.runs.worker_run import JoinedWorker
from shoal.tasks.gan import Gan
from shoal.transports.database_address import Access
from shoal.transports.postgres import schema
from shoal.transports.postgres.access import connect, create_database

SEEDS = (1, 2, 3, 4, 5, 6)
WORKERS = 3
BATCH = 16
"""Images of a unit; an update is made of three units."""
EPOCHS = 80
IMAGES = 1437
TOTAL = EPOCHS * IMAGES
LOOK_EVERY = IMAGES
DRAWN = 2000


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

    def __init__(self, loop: RecordedLoop) -> None:
        self.recorder, self.found = loop.recorder, list[float]()
        self._advance = loop.advance
        loop.advance = self.advance  # type: ignore[method-assign]

    def advance(self, result: Any, batches: int, last: bool) -> None:
        before = self.recorder.samples
        self._advance(result, batches, last)
        if before // LOOK_EVERY != self.recorder.samples // LOOK_EVERY and self.recorder.samples > TOTAL // 2:
            task = self.recorder.engine.task
            assert isinstance(task, Gan)
            self.found.append(judge().distance(task.images(DRAWN)))

    @property
    def distance(self) -> float:
        return statistics.median(self.found)


# --- one process, and a class ----------------------------------------------------------------------------


def alone(seed: int, folder: Path) -> float:
    loop = prepare_alone(resolved(settings(seed, WORKERS * BATCH)), run_dir=str(folder / f"alone-{seed}"), resume=False, reporters=[])
    watch = Watch(loop)
    loop.train()
    return watch.distance


def in_class(seed: int, folder: Path, server: Access) -> float:
    """Threads instead of laptops; everything else is real."""
    access = server._replace(database=f"class_{seed}")
    create_database(access)
    with connect(access) as connection:
        schema.init(connection)
        schema.grant(connection, "pupil", "secret", "class")
    tree = settings(seed, BATCH) | {"transport": {"kind": "postgres", "host": access.host, "port": access.port}}
    tree["strategy"] = {"kind": "workunits", "batches_per_unit": 1, "units_per_update": WORKERS}
    where = {name: value for name, value in access._asdict().items() if name != "options"} | {"password": Secret(access.password or "")}
    run_dir = str(folder / f"class-{seed}")
    loop = prepare_class(resolved(tree), run_dir=run_dir, resume=False, reporters=[], workers=WORKERS, transport=Postgres(**where)).loop
    watch = Watch(loop)
    student = access._replace(user="pupil", password="secret").address
    threads = [threading.Thread(target=_work, args=(student, f"w{number}")) for number in range(WORKERS)]
    for thread in threads:
        thread.start()
    try:
        loop.train()
    finally:
        loop.server.close()
        for thread in threads:
            thread.join()
    print(f"{loop.step} updates", file=sys.stderr)
    return watch.distance


def _work(address: str, name: str) -> None:
    joined = JoinedWorker(JoinOptions(address, "", None, name=name, patience_s=30.0), lambda text: None)
    joined.prepare()
    joined.work()


def distances(seeds: tuple[int, ...]) -> list[tuple[float, float]]:
    torch.set_num_threads(1)
    judge()  # before any run draws random numbers
    found = []
    with tempfile.TemporaryDirectory() as name, EmbeddedPostgres(Path(name) / "database") as server:
        for seed in seeds:
            found.append((in_class(seed, Path(name), server.access), alone(seed, Path(name))))
            print(f"seed {seed}: class {found[-1][0]:.2f}, alone {found[-1][1]:.2f}", file=sys.stderr, flush=True)
    return found


def measure() -> list[Row]:
    ours, peer = (statistics.mean(values) for values in zip(*distances(SEEDS), strict=True))
    return [Row("DCGAN on digits, three workers against one process", ours, peer, "Fréchet distance", ours / peer, "≤ 1.05")]


if __name__ == "__main__":
    distances(tuple(map(int, sys.argv[1:])) or SEEDS)
