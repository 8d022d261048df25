"""One worker through the coordinator against the same loop alone: samples/s once both are under way.

Ours is `shoal train --workers 1`: a coordinator process and a worker process on loopback, with journal, ledger and records. The peer is
`shoal train` with the strategy local: the same model, data, batch size and optimizer in one process. Both get the number of threads that
serves them best, found in a short run before; then they run in turn, so that a busy machine is busy for all. On two cores the comparison
is hard on ours: the peer may use both for computing, and ours has to move, keep and apply every gradient besides.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import processes
from overhead import DATA, settings
from processes import Speed
from run import Row

STRATEGIES = ("local", "edp", "syncps")
ROUNDS = 3
WATCHED_S = 8.0
TRIED_S = 3.0
RECORDS = {"mlp": "50", "gpt": "1"}


def measure() -> list[Row]:
    name = "MLP on MNIST" if DATA.is_dir() else "MLP on digits"
    return [row for kind, title in (("mlp", name), ("gpt", "small GPT")) for row in _measure(kind, title)]


def _measure(kind: str, title: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        threads = {strategy: _best_threads(Path(folder), kind, strategy) for strategy in STRATEGIES}
        rounds = [
            {strategy: _speed(Path(folder) / f"{number}", kind, strategy, threads[strategy], WATCHED_S) for strategy in STRATEGIES}
            for number in range(ROUNDS)
        ]
    return [_row(title, strategy, rounds, threads) for strategy in STRATEGIES[1:]]


def _best_threads(folder: Path, kind: str, strategy: str) -> int | None:
    tried = {threads: _speed(folder / f"tried-{threads}", kind, strategy, threads, TRIED_S).samples for threads in (None, 1)}
    return max(tried, key=lambda threads: tried[threads])


def _speed(folder: Path, kind: str, strategy: str, threads: int | None, seconds: float) -> Speed:
    files, overrides, _, _ = settings(kind)
    chosen = {override.path: str(override.value) for override in overrides}
    chosen |= {"strategy.kind": strategy, "logging.every_steps": RECORDS[kind]}
    folder.mkdir(exist_ok=True)
    run_dir = folder / f"{kind}-{strategy}"
    workers = 0 if strategy == "local" else 1
    arguments = processes.command(run_dir, chosen, preset=files[0].path, workers=workers)
    return processes.watch(run_dir, arguments, seconds=seconds, threads=threads)


def _row(title: str, strategy: str, rounds: list[dict[str, Speed]], threads: dict[str, int | None]) -> Row:
    ours, peer = ([one[kind].samples for one in rounds] for kind in (strategy, "local"))
    ratio = statistics.median(a / b for a, b in zip(ours, peer, strict=True))
    told = {None: "threads by default", 1: "one thread each"}
    shares = _shares([one[strategy] for one in rounds], [one["local"] for one in rounds])
    note = f"{told[threads[strategy]]}, alone {told[threads['local']]}{shares}"
    medians = statistics.median(ours), statistics.median(peer)
    return Row(f"one worker through {strategy}, {title}", *medians, "samples/s", ratio, "≥ 0.9 for the better of the two", note)


def _shares(ours: list[Speed], peer: list[Speed]) -> str:
    """Cores kept busy, and processor time for each step: on a machine that is busy with other things only the latter says much."""
    if not all(len(one.busy) == 2 for one in (*ours, *peer)):
        return ""
    coordinator, worker = (statistics.median(one.busy[index] for one in ours) for index in range(2))
    each = [statistics.median(one.processor_us(index) for one in ours) for index in range(2)]
    alone = statistics.median(one.processor_us(0) + one.processor_us(1) for one in peer)
    cores = f"; coordinator {coordinator:.2f} and worker {worker:.2f} cores busy"
    return f"{cores}; processor µs a step: coordinator {each[0]:.0f}, worker {each[1]:.0f}, alone {alone:.0f}"
