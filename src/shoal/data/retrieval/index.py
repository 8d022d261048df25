"""The index: a folder of passages, their vectors in FAISS, and their documents. Its digests are checked when it is opened.

    manifest.json   the encoder, the documents, the digest of the passages, and the digest of each file
    passages.jsonl  one passage per line: the number of its document, and its text
    vectors.faiss   their vectors, in order

Shapes: Q queries, P passages, K neighbours, D dimensions.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.data.packages import import_optional
from shoal.data.retrieval.encoders import Encoder, Vectors
from shoal.data.retrieval.passages import Passages
from shoal.errors import ShoalError
from shoal.files import JsonFormat, file_digest

Neighbours = NDArray[np.int32]
IndexProgress = Callable[[int, int], None]
"""Called while an index is built with the number of encoded passages and the total."""

MANIFEST = "manifest.json"
_FORMAT = JsonFormat("index", 1, ("encoder", "digest", "origins", "files"), remedy="build it again with `shoal index`")
_FILES = ("passages.jsonl", "vectors.faiss")
_EXACT = b"IxFI"
_HEADER = struct.Struct("<4siqqqBiQ")
"""Of FAISS's file of an exact index by inner product: its kind, dimensions, vectors, three fields that are not read, whether it is trained,
and the count of the numbers that follow."""
_AT_ONCE = 1024
_EXTRA_NEIGHBOURS = 8
"""Searched in addition, since some neighbours may be from the query's own document."""


class Index(NamedTuple):
    """An index in memory."""

    folder: Path
    passages: Passages
    vectors: Any
    """FAISS's index: exact, by inner product."""
    encoder: str
    digest: str
    documents_by_origin: dict[str, set[int]]
    """The numbers of documents by their origins, and by the files that they are lines of."""

    def search(self, queries_QD: Vectors, count: int, origins: Sequence[Sequence[str]]) -> Neighbours:
        """The nearest passages [Q, K], nearest first, without those from the query's `origins`; −1 where there are no more."""
        documents = self.passages.documents
        found_QK = np.full((len(queries_QD), count), -1, np.int32)
        _, near_QK = self.vectors.search(queries_QD, min(count + _EXTRA_NEIGHBOURS, self.vectors.ntotal))
        for query, own in enumerate(origins):
            forbidden = self._documents_of(own)
            allowed = [number for number in near_QK[query] if documents[number] not in forbidden]
            if len(allowed) < count and near_QK.shape[1] < self.vectors.ntotal:
                allowed = self._search_outside(queries_QD[query : query + 1], count, forbidden)
            found_QK[query, : len(allowed[:count])] = allowed[:count]
        return found_QK

    def _documents_of(self, origins: Sequence[str]) -> set[int]:
        """The documents of these origins. For a file they include its lines, and for a line its file."""
        found: set[int] = set()
        for origin in origins:
            found |= self.documents_by_origin.get(origin, set())
            file = origin.partition("#")[0]
            found |= {number for number in self.documents_by_origin.get(file, ()) if self.passages.origins[number] in (origin, file)}
        return found

    def _search_outside(self, query_1D: Vectors, count: int, forbidden: set[int]) -> list[int]:
        """Search with FAISS's own filter, where nearly all neighbours are from forbidden documents."""
        faiss = _faiss()
        allowed = np.flatnonzero(~np.isin(self.passages.documents, list(forbidden)))
        if not len(allowed):
            return []
        _, near = self.vectors.search(query_1D, min(count, len(allowed)), params=faiss.SearchParameters(sel=faiss.IDSelectorBatch(allowed)))
        return [int(number) for number in near[0] if number >= 0]


def _documents_by_origin(origins: Sequence[str]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for number, origin in enumerate(origins):
        for name in {origin, origin.partition("#")[0]}:
            found.setdefault(name, set()).add(number)
    return found


def digest_of(passages: Passages, encoder: str) -> str:
    return hashlib.sha256(f"{_FORMAT.version} {encoder} {passages.digest()}".encode()).hexdigest()


def build_index(passages: Passages, encoder: Encoder, folder: Path, about: dict[str, Any], progress: IndexProgress | None = None) -> Index:
    """Encode passages and write an index, which appears complete or not at all. `about`: more entries of the manifest, for information."""
    faiss = _faiss()
    vectors: Any = None
    for start in range(0, len(passages.texts), _AT_ONCE):
        some = encoder.encode(passages.texts[start : start + _AT_ONCE])
        vectors = faiss.IndexFlatIP(some.shape[1]) if vectors is None else vectors
        vectors.add(some)
        if progress:
            progress(vectors.ntotal, len(passages.texts))
    index = Index(folder, passages, vectors, encoder.name, digest_of(passages, encoder.name), _documents_by_origin(passages.origins))
    _write(index, about)
    return index


def _write(index: Index, about: dict[str, Any]) -> None:
    # Processes, also on machines that share the folder, may build the same index: each writes a temporary folder, and the first is kept
    partial = index.folder.with_name(f".{index.folder.name}.{secrets.token_hex(8)}.partial")
    try:
        partial.mkdir(parents=True)
        lines = (
            json.dumps([int(document), text], ensure_ascii=False) + "\n"
            for document, text in zip(index.passages.documents, index.passages.texts, strict=True)
        )
        (partial / _FILES[0]).write_text("".join(lines), encoding="utf-8")
        _faiss().write_index(index.vectors, str(partial / _FILES[1]))
        manifest = {"encoder": index.encoder, "digest": index.digest, "passages": len(index.passages.texts)}
        files = {name: file_digest(partial / name) for name in _FILES}
        _FORMAT.write(partial / MANIFEST, about | manifest | {"origins": index.passages.origins, "files": files}, indent=1)
        if not (index.folder / MANIFEST).exists():
            partial.rename(index.folder)
    except OSError as error:
        raise ShoalError(f"the index {index.folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def open_index(folder: Path) -> Index:
    """Read an index, and check it against its manifest. Raises ShoalError."""
    faiss = _faiss()
    manifest = _FORMAT.read(folder / MANIFEST)
    if manifest is None:
        raise ShoalError(f"there is no index at {folder}: `shoal index FILES… --out {folder}` builds one")
    try:
        if {name: file_digest(folder / name) for name in _FILES} != manifest["files"]:
            raise ValueError("its files are not those that its manifest names")
        rows = [json.loads(line) for line in (folder / _FILES[0]).read_text(encoding="utf-8").split("\n")[:-1]]
        numbers = np.asarray([document for document, _ in rows], np.int32)
        passages = Passages([str(text) for _, text in rows], numbers, manifest["origins"])
        _check_vectors(folder / _FILES[1], len(rows))
        vectors = faiss.read_index(str(folder / _FILES[1]))
        if vectors.ntotal != len(rows) or digest_of(passages, manifest["encoder"]) != manifest["digest"]:
            raise ValueError("its vectors and its passages do not belong together")
    except (OSError, ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        raise ShoalError(f"the index {folder} is damaged ({reason}): build it again with `shoal index`") from None
    return Index(folder, passages, vectors, manifest["encoder"], manifest["digest"], _documents_by_origin(passages.origins))


def _check_vectors(path: Path, count: int) -> None:
    """Raises ValueError where the file is not an exact index of as many vectors: FAISS reads others without looking at their sizes."""
    with path.open("rb") as content:
        header = content.read(_HEADER.size)
    kind, dimensions, found, *_, numbers = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"", 0, 0, 0)
    if kind != _EXACT or found != count or numbers != count * dimensions or path.stat().st_size != _HEADER.size + 4 * numbers:
        raise ValueError("its vectors are not as many as its passages")


def _faiss() -> Any:
    return import_optional("faiss", "retrieval needs the Python package faiss-cpu: pip install 'shoal[rag]'")
