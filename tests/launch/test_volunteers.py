"""The documented dist-llm-train files, as written but for their size and their way: workers are threads here."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.config.load import File, Override, resolve
from shoal.config.presets import find
from shoal.coordinator.audit import audit
from shoal.coordinator.evidence import gather
from shoal.launch.threads import WorkerThreads
from shoal.runs.coordinating import prepare
from shoal.runs.given import NOTHING
from shoal.runs.recorder import Reporter

SMALL = {
    "transport.kind": "in-process",
    "evaluation.strategy": "never",
    "checkpoint.strategy": "never",
    "coordinator.heartbeat_interval_s": "0.5",
}
TINY = {"model.hidden_size": "16", "model.num_layers": "1", "model.num_heads": "2", "training.epochs": "3"}


class Notes(Reporter):
    """What people are told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def message(self, text: str) -> None:
        self.told.append(text)

    def wait_for(self, words: str, seconds: float = 60.0) -> str:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for text in list(self.told):
                if words in text:
                    return text
            threading.Event().wait(0.02)
        raise AssertionError(f"nobody said {words!r}: {self.told}")


def coordinated(folder: Path, preset: str, workers: int, **settings: str) -> tuple[Any, Notes]:
    overrides = [Override(path, value, "test") for path, value in (SMALL | settings).items()]
    loaded = resolve([File(find(f"dist-llm-train/{preset}") or "")], overrides)
    assert loaded.ok, loaded.problems
    notes = Notes()
    return prepare(loaded, run_dir=str(folder / "run"), resume=False, reporters=[notes], workers=workers), notes


def staff(made: Any, folder: Path, names: list[str]) -> WorkerThreads:
    threads = WorkerThreads(folder / "run" / "workers", made.invitation, names, NOTHING, lambda text: None)
    threads.start()
    return threads


def learned(folder: Path) -> Counter[tuple[int, int]]:
    lines = (folder / "run" / "coordinator" / "ledger.jsonl").read_text().splitlines()
    contributions = [one for line in lines for one in json.loads(line)["from"]]
    return Counter((one[6], batch) for one in contributions for batch in range(one[7] - one[8], one[7]))


@pytest.mark.parametrize("preset", ["lan", "wan-conservative", "wan-aggressive"])
def test_a_documented_file_trains_to_its_end_and_learns_from_no_batch_twice(tmp_path: Path, preset: str, capsys: Any) -> None:
    small = TINY if preset == "lan" else {"training.epochs": "2"}
    made, notes = coordinated(tmp_path, preset, 3 if preset == "wan-conservative" else 2, **small)
    listed = made.loop.run.cluster.workers
    workers = staff(made, tmp_path, list(listed))
    summary = made.loop.train()
    workers.close()
    made.loop.server.close()
    assert summary["status"] == "completed", notes.told
    assert set(learned(tmp_path).values()) == {1}
    found: list[str] = []
    evidence = gather(tmp_path / "run" / "coordinator", (tmp_path / "run" / "workers").glob("*.jsonl"), found)
    assert audit(evidence, found, tasks=True).violations == []
    assert main(["status", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "scheduler gale-shapley" in shown
    assert "task-1" in shown


@pytest.mark.parametrize(
    ("preset", "rule", "needs", "listed", "missing"),
    [
        ("federated", "krum", 13, ["client-1", "client-2"], "client-2 (198.51.100.20:8002) is missing"),
        (
            "high-security",
            "bulyan",
            15,
            ["datacenter-1", "edge-node-1", "volunteer-1"],
            "edge-node-1 (203.0.113.30:8002), volunteer-1 (198.51.100.40:8003) are missing",
        ),
    ],
)
def test_a_rule_that_needs_more_workers_says_who_is_missing_and_trains_when_they_have_come(
    tmp_path: Path, preset: str, rule: str, needs: int, listed: list[str], missing: str
) -> None:
    made, notes = coordinated(tmp_path, preset, len(listed), **TINY)
    ending: list[dict[str, Any]] = []
    running = threading.Thread(target=lambda: ending.append(made.loop.train()))
    running.start()
    first = staff(made, tmp_path, listed[:1])
    said = notes.wait_for(f"{rule} needs {needs} contributions and 1 workers are here")
    assert said.endswith(f"waiting for {needs - 1} more; {missing}")
    others = staff(made, tmp_path, [*listed[1:], *(f"guest-{number}" for number in range(needs - len(listed)))])
    running.join(120)
    for workers in (first, others):
        workers.close()
    made.loop.server.close()
    assert ending[0]["status"] == "completed"
    assert ending[0]["contributions"]["accepted"] >= needs
    assert set(learned(tmp_path).values()) == {1}
