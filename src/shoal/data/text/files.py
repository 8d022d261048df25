"""Text files and JSON lines, gzipped or not, as documents that can be read from any byte."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from shoal.data.splits import split_of
from shoal.data.text.documents import Document, Position, TextPart, Unit, origin_of
from shoal.data.text.rows import Fields, fields_of, to_document
from shoal.errors import ShoalError

SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
PIECE = 16 * 1024
_KNOWN_BY = 64 * 1024
"""Bytes at its beginning by which a file is known."""


def find_files(path: Path) -> list[Path]:
    """The file, or all text files below the folder in the order of their paths."""
    if path.is_file():
        return [path]
    if not path.exists():
        raise ShoalError(f"there is nothing at {path}: put text files there ({', '.join(SUFFIXES)}), or set data.source.path")
    files = [file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and not file.name.startswith(".")]
    if not files:
        raise ShoalError(f"there are no text files in {path} ({', '.join(SUFFIXES)})")
    return sorted(files, key=lambda file: file.relative_to(path).parts)


def by_split(root: Path, files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Files to learn from and files to be judged on, where names such as train.txt and valid.txt tell them apart."""
    if root.is_file():
        return list(files), []
    splits = [split_of(file.relative_to(root).parts[0]) for file in files]
    if "train" not in splits or "held-out" not in splits:
        return list(files), []
    pairs = list(zip(files, splits, strict=True))
    return [file for file, split in pairs if split != "held-out"], [file for file, split in pairs if split == "held-out"]


def open_text(path: Path, fields: Fields, unit: Unit, mixed: bool) -> list[TextPart]:
    """One part; or with `mixed` one for each sub-folder and each file beside them."""
    files, held_out = by_split(path, find_files(path))
    if not any(file.stat().st_size for file in files):
        raise ShoalError(f"{path} is empty: there is no text in it")
    held = TextFiles(held_out, fields, unit) if held_out else None
    if not mixed:
        return [TextPart(path.resolve().name, TextFiles(files, fields, unit), held)]
    groups: dict[str, list[Path]] = {}
    for file in files:
        groups.setdefault(_group(path, file), []).append(file)
    parts = [TextPart(name, TextFiles(group, fields, unit), None) for name, group in groups.items()]
    if held is None:
        return parts
    # The whole folder has one set of held-out files: it goes with the first part, and the others keep all they have.
    return [part._replace(held_out=held if number == 0 else TextFiles([], fields, unit)) for number, part in enumerate(parts)]


def _group(root: Path, file: Path) -> str:
    """The sub-folder or file below the root (or below its `train` folder) that a file belongs to."""
    if root.is_file():
        return root.name
    parts = file.relative_to(root).parts
    return parts[1] if len(parts) > 1 and split_of(parts[0]) == "train" else parts[0]


class TextFiles:
    """Documents in files. A position is the file's number, the byte in its uncompressed content, and the line."""

    def __init__(self, files: Sequence[Path], fields: Fields, unit: Unit) -> None:
        self._files = list(files)
        self._fields = fields
        self._unit = unit

    def read(self, position: Position = None) -> Iterator[tuple[Document, Position]]:
        first, offset, line = position or (0, 0, 0)
        for number in range(first, len(self._files)):
            for document, *after in self._read_file(self._files[number], offset, line):
                yield document, [number, *after]
            offset = line = 0

    def size(self) -> int:
        return sum(file.stat().st_size * (3 if file.suffix == ".gz" else 1) for file in self._files)

    def _read_file(self, file: Path, offset: int, line: int) -> Iterator[tuple[Document, int, int]]:
        with open_file(file) as content:
            origin = "" if is_rows(file) else origin_of(content.read(_KNOWN_BY))
            content.seek(offset)
            if is_rows(file):
                yield from self._rows(file, content, offset, line)
                return
            for document, *after in {"whole": _whole, "piece": _in_pieces, "line": _in_lines}[self._unit](file, content, offset, line):
                number = f"#{after[1]}" if self._unit == "line" else ""
                yield document._replace(origin=origin + number), after[0], after[1]

    def _rows(self, file: Path, content: IO[bytes], offset: int, line: int) -> Iterator[tuple[Document, int, int]]:
        fields: tuple[str | None, str | None] | None = None
        for row, where, after, number in read_rows(file, content, offset, line):
            fields = fields or fields_of(row, where, self._fields)
            document = to_document(row, fields[0], where, fields[1])
            if document.text:
                yield document, after, number


def is_rows(file: Path) -> bool:
    return ".jsonl" in file.suffixes[-2:]


@contextmanager
def open_file(file: Path) -> Iterator[IO[bytes]]:
    """A file's content, unzipped. Errors while it is read name the file."""
    try:
        with cast(IO[bytes], gzip.open(file) if file.suffix == ".gz" else file.open("rb")) as content:
            yield content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ShoalError(f"{file} is damaged: {error}") from error
    except OSError as error:
        raise ShoalError(f"{file} cannot be read: {error.strerror or error}") from error


def read_rows(file: Path, content: IO[bytes], offset: int = 0, line: int = 0) -> Iterator[tuple[dict[str, object], str, int, int]]:
    """JSON lines: each row, where it stands, and the byte and the number of lines after it."""
    for raw in content:
        where = f"{file}:{line + 1}"
        row = None if raw.isspace() else _row(raw, where, offset)
        offset, line = offset + len(raw), line + 1
        if row is not None:
            yield row, where, offset, line


def _row(raw: bytes, where: str, offset: int) -> dict[str, object]:
    try:
        row = json.loads(decode(raw, where, offset))
        if rb"\ud" in raw.lower():  # half a surrogate pair is valid JSON and no text
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise ShoalError(f"{where}: this line is not JSON: {error.msg} at column {error.colno}") from error
    except UnicodeEncodeError as error:
        raise ShoalError(f"{where}: this line holds half of a surrogate pair, which is no character") from error
    if not isinstance(row, dict):
        raise ShoalError(f"{where}: this line is not a JSON object but {type(row).__name__}")
    return row


def _whole(file: Path, content: IO[bytes], offset: int, line: int) -> Iterator[tuple[Document, int, int]]:
    raw = content.read()
    if raw:
        yield Document(decode(raw, str(file), offset)), offset + len(raw), line


def _in_pieces(file: Path, content: IO[bytes], offset: int, line: int) -> Iterator[tuple[Document, int, int]]:
    """Each piece follows from the byte it begins at alone, so that reading can go on from there."""
    rest = b""
    while block := rest + content.read(PIECE + 1 - len(rest)):
        cut = len(block) if len(block) <= PIECE else _end_of_piece(block)
        rest = block[cut:]
        document = Document(decode(block[:cut], str(file), offset), complete=not rest)
        offset += cut
        yield document, offset, line


def _end_of_piece(block: bytes) -> int:
    """Where to cut a piece off: after its last line, or between two characters if a line is longer than a piece."""
    cut = block.rfind(b"\n", 0, PIECE) + 1
    if cut:
        return cut
    return next((at for at in range(PIECE, PIECE - 4, -1) if block[at] & 0xC0 != 0x80), PIECE)


def _in_lines(file: Path, content: IO[bytes], offset: int, line: int) -> Iterator[tuple[Document, int, int]]:
    for raw in content:
        text = decode(raw, f"{file}:{line + 1}", offset).rstrip("\r\n")
        offset, line = offset + len(raw), line + 1
        if text and not text.isspace():
            yield Document(text), offset, line


def decode(raw: bytes, where: str, offset: int = 0) -> str:
    """The text of UTF-8 bytes; a byte-order mark at the beginning of a file is removed."""
    try:
        text = raw.decode("utf-8")
        return text if offset else text.removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ShoalError(f"{where}: not UTF-8: byte {offset + error.start:,} is {raw[error.start]:#04x}. Save it as UTF-8") from error
