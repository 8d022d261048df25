"""How a student leaves a class: soon, also where the database does not answer any more; and the teacher's table says why."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.errors import ShoalError
from shoal.reporters.class_table import worker_table
from shoal.runs.connections import JoinOptions
from shoal.runs.coordinator_setup import ReadyCoordinator
from shoal.runs.worker_run import JoinedWorker
from shoal.transports.netem import LinkProfile, NetemProxy
from shoal.transports.postgres import reconnecting
from shoal.transports.postgres.access import connect
from shoal.transports.postgres.queries import look
from tests.support.classroom import School
from tests.support.eventually import eventually
from tests.support.processes import HANG_S

FINE = LinkProfile(round_trip_ms=0.0, jitter_ms=0.0, loss=0.0, mbit_per_s=1e6)
PATIENCE_S = float(HANG_S)
LONG = {"training": {"batch_size": 32, "epochs": 1000}}


@contextmanager
def teaching(school: School, *layers: dict[str, Any]) -> Iterator[ReadyCoordinator]:
    """A coordinator at work, until the test is over."""
    made = school.coordinate(LONG, *layers)

    def train() -> None:
        with suppress(ShoalError):
            made.loop.train()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.loop.interrupt()
        thread.join(PATIENCE_S)
        made.loop.server.close()
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "strategy", [{"strategy": {"kind": "workunits", "batches_per_unit": 2, "units_per_update": 1}}, {"strategy": {"kind": "async"}}]
)
@pytest.mark.parametrize("gone", ["cut off", pytest.param("not there", marks=pytest.mark.long)])
def test_a_student_whose_database_is_gone_leaves_when_it_is_first_asked_to(
    school: School, monkeypatch: pytest.MonkeyPatch, strategy: dict[str, Any], gone: str
) -> None:
    monkeypatch.setitem(reconnecting._CONNECTING, "connect_timeout", 2)
    monkeypatch.setattr("shoal.runs.worker_run._PROBE_S", 1.0)
    told: list[str] = []
    with teaching(school, strategy) as coordinating:
        proxy = NetemProxy(f"tcp://{school.access.host}:{school.access.port}", FINE)
        here = school.student._replace(host="127.0.0.1", port=int(proxy.address.rpartition(":")[2]))
        worker = JoinedWorker(JoinOptions(here.address, "", None, name="ada", state=school.folder / "state"), told.append)
        worker.prepare()
        working = threading.Thread(target=worker.work, daemon=True)
        working.start()
        eventually(lambda: coordinating.loop.step > 2, "the class is at work")
        proxy.cut() if gone == "cut off" else proxy.close()
        eventually(lambda: worker.waits, "the student asks a database that does not answer")
        asked_at = time.monotonic()
        worker.stop()
        working.join(PATIENCE_S)
        assert not working.is_alive()
        assert time.monotonic() - asked_at < PATIENCE_S / 10, told  # it would wait for as long as its patience lasts
        assert told[-1] == "the coordinator does not answer: leaving without a message to it"
        if gone == "cut off":
            proxy.close()


def test_the_teachers_table_says_why_a_student_left(school: School, capsys: pytest.CaptureFixture[str]) -> None:
    with teaching(school):
        for name, why in (("ben", "cannot read \x1b[2J Jürgen's pictures"), ("eve", "")):
            joined = JoinedWorker(JoinOptions(school.student.address, "", None, name=name, state=school.folder / name), lambda text: None)
            if why:
                joined.refuse(ShoalError(why))
            else:
                joined.leave()
        with connect(school.access) as connection:
            view = look(connection)
        assert view is not None
        _, *rows = worker_table(view.workers)
        states = {row[0]: row[1] for row in rows}
        assert states == {"ben": "left: cannot read ?[2J J?rgen's pictures", "eve": "left"}
        capsys.readouterr()
        assert main(["status", school.access.address]) == 0
        assert "left: cannot read" in capsys.readouterr().out


def test_the_teachers_table_and_status_say_why_a_student_pauses(school: School, capsys: pytest.CaptureFixture[str]) -> None:
    with teaching(school) as coordinating:
        options = JoinOptions(school.student.address, "", None, name="ben", state=school.folder / "ben")
        joined = JoinedWorker(options, lambda text: None)
        joined.stop("paused: its computer is in use")
        joined.leave()
        with connect(school.access) as connection:
            view = look(connection)
        assert view is not None
        assert [row[:2] for row in worker_table(view.workers)[1:]] == [("ben", "paused: its computer is in use")]
        assert school.ask("SELECT alive FROM shoal.worker_list") == [(False,)]
        members = coordinating.loop.status.members
        eventually(lambda: members.paused() == {"ben": "paused: its computer is in use"}, "the coordinator has read it")


def test_a_teacher_pauses_a_class_and_shows_a_student_out_who_hears_why(school: School, capsys: pytest.CaptureFixture[str]) -> None:
    with teaching(school) as made:
        coordinator, folder = made.loop.coordinator, str(made.loop.directory.path)
        for name in ("eve", "ada"):
            school.worker(name)
        eventually(lambda: coordinator.state.version >= 3, "the class learns")
        assert main(["pause", folder]) == 0
        eventually(lambda: main(["status", folder]) == 0 and "paused" in capsys.readouterr().out, "everybody sees that it is paused")
        version = coordinator.state.version
        assert main(["evict", folder, "eve"]) == 0
        eventually(lambda: school.problems, "she cannot go on")
        assert "the teacher keeps you out" in str(school.problems.pop())
        assert coordinator.state.version == version, "nothing is made while it is paused"
        assert main(["resume", folder]) == 0
        eventually(lambda: coordinator.state.version >= version + 3, "the class goes on without her")
        assert main(["evict", folder, "eve", "--undo"]) == 0
        eventually(lambda: school.ask("SELECT quarantined FROM shoal.standings WHERE quarantined IS NOT NULL") == [], "she may come back")
