"""Time to 97 % on MNIST's test set with workers of speed 1, 1/2, 1/4 and 1/8 that lose a tenth of their results: async against FedAvg.

Both sides: the same MLP, batches of the same size, the 60,000 training images in four equal shares, four worker processes with one thread
each, a server process, and the same way of being slow: to sleep 0, 1, 3 or 7 times as long as the computing took. A result is lost with a
probability of 0.1 after the work was done: of a step with Shoal, of a round with Flower. The clock starts when all have their data in
memory, and stops when an evaluation on the server says 97 %.

Shoal: strategy async with its defaults, over ZeroMQ with journal and all. Flower 1.41.0: FedAvg, which has no asynchronous way; a list of
its documented choices is tried (part of an epoch or a whole one per round, all clients or some, a time limit for rounds, either runtime)
and the best one competes, in turn with ours.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import flower
import processes
from processes import Helper
from run import Row

SLOWDOWN = (1.0, 2.0, 4.0, 8.0)
DROPOUT = 0.1
TARGET = 0.97
BATCH_SIZE = 64
TURNS = 3
EVERY_STEPS = 50
PATIENCE_S = 240.0
ADAM = {"optimizer": "AdamW", "learning_rate": 1e-3}
TRIED: dict[str, dict[str, Any]] = {
    "1 epoch": {"runtime": "grpc", "epochs": 1.0},
    "1/2 epoch": {"runtime": "grpc", "epochs": 0.5},
    "1/4 epoch": {"runtime": "grpc", "epochs": 0.25},
    "1/4 epoch, optimizer kept": {"runtime": "grpc", "epochs": 0.25, "keep_optimizer": True},
    "1/10 epoch, optimizer kept": {"runtime": "grpc", "epochs": 0.1, "keep_optimizer": True},
    "1/2 epoch, half of the clients": {"runtime": "grpc", "epochs": 0.5, "fraction": 0.5},
    "1/2 epoch, simulation": {"runtime": "simulation", "epochs": 0.5},
}
LIMITED = {"at twice the fastest": 2.5, "at four times the fastest": 4.5}
"""Time limits of a round, as multiples of what the fastest client takes: without the slowest two, without the slowest."""


def measure() -> list[Row]:
    if not processes.MNIST.is_dir():
        print("stragglers: skipped, ../shared/data/mnist is not here", file=sys.stderr)
        return []
    name, spec = best_of_flower()
    turns = [(shoal_once(turn), flower_once(spec, turn)) for turn in range(TURNS)]
    ratio = statistics.median(theirs / ours for ours, theirs in turns)
    ours, theirs = (statistics.median(side) for side in zip(*turns, strict=True))
    return [Row("stragglers, time to 97 %", ours, theirs, "s", ratio, "≥ 3", f"Flower's best: {name}")]


# --- Flower ------------------------------------------------------------------------------------------------


def best_of_flower() -> tuple[str, dict[str, Any]]:
    """The setting that got there first."""
    tried = dict(TRIED)
    times = {name: flower_once(spec, 0) for name, spec in tried.items()}
    for name, spec in limited(tried["1/2 epoch"]).items():
        tried[name], times[name] = spec, flower_once(spec, 0)
    print("stragglers, Flower: " + "; ".join(f"{name} {seconds:.1f} s" for name, seconds in times.items()), file=sys.stderr)
    best = min(times, key=lambda name: times[name])
    return best, tried[best]


def limited(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The same with time limits. They work in the simulation runtime; the round of the slowest tells how long the fastest takes."""
    times = flower_run(spec | {"rounds": 3, "target": 0.0, "dropout": 0.0}, 0)["times"]
    fastest = (times[-1] - times[0]) / (len(times) - 1) / (max(SLOWDOWN) / min(SLOWDOWN))
    return {f"1/2 epoch, limit {name}": spec | {"runtime": "simulation", "timeout": factor * fastest} for name, factor in LIMITED.items()}


def flower_once(spec: dict[str, Any], seed: int) -> float:
    """Seconds to the target, or infinity."""
    told = flower_run({"target": TARGET, "dropout": DROPOUT, "rounds": 100} | spec, seed)
    return told["times"][-1] if told["accuracies"] and told["accuracies"][-1] >= TARGET else float("inf")


def flower_run(spec: dict[str, Any], seed: int) -> dict[str, list[float]]:
    return flower.run(1, clients=len(SLOWDOWN), slowdown=SLOWDOWN, batch_size=BATCH_SIZE, seed=seed, **(ADAM | spec))


# --- Shoal -------------------------------------------------------------------------------------------------


def shoal_once(seed: int) -> float:
    """Seconds to the target, or infinity."""
    helpers: list[Helper] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            coordinator = Helper(__file__, "coordinate", 1, folder=folder, seed=seed)
            helpers.append(coordinator)
            invitation = coordinator.hear()
            given = {"invitation": invitation, "seed": seed}
            workers = [Helper(__file__, "work", 1, **given, slowdown=factor) for factor in SLOWDOWN]
            helpers += workers
            for worker in workers:
                worker.hear()
            started = time.time()
            for worker in workers:
                worker.say("go")
            return _until_target(coordinator, started)
        finally:
            for helper in helpers:
                helper.close()


def _until_target(coordinator: Helper, started: float) -> float:
    while time.time() < started + PATIENCE_S:
        accuracy, at = coordinator.hear()
        if accuracy >= TARGET:
            return at - started
    return float("inf")


class Teller:
    """A reporter that passes on what evaluations say."""

    def start(self, loop: Any) -> None: ...
    def step(self, loop: Any) -> None: ...
    def message(self, text: str) -> None: ...
    def close(self, summary: dict[str, Any]) -> None: ...

    def record(self, record: dict[str, Any]) -> None:
        if record["split"] == "eval":
            print(json.dumps([record["accuracy"], time.time()]), flush=True)


def coordinate(given: dict[str, Any]) -> None:
    from shoal.config.load import File, Override, resolve
    from shoal.strategies.coordinating import prepare

    settings = processes.QUIET | processes.MLP
    settings |= {
        "seed": str(given["seed"]),
        "training.batch_size": str(BATCH_SIZE),
        "training.max_steps": "100000000",
        "strategy.kind": "async",
        "evaluation.strategy": "steps",
        "evaluation.every_steps": str(EVERY_STEPS),
        "evaluation.batch_size": "1000",
    }
    loaded = resolve([File("starter")], [Override(path, value, f"--set {path}={value}") for path, value in settings.items()], environ={})
    transport = loaded.run.transport.replace(host=None, port=0)
    coordinating = prepare(
        loaded,
        run_dir=str(Path(given["folder"]) / "run"),
        resume=False,
        reporters=[Teller()],
        workers=len(SLOWDOWN),
        hosts=("127.0.0.1",),
        transport=transport,
    )
    print(json.dumps(coordinating.invitation._asdict()), flush=True)
    coordinating.loop.train()


def work(given: dict[str, Any]) -> None:
    """A worker as `shoal join --slowdown` makes it, except that a tenth of what it would send gets lost."""
    from shoal.strategies import joining
    from shoal.worker.member import Member

    chance = random.Random(f"{given['seed']} {given['slowdown']}")

    class Forgetful(Member):
        def _send(self, *contribution: Any) -> None:
            if chance.random() >= DROPOUT:
                super()._send(*contribution)

    joining.Member = Forgetful  # type: ignore[misc]
    invitation = given["invitation"]
    way = joining.Way(invitation["address"], invitation["token"], invitation["key"], slowdown=given["slowdown"])
    joined = joining.Joined(way, lambda text: None)
    print('"ready"', flush=True)
    sys.stdin.readline()
    joined.work()


ROLES = {"coordinate": coordinate, "work": work}

if __name__ == "__main__":
    ROLES[sys.argv[1]](json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
