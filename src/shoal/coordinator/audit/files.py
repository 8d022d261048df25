"""Files of a run, read for an audit: ledger, receipts, journals, newest snapshot. Unreadable files are reported, not raised.

It shares no code with the modules that write the files: it reads the formats with code of its own, so that a mistake on one side shows.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]

from shoal.errors import ShoalError
from shoal.files import parse_json, read_file

Key = tuple[str, int]
"""A worker, and the number of a contribution."""
Line = tuple[str, dict[str, Any]]
"""Place and content of a line or record."""
_MOST_BYTES = 1 << 40
_JOURNAL_FORMAT = _LEDGER_FORMAT = 1
_MAGIC = b"SHOALJ1\n"
_HEAD = struct.Struct("<8s8sIQI")


class AuditedReceipt(NamedTuple):
    """A worker's receipt, and the coordinator's seal on it, if there is one."""

    worker: str
    seq: int
    status: str
    version: int
    digest: str = ""
    seal: str = ""


class SnapshotSummary(NamedTuple):
    """Counts in the newest snapshot."""

    number: int
    version: int
    batches: int
    samples: int
    sequences: dict[str, int]
    ledger_bytes: int
    settled_below: int
    settled_beyond: set[int]
    cut: tuple[int, int, int] | None
    """Batches per epoch, batches per unit, and epochs; None: the data is not leased in units."""


@dataclass
class AuditInput:
    """Everything that was read."""

    ledger: list[Line] = field(default_factory=list)
    ledger_bytes: int = 0
    receipts: list[tuple[str, AuditedReceipt]] = field(default_factory=list)
    """Receipts that count: from the run's own folder, or with the coordinator's seal."""
    claims: list[tuple[str, AuditedReceipt]] = field(default_factory=list)
    """Receipts from elsewhere without a seal, which prove nothing."""
    snapshot: SnapshotSummary | None = None
    records: list[Line] = field(default_factory=list)
    """Records of all journals since the snapshot."""
    waiting: set[Key] = field(default_factory=set)
    """Worker and number of confirmed contributions that wait in a database for a coordinator."""
    notes: list[str] = field(default_factory=list)
    """Remarks that are no violations, such as a last line that a crash cut off."""

    @property
    def waits_for_resume(self) -> bool:
        """Whether a repair has put the ledger back to the newest snapshot, and no coordinator has written it again from the journal."""
        repaired = bool(self.records) and self.records[-1][1].get("kind") == "repaired"
        return repaired and self.snapshot is not None and self.ledger_bytes == self.snapshot.ledger_bytes


def gather(state: Path, receipts: Iterable[Path], violations: list[str], claims: Iterable[Path] = ()) -> AuditInput:
    """Read a run's folder. `receipts`: from that folder; `claims`: receipts from elsewhere. Receipts are read first: while a run goes on,
    the files that are read after them then have what they confirm."""
    evidence = AuditInput()
    _read_receipts(evidence, receipts, claims, _key(state), violations)
    ledger = state / "ledger.jsonl"
    evidence.ledger_bytes = ledger.stat().st_size if ledger.exists() else 0
    _read_ledger(ledger, evidence, violations)
    evidence.snapshot = _snapshot(state / "snapshots", violations)
    if evidence.snapshot is not None:
        evidence.records = _journals(state, evidence.snapshot.number, evidence.notes, violations)
    return evidence


def gather_from(
    evidence: AuditInput, ledger: Iterable[str], snapshot: dict[str, Any] | None, records: Iterable[bytes], waiting: Iterable[Key]
) -> AuditInput:
    """Add what a database holds to the receipts that were read. A database never has a half-written row."""
    evidence.ledger = [(f"ledger:{number}", parse_json(line)) for number, line in enumerate(ledger, 1)]
    evidence.ledger_bytes = len(evidence.ledger)  # a database counts lines
    evidence.snapshot = _summary(snapshot) if snapshot is not None else None
    evidence.records = [(f"journal, record {number}", dict(msgpack.unpackb(record))) for number, record in enumerate(records, 1)]
    evidence.waiting = set(waiting)
    if evidence.waiting:
        evidence.notes.append(
            f"{len(evidence.waiting)} results lie in the database, confirmed, until the coordinator comes back and takes them"
        )
    return evidence


def gather_receipts(receipts: Iterable[Path], claims: Iterable[Path], violations: list[str]) -> AuditInput:
    """Read receipts only, of a run whose coordinator has no seal."""
    evidence = AuditInput()
    _read_receipts(evidence, receipts, claims, None, violations)
    return evidence


# --- lines ------------------------------------------------------------------------------------------------


def _lines(path: Path, notes: list[str], violations: list[str]) -> Iterator[tuple[str, bytes]]:
    """Each complete line with its place."""
    try:
        content = _content(path)
    except ShoalError as error:
        violations.append(str(error))
        return
    *lines, rest = content.split(b"\n")
    if rest:
        notes.append(f"{path.name} ends in the middle of line {len(lines) + 1}")
    for number, line in enumerate(lines, 1):
        yield f"{path.name}:{number}", line


def _content(path: Path) -> bytes:
    """The content of a file. Raises ShoalError where it is missing, or something else is in its place."""
    content = read_file(path, _MOST_BYTES)
    if content is None:
        raise ShoalError(f"{path} is missing")
    return content


def _read_ledger(path: Path, evidence: AuditInput, violations: list[str]) -> None:
    before = b""
    for place, line in _lines(path, evidence.notes, violations):
        match = re.fullmatch(rb'(.*),"crc":"([0-9a-f]{8})"}', line, re.DOTALL)
        if match is None or zlib.crc32(match[1], zlib.crc32(before)) != int(match[2], 16):
            violations.append(f"{place}: does not match its checksum")
        before = match[2] if match is not None else b""
        try:
            value = parse_json(line)
        except ValueError:
            violations.append(f"{place}: cannot be read")
            continue
        if not isinstance(value, dict):
            violations.append(f"{place}: no line of a ledger")
        elif value.get("format") != _LEDGER_FORMAT:
            violations.append(f"{place}: ledger format {value.get('format')}, and this audit reads format {_LEDGER_FORMAT}")
        else:
            evidence.ledger.append((place, value))


# --- receipts ---------------------------------------------------------------------------------------------


def _key(state: Path) -> bytes | None:
    try:
        return bytes.fromhex((state / "receipts.key").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _read_receipts(evidence: AuditInput, own: Iterable[Path], claims: Iterable[Path], key: bytes | None, violations: list[str]) -> None:
    for path in own:
        for place, receipt in _receipts(path, evidence.notes, violations):
            if receipt.seal and key is not None and not _is_sealed(receipt, key):
                violations.append(f"{place}: the seal is not the coordinator's, or what it stands under was changed")
            else:
                evidence.receipts.append((place, receipt))
    for path in claims:
        unreadable: list[str] = []
        for place, receipt in _receipts(path, evidence.notes, unreadable):
            sealed = key is not None and _is_sealed(receipt, key)
            (evidence.receipts if sealed else evidence.claims).append((place, receipt))
        evidence.notes += unreadable


def _receipts(path: Path, notes: list[str], violations: list[str]) -> Iterator[tuple[str, AuditedReceipt]]:
    for place, line in _lines(path, notes, violations):
        try:
            value = parse_json(line)
        except ValueError:
            violations.append(f"{place}: cannot be read")
            continue
        kinds = [type(one) for one in value] if isinstance(value, list) else []
        if kinds in ([str, int, str, int], [str, int, str, int, str, str]):
            yield place, AuditedReceipt(*value)
        else:
            violations.append(f"{place}: no receipt")


def _is_sealed(receipt: AuditedReceipt, key: bytes) -> bool:
    sealed = json.dumps([receipt.worker, receipt.seq, receipt.digest, receipt.version], separators=(",", ":")).encode()
    return hmac.compare_digest(hmac.new(key, sealed, "sha256").hexdigest()[:32], receipt.seal.encode("ascii", "replace").decode())


def digest_of(values: Iterable[Any]) -> str:
    """Digest in a sealed receipt of a contribution with this line in the ledger."""
    return hashlib.sha256(json.dumps([*values], separators=(",", ":")).encode()).hexdigest()[:16]


# --- snapshots --------------------------------------------------------------------------------------------


def _snapshot(folder: Path, violations: list[str]) -> SnapshotSummary | None:
    """The newest snapshot that is sound. Damaged ones are violations."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            header = _header(path)
            for name, checksum in header["checksums"].items():
                if f"{zlib.crc32(_content(path / name)):08x}" != checksum:
                    raise ValueError(f"{name} does not match its checksum")
            return _summary(header)
        except (ShoalError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            violations.append(f"snapshot {path.name} is damaged: {error}")
    return None


def _header(path: Path) -> dict[str, Any]:
    content = _content(path / "state.json")
    header: dict[str, Any] = parse_json(content)
    tail = f', "checksum": "{header["checksum"]}"}}'.encode()
    if not content.endswith(tail) or f"{zlib.crc32(content.removesuffix(tail)):08x}" != header["checksum"]:
        raise ValueError("state.json does not match its checksum")
    return header


def _summary(header: dict[str, Any]) -> SnapshotSummary:
    whole = _plain(header["state"])
    state, settled, cut = whole["coordinator"]["state"], whole["coordinator"]["settled"], whole["coordinator"]["cut"]
    return SnapshotSummary(
        number=int(header["step"]),
        version=int(state["version"]),
        batches=int(state["batches"]),
        samples=int(state["samples"]),
        sequences={str(worker): int(seq) for worker, seq in state["sequences"].items()},
        ledger_bytes=int(whole["ledger"]),
        settled_below=int(settled["below"]),
        settled_beyond={int(number) for number in settled["beyond"]},
        cut=(int(cut[0]), int(cut[1]), int(cut[2])) if cut else None,
    )


def _plain(value: Any) -> Any:
    """Nested data as it was before it was packed for the file; tensors stay names."""
    if isinstance(value, dict) and "$items" in value:
        return {key: _plain(item) for key, item in value["$items"]}
    return [_plain(item) for item in value] if isinstance(value, list) else value


# --- journals ---------------------------------------------------------------------------------------------


class _JournalContent(NamedTuple):
    """Records of a journal, and its end."""

    records: list[dict[str, Any]]
    end: int
    checksum: int
    before: tuple[int, int]
    """End and checksum of the journal before, as the head says; zeros: unknown."""
    mark: bytes


def _journals(state: Path, snapshot: int, notes: list[str], violations: list[str]) -> list[Line]:
    """Records of all journals since the snapshot."""
    found = {int(match[1]): path for path in state.iterdir() if (match := re.fullmatch(r"journal-(\d+)", path.name))}
    numbers = sorted(number for number in found if number >= snapshot)
    if numbers != [*range(snapshot, snapshot + max(1, len(numbers)))]:
        violations.append(f"a journal since snapshot {snapshot} is missing: there are {numbers or 'none'}")
    records: list[Line] = []
    last: _JournalContent | None = None
    for number in numbers:
        journal = _journal(found[number], notes, violations)
        if last is not None and journal.before != (0, 0) and journal.before != (last.end, last.checksum):
            violations.append(f"{found[number].name} follows a journal that was longer: {found[number - 1].name} has lost its end")
        records += [(f"{found[number].name}, record {index}", record) for index, record in enumerate(journal.records, 1)]
        last = journal
    return records


def _journal(path: Path, notes: list[str], violations: list[str]) -> _JournalContent:
    try:
        content = _content(path)
    except ShoalError as error:
        violations.append(str(error))
        return _JournalContent([], 0, 0, (0, 0), b"")
    journal = _read_journal(content)
    if journal is None:
        other = content.startswith(_MAGIC[:6]) and not content.startswith(_MAGIC)
        what = f"not of journal format {_JOURNAL_FORMAT}" if other else "its head does not match its checksum"
        violations.append(f"{path.name}: {what}")
        return _JournalContent([], 0, 0, (0, 0), b"")
    after = len(journal.records)
    if journal.mark and content.find(journal.mark, journal.end) >= 0:
        violations.append(f"{path.name}: record {after + 1} does not match its checksum, and was whole once")
    elif journal.end < len(content):
        notes.append(f"{path.name} ends after record {after}, its file does not")
    return journal


def _read_journal(content: bytes) -> _JournalContent | None:
    """None: the head is damaged or of another format."""
    if len(content) < _HEAD.size:
        cut_off = len(content) < len(_MAGIC) or content.startswith(_MAGIC)
        return _JournalContent([], len(content), 0, (0, 0), b"") if cut_off else None
    _, mark, checksum, length, own = _HEAD.unpack_from(content)
    if zlib.crc32(_MAGIC + content[8:28]) != own:
        return None
    return _read_records(content, mark, (length, checksum), own)


def _read_records(content: bytes, mark: bytes, before: tuple[int, int], last: int) -> _JournalContent:
    records, at = list[dict[str, Any]](), _HEAD.size
    while at + 20 <= len(content):
        size, body, chain = struct.unpack_from("<IQI", content, at)
        end = at + 16 + size + body
        if end + 4 > len(content) or chain != last:
            break
        (checksum,) = struct.unpack_from("<I", content, end)
        if zlib.crc32(memoryview(content)[at:end], zlib.crc32(mark)) != checksum:
            break
        records.append(dict(msgpack.unpackb(content[at + 16 : at + 16 + size])["record"]))
        at, last = end + 12, checksum
    return _JournalContent(records, at, last, before, mark)
