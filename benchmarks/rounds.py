"""Rounds per second of a synchronous parameter server: Shoal's syncps against Flower's FedAvg, two workers, one step of one batch a round.

The same MLP on MNIST, SGD with the same learning rate, 32 samples for each worker and round, no evaluation; real processes on this
machine. Shoal: `shoal train --workers 2 --set strategy.kind=syncps`, each round journalled. Flower 1.41.0 keeps nothing. It is measured
with its simulation runtime (what `flwr run` starts; of its current runtimes the fastest here, since a SuperLink's grid sleeps 3 s between
looks for replies) and with the gRPC server and clients that it has deprecated but still ships, which are faster. Clients keep data and
model in memory between rounds. For each side the better of one thread a process and the default is taken; first rounds do not count.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import flower
import processes
from run import Row

SECONDS = 8.0
ROUNDS = {"simulation": 60, "grpc": 300}
SKIPPED = 10
TURNS = 3
NAMES = {"simulation": "Flower's simulation runtime", "grpc": "Flower's deprecated gRPC server"}
SETTINGS = processes.QUIET | processes.MLP
SETTINGS |= {
    "training.max_steps": "100000000",
    "training.optimizer.name": "SGD",
    "training.optimizer.learning_rate": "0.1",
    "strategy.kind": "syncps",
    "logging.every_steps": "20",
}


def measure() -> list[Row]:
    if not processes.MNIST.is_dir():
        print("rounds: skipped, ../shared/data/mnist is not here", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory() as folder:
        turns = [(_ours(Path(folder) / f"{turn}"), {kind: _theirs(kind) for kind in ROUNDS}) for turn in range(TURNS)]
    return [_row(kind, [ours for ours, _ in turns], [theirs[kind] for _, theirs in turns]) for kind in ROUNDS]


def _ours(folder: Path) -> float:
    folder.mkdir()
    return max(_our_speed(folder / f"threads-{threads}", threads) for threads in (None, 1))


def _our_speed(run_dir: Path, threads: int | None) -> float:
    return processes.watch(run_dir, processes.command(run_dir, SETTINGS, workers=2), seconds=SECONDS, threads=threads).steps


def _theirs(kind: str) -> float:
    return max(_their_speed(kind, threads) for threads in (None, 1))


def _their_speed(kind: str, threads: int | None) -> float:
    times = flower.run(threads, runtime=kind, clients=2, rounds=ROUNDS[kind], batch_size=32, steps=1, learning_rate=0.1)["times"]
    return (len(times) - 1 - SKIPPED) / (times[-1] - times[SKIPPED])


def _row(kind: str, ours: list[float], theirs: list[float]) -> Row:
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    name = f"rounds, syncps against {NAMES[kind]}"
    return Row(name, statistics.median(ours), statistics.median(theirs), "rounds/s", ratio, "≥ 10")
