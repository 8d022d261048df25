"""A worker that gives way (`shoal join --when`): how soon, what it loses, and what it takes from a program of its computer's user.

A person comes and goes: their presence is simulated, all else is real: `shoal coordinate`, the watcher of `shoal join --when idle`, and its
worker, a process with torch. Measured:

- the time from the person's return until the worker's process has ended, so that its memory is free. The watcher looks once a second;
- what is lost: contributions that the coordinator confirmed to the worker and that are not in the weights (`shoal audit` with the
  worker's receipts), and results that it did not accept. A unit that is returned in the middle is done again, here or elsewhere;
- what a program of the person gets beside the worker, compared with alone. One process on each core hashes; the worker runs in every
  second slice of half a second, and is stopped (SIGSTOP) in the others. Its units take seconds, so that the coordinator, which is on
  no volunteer's machine, has little to do. `make bench BENCH=polite:normal` measures a worker of normal priority.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from multiprocessing import shared_memory
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml
from run import Row

from shoal.cli.join import _parsed
from shoal.cli.join_options import typed_parts
from shoal.launch.volunteer.conditions import Conditions, Sensors, parse
from shoal.launch.volunteer.process_tree import cpu_seconds, memory_bytes
from shoal.launch.volunteer.watcher import Watcher, shoal_worker

VISITS = 8
PAIRS, SLICE_S = 40, 0.5
WAIT_S = 300.0
CONFIG = {
    "dialect": "shoal",
    "model": {"kind": "mlp", "hidden_sizes": [512, 512]},
    "data": {"source": {"kind": "builtin", "name": "digits"}},
    "training": {"batch_size": 256, "epochs": 100_000},
    "strategy": {"kind": "workunits", "batches_per_unit": 3, "units_per_update": 1},
    "evaluation": {"strategy": "never"},
    "checkpoint": {"strategy": "never"},
}
HASHING = """
import hashlib, sys
from multiprocessing import resource_tracker, shared_memory
counts = shared_memory.SharedMemory(sys.argv[1])
resource_tracker.unregister(counts._name, "shared_memory")  # its owner removes it
view = counts.buf.cast("Q")
place, block = int(sys.argv[2]), bytes(4096)
while True:
    hashlib.sha256(block).digest()
    view[place] += 1
"""


LONG_UNITS = {
    "model": {"kind": "mlp", "hidden_sizes": [2048, 2048]},
    "training": {"batch_size": 1797, "epochs": 100_000},
    "strategy": {"kind": "workunits", "batches_per_unit": 1, "units_per_update": 1},
}


class Visit(NamedTuple):
    """One return of the person."""

    took_s: float
    freed_bytes: int


class Bench:
    """A coordinator, and a worker that gives way."""

    def __init__(self, folder: Path, priority: str, layer: Mapping[str, Any] = MappingProxyType({})) -> None:
        folder.mkdir()
        self.folder, self.away, self.told = folder, True, list[str]()
        (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | layer))
        log = (folder / "coordinator.log").open("wb")
        shoal = [sys.executable, "-m", "shoal"]
        self.coordinator = subprocess.Popen([*shoal, "coordinate", "config.yaml", "--run-dir", "run"], cwd=folder, stdout=log, stderr=log)
        self.wait(lambda: "waits for a worker" in self.log("coordinator"))
        line = re.search(r"shoal (join .*)", self.log("coordinator"))
        assert line is not None
        invitation = json.dumps(dict(zip(("address", "token", "key"), typed_parts(_parsed(line[1].split()[1:])), strict=True)))
        command = ["join", "--name", "guest", "--guest", "--priority", priority, "--stdin", "--state", str(folder / "state")]
        command += ["--receipts", str(folder / "receipts.jsonl")]
        sensors = Sensors.here()._replace(idle_s=lambda: 1e6 if self.away else 0.0)
        self.watcher = Watcher(Conditions(parse(["idle"]), sensors), lambda: shoal_worker(command, invitation), self.told.append)
        self.watching = threading.Thread(target=self.watcher.run)
        self.watching.start()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait(self, condition: object) -> None:
        until = time.monotonic() + WAIT_S
        while not condition():  # type: ignore[operator]
            if time.monotonic() > until:
                raise TimeoutError(f"{self.told} {self.log('coordinator')[-2000:]}")
            time.sleep(0.005)

    def accepted(self) -> int:
        """Contributions that the worker has written down as confirmed."""
        file = self.folder / "receipts.jsonl"
        return file.read_text().count('"accepted"') if file.exists() else 0

    def work(self, more: int = 3) -> int:
        """The person is away until the worker has done some units; returns its process."""
        before, self.away = self.accepted(), True
        self.wait(lambda: self.accepted() >= before + more)
        worker = self.watcher.worker
        assert worker is not None
        return worker.pid

    def visit(self, moment_s: float) -> Visit:
        """The person returns some time after the worker's last result."""
        pid = self.work()
        time.sleep(moment_s)
        freed, worker, began = memory_bytes(pid), self.watcher.worker, time.monotonic()
        assert worker is not None
        self.away = False
        self.wait(lambda: worker.poll() is not None)
        took_s = time.monotonic() - began
        self.wait(lambda: self.watcher.worker is None)
        return Visit(took_s, freed)

    def close(self) -> None:
        self.watcher.stop()
        self.watching.join()
        self.coordinator.send_signal(signal.SIGTERM)
        self.coordinator.wait()


def measure(priority: str = "lowest") -> Iterator[Row]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        with closing(Bench(Path(name) / "visits", "normal")) as bench:
            visits = [bench.visit(0.37 * number % 1.0) for number in range(VISITS)]
        yield _visits(visits)
        yield _lost(bench)
        with closing(Bench(Path(name) / "beside", "normal", LONG_UNITS)) as bench:
            yield _beside(bench, priority)


def _visits(visits: list[Visit]) -> Row:
    took_ms = sorted(1000 * visit.took_s for visit in visits)
    worst, median = took_ms[-1], statistics.median(took_ms)
    freed = statistics.median(visit.freed_bytes for visit in visits) / 1e6
    note = f"median {median:.0f} ms of {len(visits)}; then {freed:.0f} MB are free"
    return Row("a person returns: until the worker's process has ended, worst", worst, 5000, "ms", worst / 5000, "<= 1", note)


def lower(pid: int) -> None:
    """Give all threads of a worker the priority that it takes itself when it starts; a start beside other load would take minutes."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
    session = Path(f"/proc/{pid}/autogroup")
    if session.exists():
        session.write_text("19")


def _beside(bench: Bench, priority: str) -> Row:
    cores = len(os.sched_getaffinity(0))
    pid = bench.work(1)
    if priority == "lowest":
        lower(pid)
    counts = shared_memory.SharedMemory(create=True, size=8 * cores)
    counters = counts.buf.cast("Q")
    programs = [subprocess.Popen([sys.executable, "-c", HASHING, counts.name, str(place)]) for place in range(cores)]
    alone, beside, taken = list[float](), list[float](), 0.0
    try:
        bench.wait(lambda: all(counters))
        for _ in range(PAIRS):
            for rates, number in ((alone, signal.SIGSTOP), (beside, signal.SIGCONT)):
                os.killpg(pid, number)
                before, own, began = sum(counters), cpu_seconds(pid), time.monotonic()
                time.sleep(SLICE_S)
                rates.append((sum(counters) - before) / (time.monotonic() - began))
                taken += cpu_seconds(pid) - own if number == signal.SIGCONT else 0.0
    finally:
        for program in programs:
            program.kill()
            program.wait()
        counters.release()
        counts.close()
        counts.unlink()
    ratio = statistics.median(one / other for one, other in zip(alone, beside, strict=True))
    share = taken / (PAIRS * SLICE_S * cores)
    note = f"worker of {priority} priority; it got {share:.1%} of the processors beside it"
    rates = statistics.median(beside), statistics.median(alone)
    return Row("a person's program on all cores, alone ÷ beside", *rates, "hashes/s", ratio, "<= 1.03", note)


def _lost(bench: Bench) -> Row:
    """Results that were confirmed and are not in the weights, and results that were not accepted."""
    folder = bench.folder
    command = [sys.executable, "-m", "shoal", "audit", str(folder / "run"), "--receipts", str(folder / "receipts.jsonl")]
    audit = subprocess.run(command, capture_output=True, text=True, check=False)
    receipts = [json.loads(line) for line in (folder / "receipts.jsonl").read_text().splitlines()]
    refused = sum(receipt["status"] not in ("accepted", "finished") for receipt in receipts if "status" in receipt)
    lost = refused + (audit.returncode != 0)
    note = f"{bench.accepted()} results confirmed over {VISITS} pauses; the audit {'is clean' if audit.returncode == 0 else 'fails'}"
    return Row("results lost by giving way", lost, bench.accepted(), "results", lost / max(1, bench.accepted()), "<= 0", note)
