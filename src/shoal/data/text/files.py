"""Text files and JSON lines, gzipped or not, as documents that can be read from any byte."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shoal.data.splits import split_of
from shoal.data.text.documents import Document, Documents, Position, TextPart, Unit, origin_of
from shoal.data.text.rows import Fields, rows_to_documents
from shoal.errors import ShoalError
from shoal.untrusted.data_files import lines_of, open_data

SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
PIECE = 16 * 1024
_HASHED_BYTES = 64 * 1024
"""Bytes at the beginning of a file whose digest is the origin of its documents."""


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
    """Training files and held-out files, if names such as train.txt and valid.txt distinguish them; else all are training files."""
    if root.is_file():
        return list(files), []
    splits = [split_of(file.relative_to(root).parts[0]) for file in files]
    if "train" not in splits or "held-out" not in splits:
        return list(files), []
    pairs = list(zip(files, splits, strict=True))
    return [file for file, split in pairs if split != "held-out"], [file for file, split in pairs if split == "held-out"]


def open_text(path: Path, fields: Fields, unit: Unit, mixed: bool) -> list[TextPart]:
    """One part; or with `mixed` one for each file and each sub-folder of the folder."""
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
    # The folder has one set of held-out files. It belongs to the first part; empty held-out parts keep the others whole.
    return [part._replace(held_out=held if number == 0 else TextFiles([], fields, unit)) for number, part in enumerate(parts)]


def _group(root: Path, file: Path) -> str:
    """The sub-folder or file of the root (or of its `train` folder) that contains a file."""
    if root.is_file():
        return root.name
    parts = file.relative_to(root).parts
    return parts[1] if len(parts) > 1 and split_of(parts[0]) == "train" else parts[0]


def files_by_split(folder: Path, splits: Mapping[str, str]) -> Iterator[tuple[str, list[str], Path]]:
    """The files of a corpus whose names contain a word of `splits`: the split of that word, the words of the name, the file."""
    for file in sorted(folder.rglob("*")) if folder.is_dir() else []:
        words = re.split(r"[._-]", file.name.lower())
        split = next((splits[word] for word in words if word in splits), None)
        if split is not None and file.is_file():
            yield split, words, file


def corpus_part(name: str, splits: Mapping[str, Documents], validation: str, missing: str) -> TextPart:
    """Train on `train` and evaluate on `validation`. Without a train file, train on `validation` and evaluate on `test`; the name says so.
    `missing`: the message if there is neither."""
    if "train" in splits:
        return TextPart(name, splits["train"], splits.get(validation))
    if validation not in splits:
        raise ShoalError(f"data.source.path: {missing}")
    return TextPart(f"{name} (its {validation} part: there is no train file)", splits[validation], splits.get("test"))


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
            origin = "" if is_rows(file) else origin_of(content.read(_HASHED_BYTES))
            content.seek(offset)
            if is_rows(file):
                rows = ((row, where, (after, number)) for row, where, after, number in read_rows(file, content, offset, line))
                for document, (after, number) in rows_to_documents(rows, self._fields):
                    yield document, after, number
                return
            read = {"whole": _whole, "piece": _in_pieces, "line": _in_lines}[self._unit]
            for document, end, end_line in read(file, content, offset, line):
                yield document._replace(origin=f"{origin}#{end_line}" if self._unit == "line" else origin), end, end_line


def is_rows(file: Path) -> bool:
    return ".jsonl" in file.suffixes[-2:]


@contextmanager
def open_file(file: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed if it is gzipped. Errors while it is read become ShoalErrors with its name."""
    try:
        with open_data(file, compressed=file.suffix == ".gz") as content:
            yield content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ShoalError(f"{file} is damaged: {error}") from error
    except OSError as error:
        raise ShoalError(f"{file} cannot be read: {error.strerror or error}") from error


def read_rows(file: Path, content: IO[bytes], offset: int = 0, line: int = 0) -> Iterator[tuple[dict[str, object], str, int, int]]:
    """JSON lines: each row, its place for messages, and the position after it as bytes and lines."""
    for raw in lines_of(file, content):
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
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"{where}: this line is JSON that is not read: {error}") from error
    if not isinstance(row, dict):
        raise ShoalError(f"{where}: this line is not a JSON object but {type(row).__name__}")
    return row


def _whole(file: Path, content: IO[bytes], offset: int, line: int) -> Iterator[tuple[Document, int, int]]:
    raw = content.read()
    if raw:
        yield Document(decode(raw, str(file), offset)), offset + len(raw), line


def _in_pieces(file: Path, content: IO[bytes], offset: int, line: int) -> Iterator[tuple[Document, int, int]]:
    """Holds: a piece depends only on the byte at which it begins, so reading can resume there."""
    rest = b""
    while block := rest + content.read(PIECE + 1 - len(rest)):
        cut = len(block) if len(block) <= PIECE else _end_of_piece(block)
        rest = block[cut:]
        document = Document(decode(block[:cut], str(file), offset), complete=not rest, continues=offset > 0)
        offset += cut
        yield document, offset, line


def _end_of_piece(block: bytes) -> int:
    """The end of a piece: after its last line, or between two characters if a line is longer than a piece."""
    cut = block.rfind(b"\n", 0, PIECE) + 1
    if cut:
        return cut
    return next((at for at in range(PIECE, PIECE - 4, -1) if block[at] & 0xC0 != 0x80), PIECE)


def _in_lines(file: Path, content: IO[bytes], offset: int, line: int) -> Iterator[tuple[Document, int, int]]:
    for raw in lines_of(file, content):
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
