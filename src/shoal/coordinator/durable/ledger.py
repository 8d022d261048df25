"""The ledger: one line for each version, and for whatever happened to a contribution besides.

Each line ends with a checksum of itself that begins with the checksum of the line before. Records come first, lines after: what the journal
leads to has every line that was written. So when records are taken again, the lines of before say whether any is missing.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shoal.errors import ShoalError

_FIELD = b',"crc":"'
_CLOSE = b'"}'


def sealed(line: dict[str, Any], before: str) -> tuple[bytes, str]:
    """A line with its checksum, and that; `before`: the checksum of the line before, or nothing."""
    content = json.dumps(line, separators=(",", ":")).encode().removesuffix(b"}")
    checksum = _checksum(content, before)
    return content + _FIELD + checksum.encode() + _CLOSE, checksum


class LedgerLine(NamedTuple):
    """A line as it stands in the file."""

    text: bytes
    number: int
    sound: bool
    """Whether it matches its checksum, or is of an earlier version, which wrote none."""
    checksum: str


def lines_of(content: bytes) -> Iterator[LedgerLine]:
    """Each line that was written to its end."""
    before, checked = "", False
    for number, text in enumerate(content.split(b"\n")[:-1], 1):
        body, field, rest = text.rpartition(_FIELD)
        checksum = rest.removesuffix(_CLOSE).decode("latin-1") if field else ""
        checked = checked or bool(field)
        sound = _checksum(body, before) == checksum and rest.endswith(_CLOSE) if field else not checked
        yield LedgerLine(text, number, sound, checksum)
        before = checksum


def _checksum(content: bytes, before: str) -> str:
    return f"{zlib.crc32(content, zlib.crc32(before.encode('latin-1'))):08x}"


class FileLedger:
    """The ledger of a run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self.remarks: list[str] = []
        """What people should know of the ledger that was read."""
        self._file: BinaryIO | None = None
        self._last = ""
        """The checksum of the last line."""
        self._again: _Again | None = None

    def append(self, line: dict[str, Any]) -> None:
        if self._again is not None:
            self._again.lines.append(line)
            return
        try:
            self._write([line])
        except OSError as error:
            raise ShoalError(f"cannot write {self.path}: {error.strerror or error}") from None

    def _write(self, lines: list[dict[str, Any]]) -> None:
        file = self._file or self._opened()
        for line in lines:
            text, self._last = sealed(line, self._last)
            view = memoryview(text + b"\n")
            while len(view):
                view = view[file.write(view) :]

    def _opened(self) -> BinaryIO:
        content = self._content()
        self._last = next((line.checksum for line in reversed([*lines_of(content)])), "")
        opened: Any = self.path.open("ab", buffering=0)
        file: BinaryIO = opened
        if content and not content.endswith(b"\n"):
            file.write(b"\n")  # what was cut off stays a line of its own
        self._file = file
        return file

    def _content(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    @property
    def length(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def cut(self, length: int) -> None:
        """Go back to what a snapshot knows of. Until `settle` is called, lines are those of records that are taken again."""
        self.close()
        content = self._content()
        lines, kept = [*lines_of(content)], content[:length].count(b"\n")
        bad = [str(line.number) for line in lines[:kept] if not line.sound]
        if len(content) < length:
            self._remark(f"is shorter than when the snapshot was taken ({length - len(content)} bytes are gone)")
        elif bad:
            self._remark(f"is damaged in line {', '.join(bad[:8])}{' and others' if bad[8:] else ''}")
        self._again = _Again(min(length, len(content)), lines[kept:], [])

    def _remark(self, what: str) -> None:
        self.remarks.append(f"{self.path} {what}: the run does not need it to go on, but `shoal audit` will always say so; put it back")

    def settle(self) -> None:
        """All records since the snapshot are taken again: write their lines. Raises ShoalError where there was a line that none of them
        leads to; then the ledger is as it was."""
        again, self._again = self._again, None
        assert again is not None
        missing = again.missing()
        if missing is not None:
            told = f"version {missing['version']}" if "version" in missing else f"something ({', '.join(missing)})"
            raise ShoalError(
                f"records at the end of the newest journal in {self.path.parent} are gone: line {missing['line']} of {self.path.name} "
                f"tells of {told}, and the journal does not lead there. Put the journal back from a backup; or let "
                f"`shoal repair {self.path.parent}` go on without what is lost, which names it"
            )
        damaged = [str(line.number) for line in again.before if not line.sound]
        if damaged:
            self.remarks.append(f"{self.path} was damaged in line {', '.join(damaged[:8])}; it is written again from the journal")
        try:
            if self.path.exists():
                os.truncate(self.path, again.length)
            if again.lines:
                self._write(again.lines)
        except OSError as error:
            raise ShoalError(f"cannot write {self.path}: {error.strerror or error}") from None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _Again(NamedTuple):
    """Records are taken again after a snapshot, when the ledger had this length."""

    length: int
    before: list[LedgerLine]
    """Lines that were written after it."""
    lines: list[dict[str, Any]]
    """Lines that the records lead to now."""

    def missing(self) -> dict[str, Any] | None:
        """The first line of before that the records do not lead to. What was written off at the end of a run is in no record."""
        now = iter(self.lines)
        for written in self.before:
            line = _parsed(written) if written.sound else {}
            if line and "unused" not in line and not any(_same(line, json.loads(json.dumps(one))) for one in now):
                return line | {"line": written.number}
        return None


def _same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether two lines tell of the same. Earlier versions did not write down whom a rule had left out."""
    return before == (now if "dropped" in before else {name: value for name, value in now.items() if name != "dropped"})


def _parsed(written: LedgerLine) -> dict[str, Any]:
    try:
        line = json.loads(written.text)
    except ValueError:  # of an earlier version, and damaged
        return {}
    return {name: value for name, value in line.items() if name != "crc"} if isinstance(line, dict) else {}
