"""The documented dist-llm-train files, as written but for their size and their way: workers are threads here."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import join
from shoal.cli.main import main
from shoal.config.load import ConfigFile, Override, resolve
from shoal.config.presets import find
from shoal.coordinator.audit.files import gather
from shoal.coordinator.audit.run import audit
from shoal.errors import ShoalError
from shoal.launch.postgres.server import EmbeddedPostgres
from shoal.launch.threads import WorkerThreads
from shoal.runs.coordinator_setup import prepare
from shoal.runs.live_objects import NO_LIVE_OBJECTS
from shoal.runs.monitoring.recorder import Reporter
from shoal.transports.postgres import schema
from shoal.transports.postgres.access import connect, create_database
from tests.support.processes import HANG_S

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

    def wait_for(self, words: str) -> str:
        until = time.monotonic() + HANG_S
        while time.monotonic() < until:
            for text in list(self.told):
                if words in text:
                    return text
            threading.Event().wait(0.02)
        raise AssertionError(f"nobody said {words!r}: {self.told}")


def coordinated(folder: Path, preset: str, workers: int, **settings: str) -> tuple[Any, Notes]:
    overrides = [Override(path, value, "test") for path, value in (SMALL | settings).items()]
    loaded = resolve([ConfigFile(find(f"dist-llm-train/{preset}") or "")], overrides)
    assert loaded.ok, loaded.problems
    notes = Notes()
    return prepare(loaded, run_dir=str(folder / "run"), resume=False, reporters=[notes], workers=workers), notes


def staff(made: Any, folder: Path, names: list[str]) -> WorkerThreads:
    threads = WorkerThreads(made.loop.run, folder / "run" / "workers", made.invitation, names, NO_LIVE_OBJECTS, lambda text: None)
    threads.start()
    return threads


def learned(folder: Path) -> Counter[tuple[int, int]]:
    lines = (folder / "run" / "coordinator" / "ledger.jsonl").read_text().splitlines()
    return batches_in([json.loads(line) for line in lines])


def batches_in(ledger: list[dict[str, Any]]) -> Counter[tuple[int, int]]:
    """How often each batch of each epoch was learned from."""
    contributions = [one for line in ledger for one in line.get("from", ())]
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
    assert f"progress     step {summary['steps']} (100%)" in shown, "the batches decide how many steps there are"
    assert "tasks are finished" in shown


def test_the_steps_of_an_option_are_the_steps_of_every_message(tmp_path: Path, capsys: Any) -> None:
    """The preset's three epochs would end after eleven of these steps."""
    chosen = [f"--set={path}={value}" for path, value in SMALL.items()]
    options = ["--run-dir", str(tmp_path / "run"), "--set=logging.sinks=[]", *chosen]
    assert main(["train", "dist-llm-train/wan-conservative", "--max-steps", "14", *options]) == 0
    told = capsys.readouterr()
    assert "completed after 14 steps" in told.out
    assert set(re.findall(r"step \d+/(\d+)", told.err + told.out)) == {"14"}
    assert main(["status", str(tmp_path / "run")]) == 0
    assert "step 14 of 14 (100%)" in capsys.readouterr().out
    assert main(["audit", str(tmp_path / "run")]) == 0
    assert "14 versions" in capsys.readouterr().out


def test_the_file_for_a_first_run_learns_visibly(tmp_path: Path) -> None:
    made, notes = coordinated(tmp_path, "first-run", 3, **{"training.epochs": "1"})
    workers = staff(made, tmp_path, list(made.loop.run.cluster.workers))
    summary = made.loop.train()
    workers.close()
    made.loop.server.close()
    assert summary["loss_fell"], notes.told
    assert summary["metrics"]["train"]["loss"] < 4.0


def test_a_text_of_ones_own_is_one_line_of_the_file(tmp_path: Path) -> None:
    preset = Path(find("dist-llm-train/first-run") or "").read_text()
    (tmp_path / "my-text.txt").write_text("some words\n" * 1000)
    (tmp_path / "config.yaml").write_text(preset.replace("# text_file: my-text.txt", f"text_file: {tmp_path / 'my-text.txt'}"))
    source = resolve([ConfigFile(str(tmp_path / "config.yaml"))]).run.data.source
    assert (source.kind, source.path) == ("text", str(tmp_path / "my-text.txt"))


def test_init_leads_from_the_documented_values_to_a_file_that_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--preset", "dist-llm-train/wan-conservative"]) == 0
    command = capsys.readouterr().out.rpartition("shoal ")[2].split()
    assert main(command) == 0
    assert "shoal init" not in capsys.readouterr().out
    assert main(["config", "check", command[-1]]) == 0


def test_a_scheduler_gives_out_tasks_over_xml_rpc(tmp_path: Path) -> None:
    trained_with_tasks(tmp_path, **{"transport.kind": "xmlrpc", "transport.port": "0", "scheduler.kind": "capability"})


def test_a_scheduler_gives_out_tasks_through_a_database(tmp_path: Path, server: EmbeddedPostgres) -> None:
    access = server.access._replace(database="tasks")
    create_database(access)
    with connect(access) as connection:
        schema.init(connection)
    place = {"kind": "postgres", "host": access.host, "port": str(access.port), "user": access.user, "password": access.password or ""}
    settings = {f"transport.{name}": value for name, value in (place | {"database": access.database}).items()}
    trained_with_tasks(tmp_path, **settings, **{"scheduler.kind": "priority"})


def trained_with_tasks(folder: Path, **settings: str) -> None:
    """Whatever the way, the run ends, and no batch of its tasks was learned from twice."""
    made, notes = coordinated(folder, "wan-conservative", 3, **settings, **{"training.epochs": "1"})
    ledger: Any = made.loop.store.ledger
    written: list[dict[str, Any]] = []
    append = ledger.append
    ledger.append = lambda line: (written.append(line), append(line))
    workers = staff(made, folder, list(made.loop.run.cluster.workers))
    summary = made.loop.train()
    workers.close()
    made.loop.server.close()
    assert summary["status"] == "completed", notes.told
    batches = batches_in(written)
    assert set(batches.values()) == {1}
    assert len(batches) >= 9, "the rule takes three contributions, and the epoch's eleven batches make three rounds"
    tasks = made.loop.coordinator.tasks.tasks.tasks
    begun = {task.id for task in tasks if any((0, batch) in batches for batch in range(task.first, task.end))}
    assert begun == {"task-1", "task-2", "task-3"}, "no two of them have nine batches, whoever is slow"


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
def test_a_rule_says_how_many_workers_are_missing_and_trains_when_they_have_come(
    tmp_path: Path, preset: str, rule: str, needs: int, listed: list[str], missing: str
) -> None:
    patient = {"coordinator.heartbeat_interval_s": "2"}  # so many come at once that a busy machine does not hear all of them in a second
    made, notes = coordinated(tmp_path, preset, len(listed), **TINY, **patient)
    ending: list[dict[str, Any]] = []
    running = threading.Thread(target=lambda: ending.append(made.loop.train()))
    running.start()
    first = staff(made, tmp_path, listed[:1])
    said = notes.wait_for(f"{rule} needs {needs} contributions and 1 workers are here")
    assert said.endswith(f"waiting for {needs - 1} more; {missing}")
    others = staff(made, tmp_path, [*listed[1:], *(f"guest-{number}" for number in range(needs - len(listed)))])
    running.join(HANG_S)
    for workers in (first, others):
        workers.close()
    made.loop.server.close()
    assert ending[0]["status"] == "completed"
    assert ending[0]["contributions"]["accepted"] >= needs
    assert set(learned(tmp_path).values()) == {1}


@pytest.mark.parametrize(
    "option", ["--ask", "--set training.device=cpu", "--data .", "--receipts r", "--state s", "--netem good", "--factory a:b"]
)
def test_an_option_that_has_no_effect_on_a_node_is_refused(option: str) -> None:
    with pytest.raises(ShoalError, match=f"{option.split()[0]}: a node holds layers and trains nothing; leave it out"):
        join.run(["tcp://127.0.0.1:1", "--token", "t", "--node", *option.split()])
