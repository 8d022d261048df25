"""Journal, ledger and snapshot carry the number of their format; a file of another format is refused, and stays as it is."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from shoal.config.schema.strategy import Async
from shoal.coordinator.audit.files import gather
from shoal.coordinator.durable.journal import FileJournal, path_of
from shoal.coordinator.durable.ledger import FileLedger, lines_of
from shoal.coordinator.durable.records import HEAD_BYTES, JournalReader
from shoal.errors import ShoalError
from tests.support.small_cluster import Cluster, strategy_of


def journal_of_format(folder: Path, number: bytes) -> Path:
    """A journal with one record whose head names another format, with the checksum that its version would have written."""
    journal = FileJournal(folder)
    journal.begin()
    journal.append({"kind": "paused", "paused": True})
    journal.close()
    path = path_of(folder, 1)
    content = path.read_bytes()
    head = b"SHOALJ" + number + b"\n" + content[8 : HEAD_BYTES - 4]
    path.write_bytes(head + zlib.crc32(head).to_bytes(4, "little") + content[HEAD_BYTES:])
    return path


def test_a_journal_of_another_format_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path = journal_of_format(tmp_path, b"7")
    before = path.read_bytes()
    with pytest.raises(ShoalError, match=r"journal-00000001 has journal format 7, and this version of Shoal reads format 1"):
        JournalReader(path)
    with pytest.raises(ShoalError, match="journal format 7"):
        list(FileJournal(tmp_path).recover(1))
    assert path.read_bytes() == before


def test_a_ledger_of_another_format_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    ledger = FileLedger(tmp_path)
    ledger.append({"version": 1, "batches": 1, "from": []})
    ledger.close()
    (line,) = lines_of(ledger.path.read_bytes())
    body = line.text.rpartition(b',"crc":"')[0].replace(b'"format":1', b'"format":7')
    ledger.path.write_bytes(body + b',"crc":"%08x"}\n' % zlib.crc32(body))
    before = ledger.path.read_bytes()
    for use in (lambda: FileLedger(tmp_path).append({"version": 2}), lambda: FileLedger(tmp_path).cut(0)):
        with pytest.raises(ShoalError, match=r"ledger.jsonl has ledger format 7, and this version of Shoal reads format 1"):
            use()
    assert ledger.path.read_bytes() == before
    violations: list[str] = []
    gather(tmp_path, [], violations)
    assert violations == ["ledger.jsonl:1: ledger format 7, and this audit reads format 1"]


def test_every_line_of_a_ledger_names_its_format(tmp_path: Path) -> None:
    ledger = FileLedger(tmp_path)
    for version in (1, 2):
        ledger.append({"version": version, "batches": version, "from": []})
    assert [json.loads(line)["format"] for line in ledger.path.read_text().splitlines()] == [1, 1]


def test_a_snapshot_of_another_format_is_refused() -> None:
    saved = Cluster(strategy_of(Async())).coordinator.replayed.state_dict()
    with pytest.raises(ShoalError, match="the snapshot has coordinator format 7, and this version of Shoal reads format 1"):
        Cluster(strategy_of(Async())).coordinator.load_state_dict(saved | {"format": 7})


def test_a_record_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ShoalError, match="unknown kind 'prophesied'"):
        Cluster(strategy_of(Async())).coordinator.replayed.apply({"kind": "prophesied"}, ())
