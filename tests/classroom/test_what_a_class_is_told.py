"""What the teacher's screen, the run's status and the laptops say when the database dies, the lesson is stopped, and when it ends."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ShoalError
from shoal.launch.postgres.server import EmbeddedPostgres
from shoal.launch.run_database import _DatabaseWatch
from shoal.runs.coordinator_setup import ReadyCoordinator
from shoal.runs.folder.run_reader import RunFolder
from shoal.worker.session import how_it_ended
from tests.support.classroom import School
from tests.support.eventually import eventually
from tests.support.processes import HANG_S

SHORT = {"training": {"batch_size": 32, "epochs": 3}}
LONG = {"training": {"batch_size": 32, "epochs": 1000}}


class Lesson:
    """A coordinator at work in a thread."""

    def __init__(self, made: ReadyCoordinator) -> None:
        self.loop, self.problems = made.loop, list[BaseException]()
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _train(self) -> None:
        try:
            self.loop.train()
        except BaseException as problem:
            self.problems.append(problem)
        finally:
            self.loop.server.close()

    def end(self) -> None:
        self.loop.interrupt()
        self.thread.join(HANG_S)
        assert not self.thread.is_alive()
        assert not self.problems


def test_laptops_say_that_the_lesson_was_stopped_and_take_part_when_it_goes_on(school: School) -> None:
    lesson = Lesson(school.coordinate(SHORT, workers=2))
    for name in ("ann", "bo"):
        school.worker(name)
    eventually(lambda: lesson.loop.step >= 3 and len(school.workers) == 2, "the class is at work")
    lesson.end()
    for told in school.told.values():
        stopped = [text for text in told if text.startswith("the lesson has ended: the teacher stopped it")]
        assert len(stopped) == 1, told
        assert f"If it goes on within {HANG_S} s, this computer takes part again" in stopped[0]
    lesson = Lesson(school.coordinate(SHORT, workers=2, resume=True))
    lesson.thread.join(HANG_S)
    school.finish()
    assert lesson.problems == []
    for told in school.told.values():
        assert told.index("the lesson goes on") > told.index(next(text for text in told if "stopped it" in text))
        assert told[-1] == "the lesson has ended: it is complete"


def test_when_the_database_dies_and_returns_both_sides_say_so(school: School, server: EmbeddedPostgres) -> None:
    lesson = Lesson(school.coordinate(LONG, workers=1))
    school.worker("ann")
    eventually(lambda: lesson.loop.step >= 2, "the class is at work")
    folder, pid = RunFolder(lesson.loop.directory.path), server.pid
    assert pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: server.was_killed)
    eventually(lambda: folder.status()["state"] == "waiting for the database", "the status says what the run waits for")
    eventually(lambda: any("does not answer any more; trying again for up to" in text for text in school.told["ann"]))
    server.restart()
    eventually(lambda: any("answers again: going on" in text for text in school.told["ann"]))
    eventually(lambda: folder.status()["state"] == "running")
    texts = [event["text"] for event in folder.status()["events"]]
    lost = next(number for number, text in enumerate(texts) if text.startswith("warning: the database") and "trying again" in text)
    assert any("answers again: going on" in text for text in texts[lost:])
    step = lesson.loop.step
    eventually(lambda: lesson.loop.step > step, "the class goes on")
    lesson.end()


def test_a_laptop_leaves_when_a_lesson_that_was_stopped_does_not_go_on(school: School) -> None:
    lesson = Lesson(school.coordinate(LONG, workers=1))
    school.worker("ann")
    eventually(lambda: lesson.loop.step >= 2, "the class is at work")
    lesson.end()
    (worker,) = school.workers
    board: Any = worker.connections[0]
    eventually(lambda: "stopped it" in school.told["ann"][-1])
    board.desk.patience_s = 0.0
    for connection in (board.desk._connection, board.desk._heartbeats):
        connection.conninfo = connection.conninfo.replace(f"port={school.access.port}", "port=1")
    school.ask("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()")
    school.finish()
    assert school.told["ann"][-1] == "the lesson has ended: the teacher stopped it"


class DyingServer:
    """A server that was killed and does not start."""

    data = log = Path("postgres.log")

    def __init__(self) -> None:
        self.was_killed, self.reason = True, "the disk is full"

    def restart(self) -> None:
        if self.reason:
            raise ShoalError(self.reason)
        self.was_killed = False


def test_the_teacher_learns_once_why_a_database_does_not_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server, told = DyingServer(), list[str]()
    monkeypatch.setattr("shoal.launch.run_database.processes_above", lambda *bounds: [])
    server_of_the_run: Any = server
    watch = _DatabaseWatch(server_of_the_run)
    watch.report_to(told.append)
    for _ in range(3):
        watch.check()
    assert [text.partition(";")[0] for text in told] == [
        "warning: the run's PostgreSQL has ended and is started again",
        "warning: the disk is full",
    ]
    server.reason = ""
    watch.check()
    server.was_killed = True
    watch.check()
    assert len(told) == 3, "it is told anew when it has ended once more"


def test_how_a_run_ended_is_a_claim_of_its_coordinator() -> None:
    assert how_it_ended("interrupted", lesson=True) == "the lesson has ended: the teacher stopped it"
    assert how_it_ended("interrupted") == "the run has ended: its owner stopped it"
    assert how_it_ended("") == "the run has ended"
    assert how_it_ended("\x1b[2J" + 1000 * "x") == "the run has ended: ?[2J" + 196 * "x"
