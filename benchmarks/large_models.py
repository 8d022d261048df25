"""What a coordinator takes in memory while large models come in, with contributions in memory and in files.

One process speaks for all workers, each with a connection and a name of its own, and sends the same synthetic gradient for all of them at
once, as at the end of a round of `syncps`. The coordinator is that of `shoal coordinate`: transport, admission, journal, rule, optimizer.
A row compares what its process takes at most beyond what it has before the first worker joins (weights, gradient, the copy that workers
read) with the weights in float32. Pages of files, which the system may drop, do not count. `BENCH=large-models:1b` takes a billion numbers.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from ingest import WorkerDouble
from processes import Helper
from run import Row

from shoal.config.load import ConfigFile, Override, resolve
from shoal.runs.coordinator_setup import prepare
from shoal.updates import codecs

SIZES = {
    "small": ("[3072, 3072]", "9.6M"),
    "": ("[8192, 8192]", "67.7M"),
    "100m": ("[10240, 9216]", "95.2M"),
    "1b": ("[32768, 30720]", "1.01B"),
}
"""Hidden layers of an MLP on digits (64 inputs, 10 classes)."""
DISK = Path(__file__).parents[1] / "results"
"""Git ignores it, and unlike /tmp it never lies in memory."""
WORKERS, ROUNDS = 8, 2
CASES = (
    ("mean, codec none", {}),
    ("mean, codec int8", {"updates.codec.kind": "int8"}),
    ("krum, codec none", {"updates.aggregation.kind": "krum", "updates.aggregation.byzantine": "1"}),
)
COMMON = {
    "evaluation.strategy": "never",
    "checkpoint.strategy": "never",
    "training.epochs": "1000000000",
    "training.max_steps": str(ROUNDS),
    "training.optimizer.name": "SGD",
    "strategy.kind": "syncps",
    "strategy.round_timeout_s": "3600",
    "coordinator.heartbeat_interval_s": "600",
    "log_level": "ERROR",
}


def measure(part: str = "") -> Iterator[Row]:
    """Some minutes, and as much disk as all contributions of a round take."""
    hidden, shown = SIZES[part]
    for name, settings in CASES:
        for held_in in ("memory", "file"):
            given = COMMON | settings | {"model.hidden_sizes": hidden, "coordinator.held_in": held_in}
            if held_in == "file":
                given |= {"transport.uploads_at_once": "2"}
            size, peak, seconds = one_run(given)
            label = f"large-models, {shown}, {WORKERS} workers, {name}, held in {held_in}"
            yield Row(label, peak / 1e9, 4e-9 * size, "GB beyond the start", peak / (4 * size), "", f"{seconds:.1f} s a round")


def one_run(settings: dict[str, str]) -> tuple[int, int, float]:
    """Numbers of the model, the coordinator's largest resident memory in bytes, and the seconds of a round."""
    DISK.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DISK) as folder:
        serving = Helper(__file__, "serve", settings=settings, folder=folder)
        helpers = [serving]
        try:
            helpers.append(Helper(__file__, "send", settings=settings))
            invitation = serving.hear()
            before, peak = resident(serving.process.pid), Peak(serving.process.pid)
            helpers[1].say(invitation)
            size, seconds = helpers[1].hear()
            return size, peak.stop() - before, seconds
        finally:
            for helper in helpers:
                helper.close()


def resident(pid: int) -> int:
    """Resident bytes of a process that are no file's pages, which the system may drop."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


class Peak:
    """The largest memory of a process that is no file's page, looked at fifty times a second."""

    def __init__(self, pid: int) -> None:
        self._pid, self._ended, self.bytes = pid, threading.Event(), 0
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            self.bytes = max(self.bytes, resident(self._pid))

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.bytes


def serve(given: dict[str, Any]) -> None:
    loaded = resolve([ConfigFile("starter")], overrides(given["settings"]), environ={})
    transport = loaded.run.transport.replace(host=None, port=0)
    folder = str(Path(given["folder"]) / "run")
    made = prepare(loaded, run_dir=folder, resume=False, reporters=[], workers=WORKERS, hosts=("127.0.0.1",), transport=transport)
    claims = made.loop.coordinator.checks
    claims.plan = claims.plan._replace(batches_per_shard=None)
    print(json.dumps(made.invitation._asdict()), flush=True)
    made.loop.train()


def send(given: dict[str, Any]) -> None:
    invitation = json.loads(sys.stdin.readline())
    codec = resolve([ConfigFile("starter")], overrides(given["settings"]), environ={}).run.updates.codec
    workers = [WorkerDouble(invitation, weights=False, number=number) for number in range(WORKERS)]
    size = workers[0].size
    frames = codecs.encode(codec, torch.randn(size), None)
    started = time.time()
    for _ in range(ROUNDS):
        threads = [threading.Thread(target=worker.contribute, args=(frames,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(json.dumps([size, (time.time() - started) / ROUNDS]), flush=True)


def overrides(settings: dict[str, str]) -> list[Override]:
    return [Override(path, value, f"--set {path}={value}") for path, value in settings.items()]


if __name__ == "__main__":
    {"serve": serve, "send": send}[sys.argv[1]](json.loads(sys.argv[2]))
