"""A disk that fails at any position of any write: the coordinator dies there, or the disk is full, or writes come in small pieces."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shoal.coordinator.durable import journal as journal_module
from shoal.coordinator.durable.journal import FileJournal, journals
from shoal.coordinator.durable.ledger import FileLedger
from shoal.coordinator.durable.snapshots import SnapshotWriter
from shoal.errors import ShoalError
from shoal.runs.folder import checkpoint as checkpoint_module
from shoal.runs.folder.checkpoint import Checkpoints
from shoal.runs.folder.file_store import FileStore
from tests.coordinator.test_journal_recovery import STRATEGIES, Durable, kept
from tests.support.small_cluster import FakeWorker

POSITIONS = 100
"""Places at which the disk fails, evenly spread over all that is written."""


class Crash(BaseException):
    """The process is gone."""


class Disk:
    """Takes so many bytes, and then fails; whatever else changes a file or a folder counts as a byte."""

    def __init__(self, room: int, problem: Callable[[], BaseException], most: int = 1 << 30) -> None:
        self.room, self.problem, self.most, self.written = room, problem, most, 0

    def take(self, size: int) -> int:
        """How many of these bytes it takes; at least one, or it raises."""
        taken = min(size, self.most, self.room)
        if size and not taken:
            raise self.problem()
        self.room, self.written = self.room - taken, self.written + taken
        return taken

    def write(self, file: Any, view: memoryview) -> int:
        return int(file.write(view[: self.take(len(view))]))

    def save(self, tensors: Any, path: Path, metadata: Any = None) -> None:
        save_file(tensors, path)
        size = path.stat().st_size
        taken = min(size, self.room)
        os.truncate(path, taken)
        self.take(taken)
        if taken < size:
            raise self.problem()


class Slow:
    """A file on such a disk."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, view: Any) -> int:
        return self._disk.write(self._file, memoryview(view))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.fixture
def inserted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Disk], None]]:
    """Put a disk under everything that a coordinator writes."""
    opened, opened_ledger, rename = FileJournal._opened, FileLedger._opened, Path.rename

    def insert(disk: Disk) -> None:
        def open_ledger(ledger: FileLedger) -> Any:
            ledger._file = slow = Slow(opened_ledger(ledger), disk)  # type: ignore[assignment]
            return slow

        def move(path: Path, target: Path) -> Path:
            disk.take(1)
            return rename(path, target)

        monkeypatch.setattr(journal_module, "_WRITEV", None)
        monkeypatch.setattr(FileJournal, "_opened", lambda journal, path, mode: Slow(opened(journal, path, mode), disk))
        monkeypatch.setattr(FileLedger, "_opened", open_ledger)
        monkeypatch.setattr(Path, "rename", move)
        monkeypatch.setattr(checkpoint_module, "save_file", disk.save)
        monkeypatch.setattr(os, "fsync", lambda descriptor: disk.take(1))

    yield insert
    monkeypatch.undo()


State = tuple[torch.Tensor, dict[str, Any]]


def happenings(cluster: Durable) -> Iterator[Callable[[], Any]]:
    """What happens in a small run, with two snapshots in it, one with a round open."""
    workers: list[FakeWorker] = []
    yield cluster.snapshot
    yield lambda: workers.extend(cluster.join(name) for name in "abc")
    for turn in range(5):
        for worker in range(2 if turn % 3 == 2 else 3):
            yield lambda worker=worker, turn=turn: cluster.step(workers[worker], float(turn + 1))
        yield lambda: cluster.pass_time(4.0)
        if turn in (1, 3):
            yield cluster.snapshot


def live(folder: Path) -> tuple[Durable, list[State], bool]:
    """Live until the disk fails: how things stood after each happening, and whether it came to the end."""
    cluster, states = Durable(folder, STRATEGIES["async"], 3), list[State]()
    try:
        for happen in happenings(cluster):
            states.append(state_of(cluster))
            happen()
        return cluster, [*states, state_of(cluster)], True
    except (Crash, ShoalError):
        return cluster, states, False


def state_of(cluster: Durable) -> State:
    return cluster.learner.vector.clone(), {**kept(cluster), "sequences": dict(cluster.coordinator.state.sequences)}


def is_same(first: State, second: State) -> bool:
    return torch.equal(first[0], second[0]) and first[1]["sequences"] == second[1]["sequences"]


def _full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.whole
@pytest.mark.parametrize("problem", [Crash, _full])
def test_wherever_the_disk_fails_what_was_confirmed_comes_back(
    tmp_path: Path, inserted: Callable[[Disk], None], problem: Callable[[], BaseException]
) -> None:
    healthy = Disk(1 << 40, problem)
    inserted(healthy)
    reference, states, whole = live(tmp_path / "healthy")
    reference.close()
    assert whole
    for room in range(1, healthy.written, max(1, healthy.written // POSITIONS)):
        inserted(Disk(room, problem))
        cluster, confirmed, whole = live(tmp_path / str(room))
        assert not whole
        inserted(Disk(1 << 40, problem))
        for file in (cluster.journal._file, cluster.file._file):
            if file is not None:
                file.close()
        cluster.journal._file = None  # a process that died cuts off nothing
        cluster.journal.close()
        if not Checkpoints(tmp_path / str(room) / "snapshots", 2).all():
            assert len(confirmed) == 1, "only the first snapshot may be missing, before anybody has joined"
            continue
        back = Durable.of(tmp_path / str(room), cluster)
        back.close()
        now, done = state_of(back), len(confirmed) - 1  # the last one was under way
        either = states[done : done + 2]  # or between them: a contribution was taken, and its round is yet to close
        assert any(torch.equal(now[0], vector) for vector, _ in either), room
        assert any(now[1]["sequences"] == state["sequences"] for _, state in either), room


def test_a_disk_that_takes_three_bytes_at_a_time_gets_everything(tmp_path: Path, inserted: Callable[[Disk], None]) -> None:
    inserted(Disk(1 << 40, Crash, most=3))
    cluster, states, whole = live(tmp_path)
    assert whole
    cluster.close()
    back = Durable.of(tmp_path, cluster)
    back.close()
    assert is_same(state_of(back), states[-1])


def test_a_snapshot_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def sync(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def move(path: Path, target: Path) -> Path:
        done.append(f"rename {path.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", move)
    Checkpoints(tmp_path / "snapshots", 2).save(1, {"w": torch.ones(2)}, {})
    files = {"sync weights.safetensors", "sync state.safetensors", "sync state.json"}
    assert set(done[:3]) == files
    assert done[3:] == ["sync .partial-step-00000001", "rename .partial-step-00000001", "sync snapshots"]


# --- snapshots that cannot be written --------------------------------------------------------------------


def test_a_snapshot_that_cannot_be_written_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, told = FileStore(tmp_path), list[str]()
    writer = SnapshotWriter(store, told.append, threads=False)
    writer.write([], {"w": torch.zeros(1)}, {})
    assert not writer.due(False, 0.0)
    save, left = Checkpoints._save, [2]

    def fails(self: Checkpoints, *arguments: Any) -> Path:
        left[0] -= 1
        if left[0] >= 0:
            raise ShoalError("cannot save a checkpoint: Too many open files")
        return save(self, *arguments)

    monkeypatch.setattr(Checkpoints, "_save", fails)
    writer.write([], {"w": torch.ones(1)}, {})
    assert not writer.due(False, 100.0), "a pause first"
    assert "Too many open files; nothing is lost" in told[0]
    store.journal.append({"kind": "accepted", "seq": 1})
    assert not writer.due(True, 109.0)
    assert writer.due(False, 110.0)
    writer.write([], {"w": torch.ones(1)}, {})
    assert not writer.due(False, 111.0)
    assert not writer.due(False, 130.0), "a longer pause"
    assert writer.due(False, 131.0)
    writer.write([], {"w": torch.full((1,), 2.0)}, {})
    assert not writer.due(False, 200.0)
    found = store.snapshots.newest(pytest.fail)
    assert found is not None
    assert found.weights["w"].item() == 2.0
    assert len(told) == 2
    store.journal.close()


def test_a_journal_that_cannot_begin_leaves_the_one_before_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, told = FileStore(tmp_path), list[str]()
    writer = SnapshotWriter(store, told.append, threads=False)
    writer.write([], {"w": torch.zeros(1)}, {})
    writer.finish()

    def full(*arguments: Any, **more: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(os, "open", full)
        writer.write([], {"w": torch.ones(1)}, {})
    assert "Too many open files" in told[0]
    store.journal.append({"kind": "accepted", "seq": 1}, (b"frame",))
    store.journal.close()
    assert journals(tmp_path) == [1]
    assert list(FileJournal(tmp_path).recover(1)) == [({"kind": "accepted", "seq": 1}, (b"frame",))]


def test_without_any_snapshot_the_run_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SnapshotWriter(FileStore(tmp_path), pytest.fail, threads=False)

    def fails(*arguments: Any) -> Path:
        raise ShoalError("cannot save a checkpoint: No space left on device")

    monkeypatch.setattr(Checkpoints, "_save", fails)
    writer.write([], {"w": torch.zeros(1)}, {})
    with pytest.raises(ShoalError, match="No space left"):
        writer.finish()
