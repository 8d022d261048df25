"""What a run has left behind, read for an audit: ledger, receipts, journals, newest snapshot. What cannot be read is told, not raised.

It shares no code with what wrote the files: the formats are read here in another way, so that a mistake on one side shows on the other.
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

Line = tuple[str, dict[str, Any]]
"""Where it stands, and what it says."""
_MAGIC = b"SHOALJ2\n"
_HEAD = struct.Struct("<8s8sIQI")


class AuditedReceipt(NamedTuple):
    """What a worker was told, and the coordinator's proof of it, if there is one."""

    worker: str
    seq: int
    status: str
    version: int
    digest: str = ""
    seal: str = ""


class SnapshotSummary(NamedTuple):
    """What the newest snapshot says of itself."""

    number: int
    version: int
    batches: int
    samples: int
    sequences: dict[str, int]
    ledger_bytes: int
    settled_below: int
    settled_beyond: set[int]
    cut: tuple[int, int, int] | None
    """Batches of an epoch and of a unit, and epochs, where the data is leased in units."""


@dataclass
class AuditInput:
    """All that was found."""

    ledger: list[Line] = field(default_factory=list)
    ledger_bytes: int = 0
    receipts: list[tuple[str, AuditedReceipt]] = field(default_factory=list)
    """Those that count: of the run's own folder, or with the coordinator's seal."""
    claims: list[tuple[str, AuditedReceipt]] = field(default_factory=list)
    """What files from elsewhere say without a seal: anybody can have written it."""
    snapshot: SnapshotSummary | None = None
    records: list[Line] = field(default_factory=list)
    """Of all journals since the snapshot."""
    waiting: set[tuple[str, int]] = field(default_factory=set)
    """Contributions that lie in a database, confirmed, until a coordinator takes them: worker and number."""
    cut: list[str] = field(default_factory=list)
    """Files that end in the middle of something, as a crash leaves them, and what else is worth a note."""


def gather(state: Path, receipts: Iterable[Path], violations: list[str], claims: Iterable[Path] = ()) -> AuditInput:
    """`receipts` are of the run's own folder; `claims` were brought from elsewhere. Receipts are read first: while a run goes on, what they
    tell of is then in what is read after them."""
    evidence = AuditInput()
    _read_receipts(evidence, receipts, claims, _key(state), violations)
    ledger = state / "ledger.jsonl"
    evidence.ledger_bytes = ledger.stat().st_size if ledger.exists() else 0
    _read_ledger(ledger, evidence, violations)
    evidence.snapshot = _snapshot(state / "snapshots", violations)
    if evidence.snapshot is not None:
        evidence.records = _journals(state, evidence.snapshot.number, evidence.cut, violations)
    return evidence


def gather_from(
    evidence: AuditInput,
    ledger: Iterable[str],
    snapshot: dict[str, Any] | None,
    records: Iterable[bytes],
    waiting: Iterable[tuple[str, int]],
    violations: list[str],
) -> AuditInput:
    """The same from a database, which has cut nothing off; the receipts are in the evidence already."""
    evidence.ledger = [(f"ledger:{number}", json.loads(line)) for number, line in enumerate(ledger, 1)]
    evidence.ledger_bytes = len(evidence.ledger)  # it counts lines
    evidence.snapshot = _described(snapshot) if snapshot is not None else None
    evidence.records = [(f"journal, record {number}", dict(msgpack.unpackb(record))) for number, record in enumerate(records, 1)]
    evidence.waiting = set(waiting)
    if evidence.waiting:
        evidence.cut.append(
            f"{len(evidence.waiting)} results lie in the database, confirmed, until the coordinator comes back and takes them"
        )
    return evidence


def gather_receipts(receipts: Iterable[Path], claims: Iterable[Path], violations: list[str]) -> AuditInput:
    """Receipts alone, of a run whose coordinator has no seal."""
    evidence = AuditInput()
    _read_receipts(evidence, receipts, claims, None, violations)
    return evidence


# --- lines ------------------------------------------------------------------------------------------------


def _lines(path: Path, notes: list[str], violations: list[str]) -> Iterator[tuple[str, bytes]]:
    """Each line with its place. The last may be cut off."""
    try:
        content = path.read_bytes()
    except OSError as error:
        violations.append(f"{path}: {error.strerror or error}")
        return
    *lines, rest = content.split(b"\n")
    if rest:
        notes.append(f"{path.name} ends in the middle of line {len(lines) + 1}")
    for number, line in enumerate(lines, 1):
        yield f"{path.name}:{number}", line


def _read_ledger(path: Path, evidence: AuditInput, violations: list[str]) -> None:
    """Lines with a checksum must match it; those of earlier versions have none, and stand before all that have one."""
    before, unchecked = b"", 0
    for place, line in _lines(path, evidence.cut, violations):
        match = re.fullmatch(rb'(.*),"crc":"([0-9a-f]{8})"}', line, re.DOTALL)
        if match is None:
            unchecked += 1
        wrong = match is not None and zlib.crc32(match[1], zlib.crc32(before)) != int(match[2], 16)
        if wrong or (match is None and before):
            violations.append(f"{place}: does not match its checksum")
        before = match[2] if match is not None else b""
        try:
            value = json.loads(line)
        except ValueError:
            violations.append(f"{place}: cannot be read")
            continue
        if isinstance(value, dict):
            evidence.ledger.append((place, value))
        else:
            violations.append(f"{place}: no line of a ledger")
    if unchecked:
        evidence.cut.append(f"{unchecked} lines of {path.name} are of an earlier version, and unchecked")


# --- receipts ---------------------------------------------------------------------------------------------


def _key(state: Path) -> bytes | None:
    try:
        return bytes.fromhex((state / "receipts.key").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _read_receipts(evidence: AuditInput, own: Iterable[Path], claims: Iterable[Path], key: bytes | None, violations: list[str]) -> None:
    for path in own:
        for place, receipt in _receipts(path, evidence.cut, violations):
            if receipt.seal and key is not None and not _is_sealed(receipt, key):
                violations.append(f"{place}: the seal is not the coordinator's, or what it stands under was changed")
            else:
                evidence.receipts.append((place, receipt))
    for path in claims:
        unreadable: list[str] = []
        for place, receipt in _receipts(path, evidence.cut, unreadable):
            sealed = key is not None and _is_sealed(receipt, key)
            (evidence.receipts if sealed else evidence.claims).append((place, receipt))
        evidence.cut += unreadable


def _receipts(path: Path, notes: list[str], violations: list[str]) -> Iterator[tuple[str, AuditedReceipt]]:
    for place, line in _lines(path, notes, violations):
        try:
            value = json.loads(line)
        except ValueError:
            violations.append(f"{place}: cannot be read")
            continue
        kinds = [type(one) for one in value] if isinstance(value, list) else []
        if kinds in ([str, int, str, int], [str, int, str, int, str, str]):
            yield place, AuditedReceipt(*value)
        else:
            violations.append(f"{place}: no receipt")


def _is_sealed(receipt: AuditedReceipt, key: bytes) -> bool:
    told = json.dumps([receipt.worker, receipt.seq, receipt.digest, receipt.version], separators=(",", ":")).encode()
    return hmac.compare_digest(hmac.new(key, told, "sha256").hexdigest()[:32], receipt.seal.encode("ascii", "replace").decode())


def digest_of(values: Iterable[Any]) -> str:
    """What a sealed receipt must say of a contribution that the ledger tells so."""
    return hashlib.sha256(json.dumps([*values], separators=(",", ":")).encode()).hexdigest()[:16]


# --- snapshots --------------------------------------------------------------------------------------------


def _snapshot(folder: Path, violations: list[str]) -> SnapshotSummary | None:
    """The newest one. One that is damaged is told, and the one before it serves."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            header = _header(path)
            for name, checksum in header["checksums"].items():
                if f"{zlib.crc32((path / name).read_bytes()):08x}" != checksum:
                    raise ValueError(f"{name} does not match its checksum")
            return _described(header)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            violations.append(f"snapshot {path.name} is damaged: {error}")
    return None


def _header(path: Path) -> dict[str, Any]:
    content = (path / "state.json").read_bytes()
    header: dict[str, Any] = json.loads(content)
    if "checksum" in header or header["format"] > 2:
        tail = f', "checksum": "{header["checksum"]}"}}'.encode()
        if not content.endswith(tail) or f"{zlib.crc32(content.removesuffix(tail)):08x}" != header["checksum"]:
            raise ValueError("state.json does not match its checksum")
    return header


def _described(header: dict[str, Any]) -> SnapshotSummary:
    whole = _plain(header["state"])
    state, settled, cut = whole["coordinator"]["state"], whole["coordinator"]["settled"], whole["coordinator"].get("cut")
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


class _Pages(NamedTuple):
    """What a journal holds, and where it ends; for one of an earlier version only that."""

    records: list[dict[str, Any]]
    end: int
    checksum: int
    before: tuple[int, int]
    """End and checksum of the journal before, as this one knows them; zeros where it does not."""
    mark: bytes
    checked: bool = True


def _journals(state: Path, snapshot: int, notes: list[str], violations: list[str]) -> list[Line]:
    """Records of the journal that follows the snapshot, and of those after it."""
    found = {int(match[1]): path for path in state.iterdir() if (match := re.fullmatch(r"journal-(\d+)", path.name))}
    numbers = sorted(number for number in found if number >= snapshot)
    if numbers != [*range(snapshot, snapshot + max(1, len(numbers)))]:
        violations.append(f"a journal since snapshot {snapshot} is missing: there are {numbers or 'none'}")
    records: list[Line] = []
    last: _Pages | None = None
    for number in numbers:
        pages = _pages(found[number], number == numbers[-1], notes, violations)
        if last is not None and pages.before != (0, 0) and pages.before != (last.end, last.checksum):
            violations.append(f"{found[number].name} follows a journal that was longer: {found[number - 1].name} has lost its end")
        records += [(f"{found[number].name}, record {index}", record) for index, record in enumerate(pages.records, 1)]
        last = pages
    return records


def _pages(path: Path, newest: bool, notes: list[str], violations: list[str]) -> _Pages:
    content = path.read_bytes()
    pages = _read_pages(content)
    if pages is None:
        violations.append(f"{path.name}: its head does not match its checksum")
        return _Pages([], 0, 0, (0, 0), b"")
    if not pages.checked:
        notes.append(f"{path.name} is of an earlier version: updates in it are unchecked")
    after = len(pages.records)
    if pages.mark and content.find(pages.mark, pages.end) >= 0:
        violations.append(f"{path.name}: record {after + 1} does not match its checksum, and was whole once")
    elif pages.end < len(content):
        (notes if newest or pages.checked else violations).append(f"{path.name} ends after record {after}, its file does not")
    return pages


def _read_pages(content: bytes) -> _Pages | None:
    """None: the head is damaged."""
    if len(content) >= _HEAD.size:
        _, mark, checksum, length, own = _HEAD.unpack_from(content)
        if zlib.crc32(_MAGIC + content[8:28]) == own:
            return _checked_pages(content, mark, (length, checksum), own)
        if content.startswith(_MAGIC):
            return None
    if len(content) < 8 or content.startswith(_MAGIC):
        return _Pages([], len(content), 0, (0, 0), b"")
    return _unchecked_pages(content)


def _checked_pages(content: bytes, mark: bytes, before: tuple[int, int], last: int) -> _Pages:
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
    return _Pages(records, at, last, before, mark)


def _unchecked_pages(content: bytes) -> _Pages:
    records, at, mark = list[dict[str, Any]](), 8, content[:8]
    while at + 16 <= len(content):
        size, checksum, body = struct.unpack_from("<IIQ", content, at)
        header, end = content[at + 16 : at + 16 + size], at + 16 + size + body
        if not size or content[end : end + 8] != mark or zlib.crc32(header) != checksum:
            break
        records.append(dict(msgpack.unpackb(header)["record"]))
        at = end + 8
    return _Pages(records, at, 0, (0, 0), mark, checked=False)
