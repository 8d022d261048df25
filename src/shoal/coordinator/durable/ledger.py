"""The ledger: one JSON line per version, and per other event in the life of a contribution.

Each line has the format's number and ends with a checksum that continues the checksum of the line before. Records are written first, ledger
lines after them: applying the journal again leads to every line that was written, so a lost record shows by its line.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shoal.errors import ShoalError
from shoal.files import check_format, open_file, read_file

_FIELD = b',"crc":"'
_CLOSE = b'"}'
FORMAT = 1
_MOST_BYTES = 16 << 30


def sealed(line: dict[str, Any], before: str) -> tuple[bytes, str]:
    """A line with its checksum, and the checksum; `before`: the checksum of the line before, empty for the first line."""
    content = json.dumps(line | {"format": FORMAT}, separators=(",", ":")).encode().removesuffix(b"}")
    checksum = _checksum(content, before)
    return content + _FIELD + checksum.encode() + _CLOSE, checksum


class LedgerLine(NamedTuple):
    """A line of the file."""

    text: bytes
    number: int
    sound: bool
    """Whether it matches its checksum."""
    checksum: str


def lines_of(content: bytes, before: str = "") -> Iterator[LedgerLine]:
    """Each complete line; `before`: the checksum of the line before the first of them."""
    for number, text in enumerate(content.split(b"\n")[:-1], 1):
        body, field, rest = text.rpartition(_FIELD)
        checksum = rest.removesuffix(_CLOSE).decode("latin-1") if field else ""
        sound = bool(field) and rest.endswith(_CLOSE) and _checksum(body, before) == checksum
        yield LedgerLine(text, number, sound, checksum)
        before = checksum


def _checksum(content: bytes, before: str) -> str:
    return f"{zlib.crc32(content, zlib.crc32(before.encode('latin-1'))):08x}"


class FileLedger:
    """Ledger of a run, in a file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self.remarks: list[str] = []
        """Warnings for the user about the file that was read."""
        self._file: BinaryIO | None = None
        self._last = ""
        """The checksum of the last line."""
        self._replay: _Replay | None = None

    def append(self, line: dict[str, Any]) -> None:
        if self._replay is not None:
            self._replay.lines.append(line)
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
        file = open_file(self.path, "ab", buffering=0)
        if content and not content.endswith(b"\n"):
            file.write(b"\n")  # a line that was cut off stays a line of its own
        self._file = file
        return file

    def _content(self) -> bytes:
        """The whole file. Raises ShoalError where another version of Shoal wrote it."""
        content = read_file(self.path, _MOST_BYTES) or b""
        first = next(lines_of(content), None)
        found = _parsed(first).get("format") if first is not None and first.sound else FORMAT
        check_format(self.path, "ledger", found, FORMAT)
        return content

    @property
    def length(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def cut(self, length: int) -> None:
        """Go back to the length at a snapshot. Until `settle` is called, appended lines come from records that are replayed."""
        self.close()
        content = self._content()
        lines, kept = [*lines_of(content)], content[:length].count(b"\n")
        bad = [str(line.number) for line in lines[:kept] if not line.sound]
        if len(content) < length:
            self._remark(f"is shorter than when the snapshot was taken ({length - len(content)} bytes are gone)")
        elif bad:
            self._remark(f"is damaged in line {', '.join(bad[:8])}{' and others' if bad[8:] else ''}")
        self._replay = _Replay(min(length, len(content)), lines[kept:], [])

    def _remark(self, what: str) -> None:
        self.remarks.append(f"{self.path} {what}: the run does not need it to go on, but `shoal audit` will always say so; put it back")

    def settle(self) -> None:
        """Write the lines of the replayed records. Raises ShoalError, and changes nothing, where no record leads to a line of the file."""
        replay, self._replay = self._replay, None
        assert replay is not None
        missing = replay.missing()
        if missing is not None:
            what = f"version {missing['version']}" if "version" in missing else f"something ({', '.join(missing)})"
            raise ShoalError(
                f"records at the end of the newest journal in {self.path.parent} are gone: line {missing['line']} of {self.path.name} "
                f"tells of {what}, and the journal does not lead there. Put the journal back from a backup; or let "
                f"`shoal repair {self.path.parent}` go on without what is lost, which names it"
            )
        damaged = [str(line.number) for line in replay.before if not line.sound]
        if damaged:
            self.remarks.append(f"{self.path} was damaged in line {', '.join(damaged[:8])}; it is written again from the journal")
        try:
            if self.path.exists():
                os.truncate(self.path, replay.length)
            if replay.lines:
                self._write(replay.lines)
        except OSError as error:
            raise ShoalError(f"cannot write {self.path}: {error.strerror or error}") from None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _Replay(NamedTuple):
    """Replay of the records after a snapshot, at which the ledger had this length."""

    length: int
    before: list[LedgerLine]
    """Lines of the file after the snapshot."""
    lines: list[dict[str, Any]]
    """Lines of the replayed records."""

    def missing(self) -> dict[str, Any] | None:
        """The first line of the file that no replayed record leads to. Contributions left over at the end of a run have no record."""
        now = iter(self.lines)
        for written in self.before:
            line = _parsed(written) if written.sound else {}
            line.pop("format", None)
            if line and "unused" not in line and not any(line == json.loads(json.dumps(one)) for one in now):
                return line | {"line": written.number}
        return None


def _parsed(written: LedgerLine) -> dict[str, Any]:
    """The fields of a sound line, without its checksum."""
    line = json.loads(written.text)
    return {name: value for name, value in line.items() if name != "crc"}
