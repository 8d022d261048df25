"""Two coordinators of one run: the second is refused, or the first stops and writes nothing more. Databases: test_postgres_faults.py."""

from __future__ import annotations

import errno
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.coordinator.durable import lock
from shoal.coordinator.durable.journal import FileJournal
from shoal.errors import ShoalError
from tests.support.kill_and_recover import Victims

STRATEGY = "{kind: async, contributions_per_update: 2}"


def no_locks(file: object, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("locks", [True, False], ids=["removed", "no locks on this file system"])
def test_a_coordinator_whose_lock_was_taken_writes_nothing_more(tmp_path: Path, locks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not locks:
        monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    first, second = FileJournal(tmp_path), FileJournal(tmp_path)
    number = first.begin()
    first.append({"kind": "accepted", "n": 0})
    if locks:
        with pytest.raises(ShoalError, match="another coordinator is at work"):
            second.begin()
        (tmp_path / "lock").unlink()
    assert [record["n"] for record, _ in second.recover(number)] == [0]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    writes: list[Callable[[], object]] = [lambda: first.append({"kind": "accepted", "n": 1}), first.begin]
    for write in writes:
        with pytest.raises(ShoalError, match="was removed or replaced, so another coordinator may be at work"):
            write()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    second.append({"kind": "accepted", "n": 2})
    second.close()
    assert [record["n"] for record, _ in FileJournal(tmp_path).recover(number)] == [0, 2]


def test_the_second_coordinator_of_a_folder_is_refused_or_the_first_one_stops(tmp_path: Path) -> None:
    victims = Victims(tmp_path, STRATEGY, steps=1_000_000, workers=2)
    try:
        victims.start_workers()
        victims.wait_for_version(20)
        second = victims._coordinate(["--resume"])
        assert second.end() == 2
        assert "is at work in" in second.told
        assert victims.coordinator.alive
        for folder in (victims.run, victims.run / "coordinator"):
            (folder / "lock").unlink()
        first, victims.coordinator = victims.coordinator, victims._coordinate(["--resume"])
        assert first.end() != 0
        assert "was removed or replaced, so another coordinator may be at work" in victims.told("coordinator")
        before = victims.version
        victims.wait_for_version(before + 20)
        victims.coordinator.process.send_signal(signal.SIGINT)
        assert victims.coordinator.end() == 130, victims.told("coordinator")
    finally:
        victims.close()
    assert json.loads((victims.run / "summary.json").read_text())["status"] == "interrupted"
    assert main(["audit", str(victims.run)]) == 0
