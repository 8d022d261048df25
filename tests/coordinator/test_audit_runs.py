"""`shoal audit`: a good run passes, and whatever is changed in its folder is found."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.config.schema.strategy import Async
from shoal.coordinator.durable.ledger import sealed
from shoal.coordinator.durable.lock import FolderLock
from shoal.coordinator.durable.receipt_seal import key_in, seal
from tests.coordinator.test_journal_recovery import Durable
from tests.support.small_cluster import FakeWorker, strategy_of

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three workers, of two contributions a version, that was killed with a round open."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "config.yaml").write_text("dialect: shoal\n")
    (folder / "coordinator").mkdir()
    key = key_in(folder / "coordinator")
    cluster = Durable(folder / "coordinator", strategy_of(Async(contributions_per_update=2)), 3, receipt_key=key)
    cluster.snapshot()
    workers = [cluster.join(name) for name in "abc"]
    receipts: dict[str, list[Any]] = {worker.name: [] for worker in workers}
    chance = random.Random(5)
    for turn in range(120):
        worker = chance.choice(workers)
        _receive(cluster, worker, receipts)
        if turn in (40, 80):
            cluster.snapshot()
    while not cluster.coordinator.replayed.pending():
        _receive(cluster, workers[0], receipts)
    (folder / "workers").mkdir()
    for name, lines in receipts.items():
        (folder / "workers" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cluster.close()
    return folder


def _receive(cluster: Durable, worker: FakeWorker, receipts: dict[str, list[Any]]) -> None:
    status = cluster.step(worker)
    answer = cluster.answers[cluster.calls]
    proof = [answer["digest"], answer["seal"]] if status == "accepted" else []
    receipts[worker.name].append([worker.name, worker.seq - 1, status, cluster.coordinator.state.version, *proof])


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def ledger_of(run: Path) -> Lines:
    """Its lines without their checksums."""
    lines = [json.loads(line) for line in (run / "coordinator" / "ledger.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("crc", "format")} for line in lines]


def write_ledger(run: Path, lines: Lines) -> None:
    """Lines with the checksums of what they say now: only what they say can tell that they are wrong."""
    content, before = b"", ""
    for line in lines:
        text, before = sealed(line, before)
        content += text + b"\n"
    (run / "coordinator" / "ledger.jsonl").write_bytes(content)


def found(run: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """The violations, or nothing."""
    capsys.readouterr()
    code = main(["audit", str(run), *more])
    told = capsys.readouterr().out
    assert (code == 1) == ("violation:" in told)
    return "\n".join(line for line in told.splitlines() if line.startswith("violation:"))


def test_a_good_run_passes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run)]) == 0
    told = capsys.readouterr().out
    assert "contributions of 3 workers" in told
    assert "1 contributions in open rounds" in told
    assert "nothing is missing, nothing is counted twice" in told
    rows = [[one[0] for one in line["from"]] for line in ledger_of(run) if "version" in line]
    assert any(len(set(workers)) < len(workers) for workers in rows), "or this run would be too easy"


def test_what_a_crash_cuts_off_is_no_violation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "workers" / "a.jsonl").open("a") as file:
        file.write('["a", 10')
    journal = max((run / "coordinator").glob("journal-*"))
    with journal.open("ab") as stream:
        stream.write(b"\x20\0\0\0half a record")
    assert found(run, capsys) == ""
    ledger = run / "coordinator" / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-5])
    assert found(run, capsys) == "", "the journal still has what the ledger's last line says"


def test_a_line_that_is_gone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ledger_of(run)
    for index in (0, len(lines) // 2, len(lines) - 4):
        write_ledger(run, lines[:index] + lines[index + 1 :])
        assert found(run, capsys), lines[index]


def test_a_line_that_is_there_twice(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ledger_of(run)
    for index in (0, len(lines) // 2, len(lines) - 1):
        write_ledger(run, [*lines[: index + 1], *lines[index:]])
        assert "twice" in found(run, capsys) or "counted before" in found(run, capsys)


def _edit(line: dict[str, Any], column: int, value: Any) -> None:
    line["from"][0][column] = value


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "version": lambda line: line.update(version=line["version"] + 1),
    "batches": lambda line: line.update(batches=line["batches"] + 1),
    "nothing in it": lambda line: line.update({"from": []}),
    "one left out": lambda line: line["from"].pop(),
    "one twice": lambda line: line["from"].append(line["from"][0]),
    "another worker": lambda line: _edit(line, 0, "mallory"),
    "another number": lambda line: _edit(line, 1, 10_000),
    "base of the future": lambda line: _edit(line, 2, line["version"]),
    "share": lambda line: _edit(line, 3, 1.5),
    "samples": lambda line: _edit(line, 4, 0),
    "a batch of before": lambda line: _edit(line, 7, 1),
    "words for numbers": lambda line: _edit(line, 7, "many"),
    "no columns": lambda line: _edit(line, 0, None),
    "no batches": lambda line: line.pop("batches"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("where", [0.2, 0.8])
def test_a_line_that_was_changed(run: Path, capsys: pytest.CaptureFixture[str], edit: str, where: float) -> None:
    lines = ledger_of(run)
    versions = [line for line in lines if "version" in line]
    EDITS[edit](versions[int(where * len(versions))])
    write_ledger(run, lines)
    assert found(run, capsys)


def test_a_contribution_that_its_version_does_not_name_is_reported_missing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ledger_of(run)
    rows = [line["from"] for line in lines if "version" in line]
    several = next(row for row in rows if len({one[0] for one in row}) < len(row))
    doubled = next(one for one in several if sum(other[0] == one[0] for other in several) > 1)
    several.remove(doubled)
    write_ledger(run, lines)
    assert f"contribution {doubled[1]} of {doubled[0]} was confirmed, and is nowhere" in found(run, capsys)


def test_a_receipt_for_what_was_never_taken(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    proof = seal(key_in(run / "coordinator"), "d", 1, "0" * 16, 3)
    (elsewhere / "notes of d").write_text(f'["d", 0, "late", 3]\n["d", 1, "accepted", 3, "{"0" * 16}", "{proof}"]\n')
    assert found(run, capsys) == ""
    assert "contribution 1 of d was confirmed, and is nowhere" in found(run, capsys, "--receipts", str(elsewhere)), "whatever its name"
    (run / "workers" / "a.jsonl").write_text('["a", 0, "late", 3]\nnonsense\n["d"]\n')
    told = found(run, capsys)
    assert "a.jsonl:2: cannot be read" in told
    assert "a.jsonl:3: no receipt" in told


def test_what_a_worker_invents_fails_nobody_s_audit_but_is_told(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    invented = tmp_path / "invented.txt"
    forged = seal(b"another key", "a", 10_000, "0" * 16, 3)
    invented.write_text(f'["d", 1, "accepted", 3]\n["a", 10000, "accepted", 3, "{"0" * 16}", "{forged}"]\nnonsense\n')
    assert main(["audit", str(run), "--receipts", str(invented)]) == 0
    told = capsys.readouterr().out
    assert "note      invented.txt:1 claims that contribution 1 of d was confirmed; it is nowhere, and no seal proves it" in told
    assert "invented.txt:2 claims that contribution 10000 of a" in told
    assert "note      invented.txt:3: cannot be read" in told


def test_a_ledger_that_says_something_else_than_was_confirmed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ledger_of(run)
    first, second = [line for line in lines if "version" in line][:2]
    first["from"][0][4], second["from"][0][4] = first["from"][0][4] + 1, second["from"][0][4] - 1  # the sums are right again
    write_ledger(run, lines)
    assert "is not what was confirmed" in found(run, capsys)


def test_a_receipt_that_was_changed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "workers" / "a.jsonl"
    lines = path.read_text().splitlines()
    worker, seq, status, version, digest, proof = next(line for line in map(json.loads, lines) if len(line) == 6)
    path.write_text(json.dumps([worker, seq, status, version + 1, digest, proof]) + "\n")
    assert "the seal is not the coordinator's" in found(run, capsys)


def test_a_run_that_goes_on_is_running(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = FolderLock(run / "coordinator")
    lock.take()
    try:
        assert main(["audit", str(run)]) == 0
        assert "running: so far nothing is missing, nothing is counted twice" in capsys.readouterr().out
        write_ledger(run, ledger_of(run)[1:])
        assert found(run, capsys), "what stays wrong is wrong in a run that goes on, too"
    finally:
        lock.release()


def test_a_live_run_is_not_blamed_for_what_changed_while_it_was_read(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, lines, looks = FolderLock(run / "coordinator"), ledger_of(run), iter(range(100))

    def grows(folder: Path) -> bool:
        write_ledger(run, lines[: len(lines) - 8 + 4 * min(2, next(looks))])  # while the journal is at its end already
        return True

    monkeypatch.setattr("shoal.coordinator.durable.lock.is_held", grows)
    lock.take()
    try:
        assert main(["audit", str(run)]) == 0
        assert "running" in capsys.readouterr().out
    finally:
        lock.release()


def test_a_journal_that_is_gone_or_cut(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = max((run / "coordinator").glob("journal-*"))
    content = journal.read_bytes()
    journal.write_bytes(content[: len(content) // 2])
    assert found(run, capsys), "the ledger knows more than the journal"
    journal.write_bytes(content[:28] + bytes([content[28] ^ 1]) + content[29:])
    assert "checksum" in found(run, capsys)
    journal.unlink()
    assert "missing" in found(run, capsys)


def test_a_damaged_snapshot(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshots = sorted((run / "coordinator" / "snapshots").glob("step-*"))
    weights = snapshots[-1] / "weights.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "weights.safetensors does not match its checksum" in found(run, capsys)
    weights.write_bytes(content)
    header = snapshots[-1] / "state.json"
    header.write_text(header.read_text().replace('["version", ', '["version", 1'))
    assert "snapshot" in found(run, capsys)


@pytest.mark.whole
def test_no_damage_is_a_traceback(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(7)
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "config.yaml"]
    for _ in range(150):
        path = chance.choice(files)
        content = path.read_bytes()
        at = chance.randrange(len(content) + 1)
        changed = content[:at] + bytes(chance.randrange(256) for _ in range(chance.randrange(4))) + content[at + chance.randrange(6) :]
        path.write_bytes(changed)
        assert main(["audit", str(run)]) in (0, 1)
        path.write_bytes(content)
    assert found(run, capsys) == ""


def test_what_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "config.yaml").write_text("dialect: shoal\n")
    assert main(["audit", str(tmp_path)]) == 2
    assert "no ledger" in capsys.readouterr().err


def test_the_state_may_lie_elsewhere(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.move(run / "coordinator", tmp_path / "elsewhere")
    (run / "config.yaml").write_text(f"coordinator:\n  state_path: {tmp_path / 'elsewhere'}\n")
    assert found(run, capsys) == ""
