"""Time to 97 % on MNIST's test set with workers of speed 1, 1/2, 1/4 and 1/8 that lose a tenth of their results: async against FedAvg.

Both sides: the same MLP, batches of the same size, the 60,000 training images in four equal shares, four worker processes with one thread
each, a server process, and the same way of being slow: to sleep so many times as long as the computing took. A result is lost with a
probability of 0.1 after the work was done: of a step with Shoal, of a round with Flower. The clock starts when all have their data in
memory, and stops when an evaluation on the server says 97 %.

Twice: with the fastest worker as fast as a core here is, so that four workers and a server share few cores; and with all four workers four
times slower than that, which is nearer to four machines of their own.

Shoal: strategy async with its defaults, over ZeroMQ with journal and all. Flower 1.41.0: FedAvg, which has no asynchronous way; a list of
its documented choices is tried (part of an epoch or a whole one per round, all clients or some, a time limit for rounds, either runtime)
and the best one competes, in turn with ours; so does the best without a time limit, that is, the one that learns from everybody's data.

Where the time goes on two cores (Xeon, 2.5 GHz, 1.0 of a core's speed for the fastest worker): both cores are busy all the time. Of 10.6 s
the coordinator's process took 9.4 s of a core, a quarter of that for an evaluation every 50 updates, and the workers 10 s together. A step
of this small network takes less time than its journey: what would help is less work for each contribution, or more batches in each
(`training.gradient_accumulation_steps`). With Flower, a round of half an epoch travels once for 230 steps.
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

SPEEDS = (1.0, 2.0, 4.0, 8.0)
BASES = {1.0: "sharing the cores", 4.0: "as on machines of their own"}
DROPOUT = 0.1
TARGET = 0.97
BATCH_SIZE = 64
TURNS = 3
EVERY_STEPS = 100
"""Updates between two evaluations of 10,000 images, each of which takes a core 20 to 40 ms. At every 50 they took a third of the
coordinator's time; at every 200 the steps past the goal cost as much as the evaluations that were saved."""
PATIENCE_S = 600.0
ADAM = {"optimizer": "AdamW", "learning_rate": 1e-3}
TRIED: dict[str, dict[str, Any]] = {
    "1 epoch a round": {"runtime": "grpc", "epochs": 1.0},
    "1/2 epoch a round": {"runtime": "grpc", "epochs": 0.5},
    "1/4 epoch a round, optimizer kept": {"runtime": "grpc", "epochs": 0.25, "keep_optimizer": True},
    "1/2 epoch a round, half of the clients": {"runtime": "grpc", "epochs": 0.5, "fraction": 0.5},
}
WITH_LIMIT = ("1/2 epoch a round", "1/4 epoch a round, optimizer kept")
LIMITS = {"without the slowest two": 2.5, "without the slowest": 4.5}
"""Time limits of a round, as multiples of what the fastest client takes."""

Specs = dict[str, dict[str, Any]]


def measure() -> list[Row]:
    if not processes.MNIST.is_dir():
        print("stragglers: skipped, ../shared/data/mnist is not here", file=sys.stderr)
        return []
    return [row for base, title in BASES.items() for row in _measure(base, title)]


def _measure(base: float, title: str) -> list[Row]:
    chosen = best_of_flower(base)
    turns = [(shoal_once(base, turn), {name: flower_once(base, spec, turn) for name, spec in chosen.items()}) for turn in range(TURNS)]
    return [_row(title, name, [ours for ours, _ in turns], [theirs[name] for _, theirs in turns]) for name in chosen]


def _row(title: str, name: str, ours: list[float], theirs: list[float]) -> Row:
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    medians = statistics.median(ours), statistics.median(theirs)
    return Row(f"stragglers {title}, async against FedAvg with {name}", *medians, "s to 97 %", ratio, "≥ 3")


# --- Flower ------------------------------------------------------------------------------------------------


def best_of_flower(base: float) -> Specs:
    """The setting that got there first, and the first of those without a time limit."""
    tried = TRIED | {name: spec for kind in WITH_LIMIT for name, spec in limited(base, kind).items()}
    times = {name: flower_once(base, spec, 0) for name, spec in tried.items()}
    print("Flower: " + "; ".join(f"{name} {seconds:.1f} s" for name, seconds in times.items()), file=sys.stderr)
    best = min(times, key=lambda name: times[name])
    unlimited = min(TRIED, key=lambda name: times[name])
    return {name: tried[name] for name in dict.fromkeys((best, unlimited))}


def limited(base: float, kind: str) -> Specs:
    """The same with time limits, which the simulation runtime keeps. The rounds of the slowest tell how long the fastest takes."""
    times = flower_run(base, TRIED[kind] | {"rounds": 3, "target": 0.0, "dropout": 0.0}, 0)["times"]
    fastest = (times[-1] - times[0]) / (len(times) - 1) / max(SPEEDS)
    return {f"{kind}, {name}": TRIED[kind] | {"runtime": "simulation", "timeout": factor * fastest} for name, factor in LIMITS.items()}


def flower_once(base: float, spec: dict[str, Any], seed: int) -> float:
    """Seconds to the target, or infinity."""
    told = flower_run(base, {"target": TARGET, "dropout": DROPOUT, "rounds": 100} | spec, seed)
    return told["times"][-1] if told["accuracies"] and told["accuracies"][-1] >= TARGET else float("inf")


def flower_run(base: float, spec: dict[str, Any], seed: int) -> dict[str, list[float]]:
    slowdown = [base * speed for speed in SPEEDS]
    return flower.run(1, clients=len(SPEEDS), slowdown=slowdown, batch_size=BATCH_SIZE, seed=seed, **(ADAM | spec))


# --- Shoal -------------------------------------------------------------------------------------------------


def shoal_once(base: float, seed: int) -> float:
    """Seconds to the target, or infinity."""
    helpers: list[Helper] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            coordinator = Helper(__file__, "coordinate", 1, folder=folder, seed=seed)
            helpers.append(coordinator)
            invitation = coordinator.hear()
            given = {"invitation": invitation, "seed": seed}
            workers = [Helper(__file__, "work", 1, **given, slowdown=base * speed) for speed in SPEEDS]
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


def coordinate(given: dict[str, Any]) -> None:
    from shoal.config.load import ConfigFile, Override, resolve
    from shoal.runs.coordinator_setup import prepare
    from shoal.runs.monitoring.recorder import Reporter

    class Teller(Reporter):
        """Passes on what evaluations say."""

        def record(self, record: dict[str, Any]) -> None:
            if record["split"] == "eval":
                print(json.dumps([record["accuracy"], time.time()]), flush=True)

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
    loaded = resolve(
        [ConfigFile("starter")], [Override(path, value, f"--set {path}={value}") for path, value in settings.items()], environ={}
    )
    transport = loaded.run.transport.replace(host=None, port=0)
    coordinating = prepare(
        loaded,
        run_dir=str(Path(given["folder"]) / "run"),
        resume=False,
        reporters=[Teller()],
        workers=len(SPEEDS),
        hosts=("127.0.0.1",),
        transport=transport,
    )
    print(json.dumps(coordinating.invitation._asdict()), flush=True)
    coordinating.loop.train()


def work(given: dict[str, Any]) -> None:
    """A worker as `shoal join --slowdown` makes it, except that a tenth of what it would send gets lost."""
    from shoal.config.received.permissions import Permissions
    from shoal.runs import connections, worker_run
    from shoal.worker.worker import Worker

    chance = random.Random(f"{given['seed']} {given['slowdown']}")

    class Forgetful(Worker):
        def _send(self, *contribution: Any, **options: Any) -> None:
            if chance.random() >= DROPOUT:
                super()._send(*contribution, **options)

    worker_run.Worker = Forgetful  # type: ignore[attr-defined]
    invitation = given["invitation"]
    allowed = Permissions.of([str(processes.MNIST)])
    way = connections.JoinOptions(
        invitation["address"], invitation["token"], invitation["key"], slowdown=given["slowdown"], permissions=allowed
    )
    joined = worker_run.JoinedWorker(way, lambda text: None)
    joined.prepare()
    print('"ready"', flush=True)
    sys.stdin.readline()
    joined.work()


ROLES = {"coordinate": coordinate, "work": work}

if __name__ == "__main__":
    ROLES[sys.argv[1]](json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
