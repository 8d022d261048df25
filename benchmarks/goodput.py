"""Islands that die: four workers under DiLoCo, of which one is killed (`kill -9`) every 20 s, against the same run left in peace.

Goodput is samples per second that went into the weights, from the fifth round on. Afterwards `shoal audit` must be content. Beside it
torchft's DiLoCo, with a model of the same size, the same rounds and the same deaths: how long until a round has the killed one in it
again, and how long the others went without a round. Ours starts its processes again itself; torchft's replicas are started again at once
by this program, whatever they ended of, as torchrun would.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import peers
from run import Row

EVERY_S, KILLS, START_S = 20.0, 6, 120.0
CONFIG = """\
dialect: shoal
model: {kind: gpt, hidden_size: 64, num_layers: 2, num_heads: 4, max_seq_len: 64, dropout: 0.0}
data: {source: {kind: builtin, name: python-source}, tokenizer: bytes, sequence_length: 64}
training: {batch_size: 8, max_steps: 10000000, epochs: 100000, device: cpu, optimizer: {name: AdamW, learning_rate: 0.001}}
strategy: {kind: diloco, inner_steps: 20, quorum: 3, grace_s: 0.5}
engine: {kind: ddp}
launch: {devices_per_node: 1}
evaluation: {strategy: never}
checkpoint: {strategy: steps, every_steps: 200}
logging: {every_steps: 1}
coordinator: {heartbeat_interval_s: 1.0}
"""


APP = Path(__file__).parent / "peer_apps" / "torchft_app.py"
NAMES = ["w1", "w2", "w3", "w4"]
SPEC = {"width": 64, "layers": 2, "heads": 4, "length": 64, "batch": 8, "inner_steps": 20, "quorum": 3}
LIGHTHOUSE = {"quorum": 3, "grace_ms": 500, "heartbeat_timeout_ms": 1000}


class Round(NamedTuple):
    """A round that ended: when, what went into the weights so far, and who was in it."""

    at: float
    samples: float
    workers: frozenset[str]


class Outcome(NamedTuple):
    """What became of a run."""

    rate: float
    """Samples per second."""
    recovery_s: float
    """From a death until the dead one is in a round again: the median."""
    stall_s: float
    """How long there was no round after a death: the median."""


def watched(rounds: Callable[[], list[Round]], kill: Callable[[str], None] | None, names: list[str]) -> Outcome:
    """Kill one worker after the other, if that is wanted, and say what it cost."""
    until = time.monotonic() + START_S
    while len(rounds()) < 5:
        if time.monotonic() > until:
            raise RuntimeError(f"there were {len(rounds())} rounds in {START_S:.0f} s")
        time.sleep(0.2)
    first, deaths = rounds()[-1], list[tuple[float, str]]()
    for number in range(KILLS):
        time.sleep(EVERY_S)
        if kill is not None:
            deaths.append((time.time(), names[number % len(names)]))
            kill(deaths[-1][1])
    time.sleep(EVERY_S)
    there = rounds()
    last = there[-1]
    back = [_back(there, died, name) for died, name in deaths]
    still = [next((one.at - died for one in there if one.at > died), EVERY_S) for died, _ in deaths]
    return Outcome(
        (last.samples - first.samples) / (last.at - first.at), *(statistics.median(each) if each else 0.0 for each in (back, still))
    )


def _back(there: list[Round], died: float, name: str) -> float:
    """What the dead one had sent before may still be in the round that was open: the rounds after that count."""
    return next((one.at - died for one in [one for one in there if one.at > died][1:] if name in one.workers), EVERY_S)


# --- ours ------------------------------------------------------------------------------------------------


def ours(folder: Path, disturb: bool) -> tuple[Outcome, bool]:
    """How it went, and whether nothing was lost or counted twice."""
    (folder / "config.yaml").write_text(CONFIG)
    run = folder / "run"
    command = [sys.executable, "-m", "shoal", "train", str(folder / "config.yaml"), "--workers", "4", "--run-dir", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    seen: list[Round] = []
    with _Following(run / "coordinator" / "ledger.jsonl", seen):
        try:
            outcome = watched(lambda: seen, (lambda name: os.kill(_island(run, name), signal.SIGKILL)) if disturb else None, NAMES)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
    audit = subprocess.run([sys.executable, "-m", "shoal", "audit", str(run)], capture_output=True)
    return outcome, audit.returncode == 0


class _Following:
    """Reads a ledger while it is written, and notes when each round came."""

    def __init__(self, path: Path, into: list[Round]) -> None:
        self.path, self.into = path, into
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        while not self.path.exists() and not self._over.wait(0.1):
            pass
        samples, rest = 0.0, b""
        with self.path.open("rb") as file:
            while not self._over.wait(0.02):
                *lines, rest = (rest + file.read()).split(b"\n")
                for line in map(json.loads, lines):
                    if "version" not in line:
                        continue
                    taken = line["from"]
                    samples += sum(one[4] for one in taken)
                    self.into.append(Round(time.time(), samples, frozenset(one[0] for one in taken)))


def _island(run: Path, name: str) -> int:
    """The process that computes for a worker."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, environ = (path / "cmdline").read_text().split("\0"), (path / "environ").read_text()
        except OSError:
            continue
        if "join" in command and re.search(r"\bRANK=0\b", environ) and str(run / "workers" / name) in command:
            return int(path.name)
    raise SystemExit(f"{name} is not running")


# --- torchft ---------------------------------------------------------------------------------------------


def theirs(disturb: bool) -> Outcome:
    seen: dict[int, Round] = {}
    running: dict[str, subprocess.Popen[str]] = {}
    over = threading.Event()
    lighthouse = _started("lighthouse", LIGHTHOUSE)
    try:
        assert lighthouse.stdout is not None
        address = json.loads(lighthouse.stdout.readline())

        def start(name: str) -> None:
            running[name] = _started("replica", SPEC | {"name": name, "seed": NAMES.index(name), "lighthouse": address})
            threading.Thread(target=_hear, args=(running[name], name, seen, again), daemon=True).start()

        def again(name: str) -> None:
            running[name].wait()
            if not over.is_set():
                start(name)

        for name in NAMES:
            start(name)
        return watched(lambda: _totals(seen), (lambda name: running[name].kill()) if disturb else None, NAMES)
    finally:
        over.set()
        for process in (*running.values(), lighthouse):
            process.kill()
            process.wait()


def _started(role: str, spec: dict[str, Any]) -> subprocess.Popen[str]:
    command = [str(peers.python("torchft")), str(APP), role, json.dumps(spec)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


_HEARING = threading.Lock()


def _hear(process: subprocess.Popen[str], name: str, seen: dict[int, Round], again: Callable[[str], None]) -> None:
    """Each replica tells of each round; the first to tell says when it was. One that ends is started again."""
    assert process.stdout is not None
    for told in map(json.loads, process.stdout):
        with _HEARING:
            known = seen.get(told["round"], Round(told["at"], 0.0, frozenset()))
            seen[told["round"]] = Round(known.at, known.samples + told["samples"], known.workers | {name})
    again(name)


def _totals(seen: dict[int, Round]) -> list[Round]:
    there, samples = [], 0.0
    with _HEARING:
        rounds = sorted(seen.items())
    for _, one in rounds:
        samples += one.samples
        there.append(one._replace(samples=samples))
    return there


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        peace, _ = ours(Path(one), disturb=False)
        disturbed, clean = ours(Path(other), disturb=True)
    peer_peace, peer = theirs(disturb=False), theirs(disturb=True)
    note = "audit clean" if clean else "AUDIT FAILED"
    deaths = "one island of four killed every 20 s"
    beside = f"torchft's DiLoCo: {peer.rate / peer_peace.rate:.3f}"
    return [
        Row(f"goodput, {deaths}", disturbed.rate, peace.rate, "samples/s", disturbed.rate / peace.rate, "≥ 0.9", f"{note}; {beside}"),
        Row("until the killed one is in a round again", *_compared(disturbed.recovery_s, peer.recovery_s), "", "torchft"),
        Row("until the others have their next round", *_compared(disturbed.stall_s, peer.stall_s), "", "torchft"),
    ]


def _compared(mine: float, peer: float) -> tuple[float, float, str, float]:
    return mine, peer, "s", mine / peer
