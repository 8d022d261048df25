"""Real processes that are killed at random: a coordinator and workers on built-in data, each started again at once."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.launch import forkserver
from shoal.runs.connections import TransportConnection
from shoal.transports.keys import key_from_text
from shoal.worker.sender import ConnectionLostError
from tests.support.processes import run_python

DIGITS = """\
model: {kind: mlp, hidden_sizes: [64]}
data: {source: {kind: builtin, name: digits}}
training: {max_steps: STEPS, batch_size: 16, optimizer: {name: SGD, learning_rate: 0.1}, schedule: {kind: cosine}}
"""
TEXT = """\
model: {kind: gpt, hidden_size: 16, num_layers: 1, num_heads: 2, max_seq_len: 16}
data: {source: {kind: builtin, name: zen}, tokenizer: bytes, sequence_length: 16}
training: {max_steps: STEPS, batch_size: 8, optimizer: {name: AdamW, learning_rate: 0.003}}
"""
IMAGES = """\
model: {kind: dcgan, image_size: 16, latent_dim: 8, generator_features: 4, discriminator_features: 4}
data: {source: {kind: builtin, name: digits}}
training: {max_steps: STEPS, batch_size: 16, optimizer: {name: Adam, learning_rate: 0.001}}
"""
CONFIG = """\
dialect: shoal
name: killed
seed: 42
{learns}evaluation: {{strategy: never}}
checkpoint: {{strategy: never}}
transport: {{kind: {transport}, port: 0}}
cluster: {{num_workers: {workers}}}
coordinator: {{heartbeat_interval_s: 5.0}}
strategy: {strategy}
"""
_START_S = 300.0


class Child:
    """One process of the run, and its log."""

    def __init__(self, arguments: list[str], log: Path, given: str = "") -> None:
        self.path, self.from_byte = log, log.stat().st_size if log.exists() else 0
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.log = log.open("ab")
        self.process = forkserver.start(["-m", "shoal", *arguments], stdout=self.log, stderr=self.log, env=environment)
        if given:
            self.process.stdin.write(given.encode() + b"\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self, patience_s: float = 300.0) -> int:
        code = self.process.wait(patience_s)
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.log.close()
        return code

    @property
    def told(self) -> str:
        """What it has said since it was started."""
        return self.path.read_bytes()[self.from_byte :].decode(errors="replace")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


class Victims:
    """A run whose processes may be killed at any moment."""

    def __init__(
        self,
        folder: Path,
        strategy: str,
        steps: int,
        workers: int = 3,
        more: str = "",
        learns: str = DIGITS,
        transport: str = "zmq",
        slowdown: float = 1.0,
    ) -> None:
        self.folder, self.run = folder, folder / "run"
        folder.mkdir(parents=True, exist_ok=True)
        self.config = folder / "digits.yaml"
        settings = {"learns": learns.replace("STEPS", str(steps)), "transport": transport, "workers": workers, "strategy": strategy}
        self.config.write_text(CONFIG.format(**settings) + more)
        self.steps, self.slowdown = steps, slowdown
        self.names = [f"w{number}" for number in range(1, workers + 1)]
        self.workers: dict[str, Child] = {}
        self.receipts_before: dict[str, int] = {}
        self.recoveries_s: list[float] = []
        self.kills = {"coordinator": 0, "worker": 0}
        self.coordinator = self._coordinate([str(self.config)])
        self.invitation = _wait_for(self._invitation, "an invitation", self)

    def _coordinate(self, how: list[str]) -> Child:
        arguments = ["coordinate", *how, "--run-dir", str(self.run), "--host", "127.0.0.1"]
        return Child(arguments, self.folder / "coordinator.log")

    def _invitation(self) -> dict[str, Any] | None:
        words = (self.folder / "coordinator.log").read_text(errors="replace").split()
        if "--token" not in words or len(words) <= words.index("--token") + 1:
            return None
        key = words[words.index("--key") + 1] if "--key" in words else None
        address = words[words.index("join", words.index("with:")) + 1]
        return {"address": address, "token": words[words.index("--token") + 1], "key": key_from_text(key) if key else None}

    def start_workers(self) -> None:
        for name in self.names:
            self.start_worker(name)

    def start_worker(self, name: str) -> None:
        self.receipts_before[name] = self.receipts(name)
        path = str(self.run / "workers" / f"{name}.jsonl")
        arguments = ["join", "--stdin", "--name", name, "--receipts", path, "--patience", "60"]
        arguments += ["--slowdown", str(self.slowdown)]
        self.workers[name] = Child(arguments, self.folder / f"{name}.log", json.dumps(self.invitation))

    def receipts(self, name: str) -> int:
        path = self.run / "workers" / f"{name}.jsonl"
        return path.stat().st_size if path.exists() else 0

    def at_work(self) -> list[str] | None:
        """Workers that have contributed since they were started."""
        return [name for name in self.names if self.receipts(name) > self.receipts_before[name]] or None

    @property
    def version(self) -> int:
        """Where the run stands, as the ledger's last whole version says."""
        path = self.run / "coordinator" / "ledger.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().split(b"\n")
        for line in reversed(lines[:-1]):
            with contextlib.suppress(ValueError, KeyError):
                return int(json.loads(line)["version"])
        return 0

    def wait_for_version(self, version: int) -> int:
        """Until the run has come so far; how far it is then."""
        found: int = _wait_for(lambda: self.version if self.version >= version else None, f"version {version}", self)
        return found

    # --- killing ----------------------------------------------------------------------------------------

    def kill_coordinator(self, again_after_s: float | None = None) -> None:
        """Kill it, start it again, and see how long it takes to answer. It may be killed once more while it starts."""
        self.coordinator.kill()
        self.kills["coordinator"] += 1
        started = time.monotonic()
        self.coordinator = self._coordinate(["--resume"])
        if again_after_s is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.coordinator.process.wait(again_after_s)
            return self.kill_coordinator()
        _wait_for(self._answers, "the coordinator to answer", self)
        self.recoveries_s.append(time.monotonic() - started)
        return None

    def _answers(self) -> bool | None:
        """Whether it answers a stranger's sign of life: it says that it does not know it, and nothing else happens."""
        line = TransportConnection(self.invitation["address"], self.invitation["token"], self.invitation["key"])
        try:
            return bool(line.call({"kind": "heartbeat", "session": "nobody", "number": 1, "state": "probing"}, (), 5.0).header)
        except ConnectionLostError:
            return None
        finally:
            line.close()

    def kill_worker(self, name: str, restart: bool = True) -> None:
        self.workers[name].kill()
        self.kills["worker"] += 1
        if restart:
            self.start_worker(name)

    def killing(self, kills: int, chance: random.Random, share: float = 0.35, until: float = 0.95, pause_s: float = 0.3) -> Iterator[int]:
        """Kill `kills` times, spread over the run, at random moments, on average `pause_s` after each was due."""
        for number in range(kills):
            due = int(self.steps * until * number / kills)
            self.wait_for_version(due)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.coordinator.process.wait(chance.expovariate(1 / pause_s))
            if self.version >= self.steps:
                return
            if chance.random() < share:
                self.kill_coordinator(chance.uniform(0.1, 5.0) if chance.random() < 0.2 else None)
            else:
                busy = _wait_for(self.at_work, "a worker that works", self) if chance.random() < 0.9 else self.names
                self.kill_worker(chance.choice(busy or self.names))
            yield number + 1

    def finish(self, patience_s: float = 300.0) -> dict[str, Any]:
        """To the end of the run, which all processes reach; what the coordinator says of it."""
        code = self.coordinator.end(patience_s)
        assert code == 0, self.told("coordinator")
        for name, worker in self.workers.items():
            self._let_go(name, worker)
        summary: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return summary

    def _let_go(self, name: str, worker: Child) -> None:
        """A worker that the last coordinator process knew leaves in order; others may still look for it, or have given up."""
        known = any(f"{name} {what}" in self.coordinator.told for what in ("joined", "came back"))
        try:
            code = worker.end(_START_S if known else 15.0)
        except subprocess.TimeoutExpired:
            worker.kill()
            code = -1
        assert code == 0 or not known, self.told(name)

    def told(self, who: str) -> str:
        return (self.folder / f"{who}.log").read_text(errors="replace")[-2000:]

    def close(self) -> None:
        """Whatever is still there goes."""
        for child in [self.coordinator, *self.workers.values()]:
            child.kill()

    def left_behind(self) -> list[str]:
        """Processes that name this run's folder."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(self.run) in words and "shoal" in words:
                    found.append(words)
        return found


def _wait_for(found: Callable[[], Any], what: str, victims: Victims | None = None, patience_s: float = _START_S) -> Any:
    """Look until it is there. A coordinator that ended before its time is told at once."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        if (value := found()) is not None:
            return value
        coordinator = getattr(victims, "coordinator", None)
        if coordinator is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if coordinator.process.wait(0.02) == 0:
                    return found()
                raise AssertionError(f"the coordinator ended: {victims.told('coordinator') if victims else ''}")
    raise AssertionError(f"waited {patience_s:.0f} s for {what}: {victims.told('coordinator') if victims else ''}")


def accuracy(run: Path) -> float:
    """Of the final weights, on the held-out data."""
    told = run_python(["-m", "shoal", "eval", str(run), "--format", "json"])
    assert told.returncode == 0, told.stderr
    value: float = json.loads(told.stdout)["metrics"]["accuracy"]
    return value


def audit(run: Path) -> str:
    told = run_python(["-m", "shoal", "audit", str(run)])
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout
