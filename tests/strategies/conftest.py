"""A whole cluster in one process: the real coordinator, the real workers, threads instead of machines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from shoal.config.load import parse_override
from shoal.config.received import permissions_for
from shoal.config.schema.cluster import InProcess
from shoal.runs.connections import JoinOptions
from shoal.runs.coordinator_run import CoordinatorLoop
from shoal.runs.coordinator_setup import prepare
from shoal.runs.monitoring.recorder import Reporter
from shoal.runs.training.loop import TrainingLoop
from shoal.runs.worker_run import JoinedWorker
from tests.support.layered_settings import loaded, merged
from tests.support.processes import HANG_S


class Outcome(NamedTuple):
    """How a cluster's run ended."""

    loop: CoordinatorLoop
    summary: dict[str, Any]
    workers: list[JoinedWorker]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.loop.engine.weights().items()}

    @property
    def loss(self) -> float:
        return float(self.summary["metrics"]["eval"]["loss"])

    @property
    def accuracy(self) -> float:
        return float(self.summary["metrics"]["eval"]["accuracy"])


@pytest.fixture
def cluster(tmp_path: Path) -> Callable[..., Outcome]:
    """Train with so many workers; each is a thread with a model and data of its own."""
    return cluster_in(tmp_path)


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """The same, for runs that many tests compare theirs with."""
    return cluster_in(tmp_path_factory.mktemp("shared"))


def cluster_in(parent: Path) -> Callable[..., Outcome]:
    def train(
        *layers: Mapping[str, Any],
        workers: int = 3,
        change: Callable[[JoinedWorker], None] = lambda joined: None,
        own: Mapping[int, tuple[str, ...]] = MappingProxyType({}),
        reporters: Sequence[Reporter] = (),
    ) -> Outcome:
        """`own`: what some workers set for themselves, by their numbers."""
        made = loaded(merged({"coordinator": {"heartbeat_interval_s": 30.0}}, *layers))
        folder = parent / f"cluster-{len(list(parent.iterdir()))}"
        loop, invitation = prepare(made, run_dir=str(folder), resume=False, reporters=[*reporters], workers=workers, transport=InProcess())
        joined: list[JoinedWorker] = []
        problems: list[BaseException] = []
        all_here = threading.Barrier(workers)  # a run without rounds could be over before the last one comes, who would look for it in vain

        def work(number: int) -> None:
            try:
                name, place = f"w{number}", folder / "workers"
                overrides = [parse_override(text) for text in own.get(number, ())]
                kept = {"receipts": place / f"{name}.jsonl", "state": place / name}
                way = JoinOptions(*invitation, name=name, **kept, overrides=overrides, permissions=permissions_for(loop.run))
                worker = JoinedWorker(way, lambda text: None)
                worker.prepare()
                joined.append(worker)
                change(worker)
                all_here.wait(HANG_S)
                worker.work()
            except BaseException as problem:
                problems.append(problem)
                all_here.abort()
                loop.goodbye_s, loop.recorder.stopping = 0.0, "a worker failed"

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(1, workers + 1)]
        for thread in threads:
            thread.start()
        try:
            summary = loop.train()
        finally:
            loop.server.close()
            for thread in threads:
                thread.join(300)
        assert not problems, problems
        assert not any(thread.is_alive() for thread in threads)
        return Outcome(loop, summary, joined)

    return train


@pytest.fixture
def alone(tmp_path: Path) -> Callable[..., TrainingLoop]:
    """Train in one process."""

    def train(*layers: Mapping[str, Any]) -> TrainingLoop:
        from shoal.runs.training.train_alone import prepare as prepare_alone

        folder = tmp_path / f"alone-{len(list(tmp_path.iterdir()))}"
        loop = prepare_alone(loaded(merged(*layers)), run_dir=str(folder), resume=False, reporters=[])
        loop.train()
        return loop

    return train
