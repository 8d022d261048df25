"""What was confirmed survives: a cut at any byte of the journal, a crash between any two steps of taking a snapshot, a damaged snapshot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config.schema.strategy import Async, SyncPs
from shoal.coordinator.durable.journal import FileJournal, journals, path_of
from shoal.coordinator.durable.ledger import FileLedger
from shoal.coordinator.durable.records import HEAD_BYTES, JournalReader
from shoal.errors import ShoalError
from shoal.runs.folder.checkpoint import Checkpoints
from tests.support.processes import Command
from tests.support.small_cluster import Cluster, FakeWorker, strategy_of

MARK = 8  # bytes at the end of a record without which it is still whole: the next one writes them again
RECORDS = [({"kind": "accepted", "seq": number}, (bytes([number]) * (3 * number), b"tail")) for number in range(4)]


def whole(folder: Path, number: int = 1) -> list[int]:
    return [record["seq"] for record, _ in JournalReader(path_of(folder, number))]


def test_a_cut_at_any_byte_costs_only_the_record_it_is_in(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "first")
    ends = [0]
    journal.begin()
    for record, frames in RECORDS:
        journal.append(record, frames)
        ends.append(journal.bytes_since_snapshot)
    journal.close()
    content = path_of(tmp_path / "first", 1).read_bytes()
    for length in range(len(content) + 1):
        folder = tmp_path / "cut"
        folder.mkdir(exist_ok=True)
        path_of(folder, 1).write_bytes(content[:length])
        survived = sum(end - MARK <= length for end in ends[1:])
        again = FileJournal(folder)
        assert list(again.recover(1)) == RECORDS[:survived]
        again.append({"kind": "accepted", "seq": 99})
        again.close()
        assert whole(folder) == [*range(survived), 99], "what was cut off does not get in the way"


def test_a_journal_written_over_an_old_one_never_takes_its_records_for_its_own(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "run")
    journal.begin()
    for number in range(20):
        journal.append({"kind": "accepted", "seq": 100 + number}, (b"old" * number,))
    journal.forget_before(journal.begin())
    old = (tmp_path / "run" / "spare-journal").read_bytes()
    journal.begin()
    path, ends = path_of(tmp_path / "run", 3), [0]
    for record, frames in RECORDS:
        journal.append(record, frames)
        ends.append(journal.bytes_since_snapshot)
    new = path.read_bytes()
    assert len(new) == len(old), "the file is used again"
    journal.close()
    assert path.stat().st_size == ends[-1], "one that is closed is cut to its length"
    for length in range(HEAD_BYTES, ends[-1] + 1):
        folder = tmp_path / "cut"
        folder.mkdir(exist_ok=True)
        left = new[:length] + old[length:]
        path_of(folder, 3).write_bytes(left)
        survived = sum(left[: end - MARK] == new[: end - MARK] for end in ends[1:])  # the byte that was cut off may be there by chance
        again = FileJournal(folder)
        assert list(again.recover(3)) == RECORDS[:survived]
        again.append({"kind": "accepted", "seq": 99})
        assert whole(folder, 3) == [*range(survived), 99]
        again.close()


WRITER = """
import sys
from pathlib import Path
from shoal.coordinator.durable.journal import FileJournal
journal = FileJournal(Path(sys.argv[1]))
for seq in range(10_000):
    if seq % 5 == 0:
        journal.forget_before(journal.begin() - 1)
    journal.append({"kind": "accepted", "seq": seq}, (bytes([seq % 251]) * (1 << 20),))
    print(seq, flush=True)
"""


@pytest.mark.whole
@pytest.mark.parametrize("after", [*(pytest.param(after, marks=pytest.mark.long) for after in (23, 41)), 64])
def test_what_was_written_over_old_journals_survives_a_kill(tmp_path: Path, after: int) -> None:
    program, folder = tmp_path / "writer.py", tmp_path / "journal"
    program.write_text(WRITER)
    folder.mkdir()
    writer = Command([str(program), str(folder)])
    try:
        written = [int(writer.stdout.readline()) for _ in range(after)]
        writer.kill()
        written += map(int, writer.stdout.read().split())
    finally:
        writer.close()
    journal = FileJournal(folder)
    found = list(journal.recover(min(journals(folder))))
    journal.close()
    seqs = [record["seq"] for record, _ in found]
    assert seqs == [*range(seqs[0], seqs[0] + len(seqs))]
    assert seqs[-1] >= written[-1], "all that it told of"
    assert all(frames == (bytes([record["seq"] % 251]) * (1 << 20),) for record, frames in found)
    assert len(journals(folder)) <= 3


def test_zeros_that_a_power_cut_left_are_no_records(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    journal.begin()
    journal.append(*RECORDS[0])
    journal.close()
    with path_of(tmp_path, 1).open("ab") as file:
        file.write(bytes(4096))
    assert whole(tmp_path) == [0]


def test_a_journal_that_is_missing_or_damaged_before_another_is_no_guess(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    for _ in range(3):
        journal.begin()
        journal.append(*RECORDS[1])
    journal.close()
    assert len(list(FileJournal(tmp_path).recover(1))) == 3
    path = path_of(tmp_path, 2)
    content = path.read_bytes()
    path.write_bytes(content[: -MARK - 1])
    with pytest.raises(ShoalError, match="damaged"):
        list(FileJournal(tmp_path).recover(1))
    path.unlink()
    with pytest.raises(ShoalError, match="missing"):
        list(FileJournal(tmp_path).recover(1))
    with pytest.raises(ShoalError, match="missing"):
        list(FileJournal(tmp_path).recover(7))


def test_the_ledger_goes_back_to_what_the_snapshot_knows(tmp_path: Path) -> None:
    ledger = FileLedger(tmp_path)
    ledger.append({"version": 1})
    length = ledger.length
    ledger.append({"version": 2})
    ledger.close()
    with ledger.path.open("ab") as file:
        file.write(b'{"versi')
    ledger.cut(length)
    ledger.append({"version": 2})
    ledger.settle()
    ledger.close()
    assert [json.loads(line)["version"] for line in ledger.path.read_text().splitlines()] == [1, 2]
    ledger.cut(1000)
    assert "shorter than when the snapshot was taken" in ledger.remarks[0]


# --- taking a snapshot, one step at a time ---------------------------------------------------------------


class Durable(Cluster):
    """A cluster that keeps what it is told to keep, as the coordinator's loop does."""

    def __init__(self, folder: Path, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.journal, self.file, self.snapshots = FileJournal(folder), FileLedger(folder), Checkpoints(folder / "snapshots", 2)

    def carry_out(self, effects: Any) -> None:
        records, lines = len(self.records), len(self.ledger)
        super().carry_out(effects)
        for record, frames in self.records[records:]:
            self.journal.append(record, frames)
        for line in self.ledger[lines:]:
            self.file.append(line)

    def snapshot(self, crash: Callable[[], None] = lambda: None) -> None:
        number = self.journal.begin(one for one in self.coordinator.replayed.pending() if crash() is None)
        crash()
        state = {"coordinator": self.coordinator.replayed.state_dict(), "ledger": self.file.length}
        self.snapshots.save(number, {"vector": self.learner.vector}, state)
        crash()
        self.journal.forget_before(int(self.snapshots.all()[0].name.partition("-")[2]))
        crash()

    @classmethod
    def of(cls, folder: Path, like: Cluster) -> Durable:
        made = cls(folder, like.strategy, like.plan.expected)
        made.now, made.calls = like.now, like.calls
        snapshot = made.snapshots.newest(lambda text: None)
        assert snapshot is not None
        made.learner.vector.copy_(snapshot.weights["vector"])
        made.coordinator.load_state_dict(snapshot.state["coordinator"])
        made.file.cut(snapshot.state["ledger"])
        for record, frames in made.journal.recover(snapshot.step):
            for effect in made.coordinator.replayed.apply(record, frames):
                if line := getattr(effect, "line", None):
                    made.file.append(line)
        made.file.settle()
        return made

    def close(self) -> None:
        self.journal.close()
        self.file.close()


def kept(cluster: Cluster) -> dict[str, Any]:
    """All but the counts of what was turned away, which are no records."""
    state = vars(cluster.coordinator.state)
    return state | {"contributions": {name: state["contributions"].get(name) for name in ("accepted",)}}


def same(first: Durable, second: Durable) -> None:
    assert torch.equal(first.learner.vector, second.learner.vector)
    assert kept(first) == kept(second)
    assert first.coordinator.replayed.pending() == second.coordinator.replayed.pending()
    assert first.file.path.read_bytes() == second.file.path.read_bytes()


STRATEGIES = {
    "syncps": strategy_of(SyncPs(round_timeout_s=10.0, window=2)),
    "async": strategy_of(Async(contributions_per_update=3)),
}


def busy(cluster: Durable, workers: list[FakeWorker], turns: int) -> None:
    for turn in range(turns):
        for worker in workers[: 2 if turn % 3 == 2 else 3]:
            cluster.step(worker, float(turn + 1))
        cluster.pass_time(4.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_crash_between_any_two_steps_of_a_snapshot_loses_nothing(tmp_path: Path, strategy: str) -> None:
    cluster = Durable(tmp_path / "run", STRATEGIES[strategy], 3)
    cluster.snapshot()
    workers = [cluster.join(name) for name in "abc"]
    busy(cluster, workers, 6)
    cluster.contribute(workers[0], 5.0)
    assert cluster.coordinator.replayed.pending(), "rounds are open: that is what makes it hard"
    copies: list[Path] = []

    def crash() -> None:
        copies.append(tmp_path / f"crash-{len(copies)}")
        shutil.copytree(tmp_path / "run", copies[-1])

    for _ in range(3):  # the later ones at the same version
        cluster.snapshot(crash)
        for copy in copies:
            recovered = Durable.of(copy, cluster)
            same(recovered, cluster)
            recovered.snapshot()
            recovered.close()
            again = Durable.of(copy, cluster)  # and after another crash, too
            same(again, cluster)
            again.close()
            shutil.rmtree(copy)
        copies.clear()
    cluster.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_damaged_snapshot_is_made_up_for_by_the_one_before(tmp_path: Path, strategy: str) -> None:
    cluster = Durable(tmp_path / "run", STRATEGIES[strategy], 3)
    workers = []
    for turn in range(4):
        cluster.snapshot()
        workers = workers or [cluster.join(name) for name in "abc"]
        busy(cluster, workers, 2 + turn)
    assert sorted(journals(tmp_path / "run")) == [3, 4], "journals are kept for both snapshots"
    (cluster.snapshots.all()[-1] / "weights.safetensors").write_bytes(b"nonsense")
    cluster.close()
    recovered = Durable.of(tmp_path / "run", cluster)
    same(recovered, cluster)
    recovered.close()
