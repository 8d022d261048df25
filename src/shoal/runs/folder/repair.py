"""`shoal repair`: makes the damaged state of a coordinator usable again, and records what is lost.

Nothing is deleted: unusable journals and snapshots, and a copy of the ledger, are moved to a folder of their own. A record in the journal
names the lost contributions; it enters the ledger for audits, and no sequence number is used twice.

In a database the same is done to the rows, in one transaction. Removed records, without their updates, and the ledger are written to files.
"""

from __future__ import annotations

import hmac
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.coordinator.durable.journal import FileJournal, journals, path_of
from shoal.coordinator.durable.ledger import lines_of
from shoal.coordinator.durable.lock import FolderLock
from shoal.coordinator.durable.receipt_seal import key_in, seal
from shoal.coordinator.durable.records import NOWHERE, DamagedJournal, JournalReader, RecordEnd, follows, readable_after
from shoal.errors import ShoalError
from shoal.files import parse_json, read_file, write_file
from shoal.runs.folder.checkpoint import Checkpoints
from shoal.updates.state_packing import Checkpoint

if TYPE_CHECKING:
    from shoal.transports.postgres.repair import RemovedRecords

_LARGEST_FRAME = 1 << 30
_MOST_BYTES = 16 << 30
"""Of a ledger or of receipts: those of many millions of contributions."""
_MOST_NAMED = 8
Sequences = dict[str, int]
"""By worker: its last sequence number."""


class SoundJournal(NamedTuple):
    """The records since a snapshot that can be trusted."""

    records: list[dict[str, Any]]
    last: int
    """Number of the last usable journal."""
    end: RecordEnd
    """Where its usable part ends."""
    problem: str
    """The problem after that; empty: none."""


def repair(folder: Path, receipts: Path, say: Callable[[str], None]) -> bool:
    """Repair a folder. `receipts`: folder of the workers' receipts. Return whether anything was wrong."""
    lock = FolderLock(folder)
    lock.take()
    try:
        snapshot = _usable(Checkpoints(folder / "snapshots", 2).newest(say), folder)
        sound, ledger = _sound(folder, snapshot.step), [*_ledger_since(folder, snapshot)]
        known = _known(snapshot, sound.records)
        named = [*_sequences_in(ledger), *_sequences_in_journals(folder, sound), confirmed_in(receipts, key_in(folder), say)]
        lost = _lost(known, named)
        behind = _newest_in(ledger) > (version := _version(snapshot, sound.records))
        if not (sound.problem or lost or behind):
            return False
        reason = sound.problem or "the journal has lost its end"
        aside = _set_aside(folder, snapshot, sound)
    finally:
        lock.release()
    _write_record(folder, snapshot.step, {"kind": "repaired", "lost": lost, "reason": reason})
    _tell(say, reason, aside, lost, version)
    return True


def repair_database(address: str, folder: Path, say: Callable[[str], None]) -> bool:
    """Repair a run in a database. Removed rows are written to files in `folder`. Return whether anything was wrong."""
    from shoal.transports.postgres import PostgresServer
    from shoal.transports.postgres import repair as rows
    from shoal.transports.postgres.store import PostgresSnapshots

    server = PostgresServer(address, max_frame_bytes=_LARGEST_FRAME)  # refused while a coordinator is at work there
    try:
        snapshot = _usable(PostgresSnapshots(server, 2).newest(say), server.connection.name)
        sound, length = rows.sound_since(server, snapshot.step), int(snapshot.state["ledger"])
        ledger = [*rows.ledger_since(server, length)]
        known, version = _known(snapshot, sound.records), _version(snapshot, sound.records)
        named = [*_sequences_in(ledger), *({record["worker"]: record["seq"]} for record in rows.readable_after(server, sound.last))]
        if not (sound.problem or _lost(known, named) or _newest_in(ledger) > version):
            return False
        lost = _lost(known, [*named, *({worker: seq} for worker, seq in rows.waiting(server))])
        reason = sound.problem or "the journal has lost its end"
        with server.transaction():
            aside = _write_down(folder, rows.go_back(server, snapshot.step, length, sound.last))
            rows.note_repair(server, snapshot.step, {"kind": "repaired", "lost": lost, "reason": reason})
    finally:
        server.close()
    _tell(say, reason, aside, lost, version)
    say("units that were not done by then are offered anew; students who are still there join again")
    return True


def _tell(say: Callable[[str], None], reason: str, aside: Path, lost: list[list[Any]], version: int) -> None:
    say(f"{reason}: the unusable files, and a copy of the old ledger, are in {aside}")
    for worker, first, last in lost:
        say(f"lost: contributions {first} to {last} of {worker}, as far as they were taken")
    say(f"the run goes on from version {version} when it is resumed")


def confirmed_in(folder: Path, key: bytes, warn: Callable[[str], None]) -> Sequences:
    """The last confirmed number of each worker, by receipts in a folder that have a valid seal of the coordinator. `warn`: is called for
    each file with receipts that cannot be read, or do not match their seal."""
    newest: Sequences = {}
    for path in sorted(folder.glob("*.jsonl")) if key else ():
        unreadable: list[str] = []
        try:
            lines = (read_file(path, _MOST_BYTES) or b"").split(b"\n")
        except ShoalError as error:
            warn(f"{error}. What its receipts confirm is unknown")
            continue
        for number, line in enumerate(lines[:-1], 1):  # a crash may have cut off the last line
            receipt = _receipt(line, key)
            if receipt is None:
                unreadable.append(str(number))
            elif receipt[1] >= 0:
                newest[receipt[0]] = max(receipt[1], newest.get(receipt[0], -1))
        if unreadable:
            some = ", ".join(unreadable[:_MOST_NAMED]) + (" and others" if len(unreadable) > _MOST_NAMED else "")
            warn(f"{path} is damaged in line {some}: these receipts cannot be read, or do not match their seal; put the file back")
    return newest


def _receipt(line: bytes, key: bytes) -> tuple[str, int] | None:
    """Worker and number of a confirmed contribution, −1 for one without a seal; None where the line is damaged."""
    try:
        worker, seq, status, version, *proof = parse_json(line)
        kinds = tuple(map(type, (worker, seq, status, version, *proof)))
    except (ValueError, TypeError):
        return None
    if kinds == (str, int, str, int):
        return worker, -1
    if kinds != (str, int, str, int, str, str) or not hmac.compare_digest(seal(key, worker, seq, proof[0], version), proof[1]):
        return None
    return worker, seq


def refuse_forgotten(folder: Path, known: Sequences, confirmed: Sequences) -> None:
    """Raises ShoalError where a restored coordinator lacks contributions that it confirmed."""
    for worker, first, last in _lost(known, [confirmed]):
        raise ShoalError(
            f"records at the end of the newest journal in {folder} are gone: {worker} has receipts up to contribution {last}, and the "
            f"journal ends before contribution {first}. Put the journal back from a backup; or let `shoal repair {folder}` go on without "
            "what is lost, which names it"
        )


# --- sound records ------------------------------------------------------------------------------------------


def _usable(found: Checkpoint | None, where: object) -> Checkpoint:
    if found is None:
        raise ShoalError(
            f"no snapshot in {where} can be read, so there is nothing to go on from. A new run can start with the weights of the last "
            "checkpoint: --set checkpoint.resume_from=RUN"
        )
    return found


def _sound(folder: Path, snapshot: int) -> SoundJournal:
    """The records since a snapshot, up to the first that is damaged."""
    records, before, sound = list[dict[str, Any]](), None, SoundJournal([], snapshot, NOWHERE, "")
    for number in range(snapshot, max([snapshot, *journals(folder)]) + 1):
        path = path_of(folder, number)
        if not path.exists():
            return sound._replace(problem=f"{path.name} is missing")
        try:
            reading = JournalReader(path)
            if before is not None and not follows(before, reading.head):
                return sound._replace(problem=f"{before.path.name} has lost its end, and {path.name} follows it")
            for record, _ in reading:
                records.append(record)
        except DamagedJournal as error:
            return SoundJournal(records, number, error.sound, f"{path.name} is damaged after {error.number} records")
        before, sound = reading, SoundJournal(records, number, reading.end, "")
    return sound


def _known(snapshot: Checkpoint, records: Iterable[dict[str, Any]]) -> Sequences:
    known = dict(snapshot.state["coordinator"]["state"]["sequences"])
    for record in records:
        if record["kind"] == "accepted":
            known[record["worker"]] = max(record["seq"], known.get(record["worker"], -1))
        elif record["kind"] == "repaired":
            known |= {worker: last for worker, _, last in record["lost"]}
    return known


def _version(snapshot: Checkpoint, records: Iterable[dict[str, Any]]) -> int:
    version: int = snapshot.state["coordinator"]["state"]["version"]
    return version + [record["kind"] for record in records].count("closed")


# --- lost contributions -------------------------------------------------------------------------------------------


def _lost(known: Sequences, named: Iterable[Sequences]) -> list[list[Any]]:
    """Worker, first and last number of contributions that were accepted and are missing."""
    newest: Sequences = {}
    for sequences in named:
        newest |= {worker: max(seq, newest.get(worker, -1)) for worker, seq in sequences.items()}
    return [[worker, known.get(worker, -1) + 1, seq] for worker, seq in sorted(newest.items()) if seq > known.get(worker, -1)]


def _ledger_since(folder: Path, snapshot: Checkpoint) -> Iterator[dict[str, Any]]:
    """Sound lines of the ledger since a snapshot."""
    path, length = folder / "ledger.jsonl", int(snapshot.state["ledger"])
    content = read_file(path, _MOST_BYTES) or b""
    for line in [*lines_of(content)][content[:length].count(b"\n") :]:
        if line.sound:
            yield parse_json(line.text)


def _sequences_in(lines: Iterable[dict[str, Any]]) -> Iterator[Sequences]:
    for line in lines:
        for worker, seq, *_ in [*line.get("from", ()), *line.get("unused", ())]:
            yield {worker: seq}


def _newest_in(lines: Iterable[dict[str, Any]]) -> int:
    return max((int(line["version"]) for line in lines if "version" in line), default=0)


def _sequences_in_journals(folder: Path, sound: SoundJournal) -> Iterator[Sequences]:
    """Numbers in the readable records after the damage."""
    for number in journals(folder):
        if number >= sound.last:
            for record in readable_after(path_of(folder, number), sound.end.length if number == sound.last else 0):
                if record["kind"] in ("accepted", "held"):
                    yield {record["worker"]: record["seq"]}


# --- the repair ----------------------------------------------------------------------------------


def _set_aside(folder: Path, snapshot: Checkpoint, sound: SoundJournal) -> Path:
    """Move the damaged files to a new folder, and cut the others back to what is sound."""
    aside = _new_folder(folder)
    for number in journals(folder):
        if number > sound.last:
            path_of(folder, number).rename(aside / path_of(folder, number).name)
    for path in Checkpoints(folder / "snapshots", 2).all():
        if path.name > snapshot.path.name:
            path.rename(aside / path.name)
    newest, ledger = path_of(folder, sound.last), folder / "ledger.jsonl"
    for path, length in ((newest, sound.end.length), (ledger, int(snapshot.state["ledger"]))):
        if path.exists():
            shutil.copyfile(path, aside / path.name)
            os.truncate(path, min(length, path.stat().st_size))
    newest.touch()  # a journal that is missing or wholly damaged begins again
    return aside


def _new_folder(folder: Path) -> Path:
    aside = folder / f"set-aside-{1 + len([*folder.glob('set-aside-*')])}"
    aside.mkdir(parents=True)
    return aside


def _write_down(folder: Path, removed: RemovedRecords) -> Path:
    """Write rows that were removed from a database to files."""
    aside = _new_folder(folder)
    write_file(aside / "records.jsonl", "".join(json.dumps(record) + "\n" for record in removed.records))
    write_file(aside / "ledger.jsonl", "".join(f"{entry}\n" for entry in removed.ledger))
    return aside


def _write_record(folder: Path, snapshot: int, record: dict[str, Any]) -> None:
    with closing(FileJournal(folder)) as journal:
        for _ in journal.recover(snapshot):
            pass
        journal.append(record)
