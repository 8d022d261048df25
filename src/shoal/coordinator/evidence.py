"""What a run has left behind, read for an audit: ledger, receipts, journal, newest snapshot. What cannot be read is told, not raised."""

from __future__ import annotations

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


class Receipt(NamedTuple):
    """What a worker was told."""

    worker: str
    seq: int
    status: str
    version: int


class Snapshot(NamedTuple):
    """What the newest snapshot says of itself."""

    number: int
    version: int
    batches: int
    samples: int
    sequences: dict[str, int]
    ledger_bytes: int


@dataclass
class Evidence:
    """All that was found."""

    ledger: list[Line] = field(default_factory=list)
    ledger_bytes: int = 0
    receipts: list[tuple[str, Receipt]] = field(default_factory=list)
    snapshot: Snapshot | None = None
    records: list[Line] = field(default_factory=list)
    """Of all journals since the snapshot."""
    cut: list[str] = field(default_factory=list)
    """Files that end in the middle of something, as a crash leaves them."""


def gather(state: Path, receipts: Iterable[Path], violations: list[str]) -> Evidence:
    evidence = Evidence()
    ledger = state / "ledger.jsonl"
    evidence.ledger_bytes = ledger.stat().st_size if ledger.exists() else 0
    for place, value in _json_lines(ledger, evidence.cut, violations):
        if isinstance(value, dict):
            evidence.ledger.append((place, value))
        else:
            violations.append(f"{place}: no line of a ledger")
    for path in receipts:
        evidence.receipts += _receipts(path, evidence.cut, violations)
    evidence.snapshot = _snapshot(state / "snapshots", violations)
    if evidence.snapshot is not None:
        evidence.records = _journals(state, evidence.snapshot.number, evidence.cut, violations)
    return evidence


def gather_from(
    ledger: Iterable[str], snapshot: dict[str, Any] | None, records: Iterable[bytes], receipts: Iterable[Path], violations: list[str]
) -> Evidence:
    """The same from a database, which has cut nothing off."""
    evidence = Evidence()
    evidence.ledger = [(f"ledger:{number}", json.loads(line)) for number, line in enumerate(ledger, 1)]
    evidence.ledger_bytes = len(evidence.ledger)  # it counts lines
    for path in receipts:
        evidence.receipts += _receipts(path, evidence.cut, violations)
    evidence.snapshot = _described(snapshot) if snapshot is not None else None
    evidence.records = [(f"journal, record {number}", dict(msgpack.unpackb(record))) for number, record in enumerate(records, 1)]
    return evidence


def _json_lines(path: Path, cut: list[str], violations: list[str]) -> Iterator[tuple[str, Any]]:
    """Each line with its place. The last may be cut off; any other must be whole."""
    try:
        content = path.read_bytes()
    except OSError as error:
        violations.append(f"{path}: {error.strerror or error}")
        return
    *lines, rest = content.split(b"\n")
    if rest:
        cut.append(f"{path.name} ends in the middle of line {len(lines) + 1}")
    for number, line in enumerate(lines, 1):
        try:
            yield f"{path.name}:{number}", json.loads(line)
        except ValueError:
            violations.append(f"{path.name}:{number}: cannot be read")


def _receipts(path: Path, cut: list[str], violations: list[str]) -> Iterator[tuple[str, Receipt]]:
    for place, value in _json_lines(path, cut, violations):
        good = isinstance(value, list) and [type(one) for one in value] == [str, int, str, int]
        if good:
            yield place, Receipt(*value)
        else:
            violations.append(f"{place}: no receipt")


# --- snapshots --------------------------------------------------------------------------------------------


def _snapshot(folder: Path, violations: list[str]) -> Snapshot | None:
    """The newest one. One that is damaged is told, and the one before it serves."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            header = json.loads((path / "state.json").read_bytes())
            for name, checksum in header["checksums"].items():
                if f"{zlib.crc32((path / name).read_bytes()):08x}" != checksum:
                    raise ValueError(f"{name} does not match its checksum")
            return _described(header)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            violations.append(f"snapshot {path.name} is damaged: {error}")
    return None


def _described(header: dict[str, Any]) -> Snapshot:
    whole = _plain(header["state"])
    state = whole["coordinator"]["state"]
    sequences = {str(worker): int(seq) for worker, seq in state["sequences"].items()}
    return Snapshot(
        int(header["step"]), int(state["version"]), int(state["batches"]), int(state["samples"]), sequences, int(whole["ledger"])
    )


def _plain(value: Any) -> Any:
    """Nested data as it was before it was packed for the file; tensors stay names."""
    if isinstance(value, dict) and "$items" in value:
        return {key: _plain(item) for key, item in value["$items"]}
    return [_plain(item) for item in value] if isinstance(value, list) else value


# --- journals ---------------------------------------------------------------------------------------------


def _journals(state: Path, snapshot: int, cut: list[str], violations: list[str]) -> list[Line]:
    """Records of the journal that follows the snapshot, and of those after it."""
    found = {int(match[1]): path for path in state.iterdir() if (match := re.fullmatch(r"journal-(\d+)", path.name))}
    numbers = sorted(number for number in found if number >= snapshot)
    if numbers != [*range(snapshot, snapshot + max(1, len(numbers)))]:
        violations.append(f"a journal since snapshot {snapshot} is missing: there are {numbers or 'none'}")
    records: list[Line] = []
    for number in numbers:
        last = _records(found[number], records, violations)
        if last and number == numbers[-1]:
            cut.append(last)
        elif last:
            violations.append(last)
    return records


def _records(path: Path, records: list[Line], violations: list[str]) -> str:
    """Append what a journal holds; a word on its end if that is not whole."""
    content, at, number = path.read_bytes(), 8, 0
    mark = content[:8]
    while at < len(content):
        prefix = content[at : at + 16]
        size, checksum, body = struct.unpack("<IIQ", prefix) if len(prefix) == 16 else (0, 0, 0)
        header, end = content[at + 16 : at + 16 + size], at + 16 + size + body
        if not size or content[end : end + 8] != mark:
            return f"{path.name} ends after record {number}, its file does not"
        if zlib.crc32(header) != checksum:
            violations.append(f"{path.name}: record {number + 1} does not match its checksum")
            return ""
        records.append((f"{path.name}, record {number + 1}", dict(msgpack.unpackb(header)["record"])))
        at, number = end + 8, number + 1
    return ""
