"""The index of a run's settings, and data with the passages that are retrieved from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from shoal.config import Run
from shoal.config.schema.model import Retrieval
from shoal.data.interfaces import Progress, SampleStream
from shoal.data.loaded_data import Data
from shoal.data.retrieval.augmented_samples import RetrievalSamples, RetrievalStream
from shoal.data.retrieval.encoders import open_encoder
from shoal.data.retrieval.finder import PassageFinder, PassageSettings
from shoal.data.retrieval.index import Index, IndexProgress, build_index, digest_of, open_index
from shoal.data.retrieval.passages import cut_passages
from shoal.data.text.documents import Document
from shoal.data.text.files import TextFiles, find_files
from shoal.data.text.rows import Fields
from shoal.data.text.tokenizers import Tokenizer
from shoal.errors import ShoalError


def retrieval_of(run: Run) -> Retrieval | None:
    """The settings of retrieval, if it is enabled."""
    settings: Retrieval | None = getattr(run.model, "retrieval", None)
    return settings if settings and settings.enabled else None


def with_retrieval(data: Data, run: Run, training_text: Callable[[], Iterable[Document]], progress: Progress | None) -> Data:
    """The data with retrieved passages; or unchanged, if retrieval is disabled."""
    settings, longest = retrieval_of(run), run.data.sequence_length or 0
    if settings is None:
        return data
    if longest <= settings.chunk_size:
        raise ShoalError(
            f"model.retrieval.chunk_size: only later chunks attend to the passages of a chunk, and a sequence of {longest} tokens "
            f"(data.sequence_length) has one chunk of {settings.chunk_size}: set it lower"
        )
    assert data.info.tokenizer is not None
    finder = finder_of(settings, _index(settings, run, training_text, progress), data.info.tokenizer)
    train = RetrievalStream(data.train, finder) if isinstance(data.train, SampleStream) else RetrievalSamples(data.train, finder, longest)
    held_out = RetrievalSamples(data.eval, finder, longest) if data.eval is not None else None
    return Data(train, held_out, data.info._replace(finder=finder))


def finder_of(settings: Retrieval, index: Index, tokenizer: Tokenizer) -> PassageFinder:
    sizes = PassageSettings(settings.top_k, settings.chunk_size, settings.passage_tokens)
    return PassageFinder(index.folder, sizes, tokenizer, index)


def open_finder(run: Run, folder: Path, tokenizer: Tokenizer) -> PassageFinder | None:
    """The finder of an earlier run, whose index is in this folder; None if it does not retrieve. Raises ShoalError."""
    settings = retrieval_of(run)
    return finder_of(settings, open_index(folder), tokenizer) if settings else None


def _index(settings: Retrieval, run: Run, training_text: Callable[[], Iterable[Document]], progress: Progress | None) -> Index:
    """The index of the settings; or one built from the passages of the settings, which the next run with the same passages opens again."""
    if settings.index is not None:
        return open_index(Path(settings.index).expanduser())
    encoder = open_encoder(settings.encoder)
    documents = training_text() if settings.passages is None else _documents(Path(settings.passages).expanduser())
    passages = cut_passages(documents, settings.passage_words, settings.max_passages)
    if settings.passages is None and len(passages.origins) == 1:
        raise ShoalError(
            "model.retrieval: the text to learn from is one document, and no chunk reads its own: give each text a file or a line of its "
            "own, or name other texts in model.retrieval.passages"
        )
    folder = Path(run.output_dir).expanduser() / "retrieval" / digest_of(passages, encoder.name)[:16]
    if folder.exists():
        try:
            return open_index(folder)
        except ShoalError:  # a damaged index is built again from the same passages
            shutil.rmtree(folder, ignore_errors=True)

    def report(done: int, total: int) -> None:
        if progress:
            progress(f"passages for {settings.encoder}", done, total)

    return build_index(passages, encoder, folder, {}, report)


def _documents(path: Path) -> Iterable[Document]:
    """The lines of a file, or the files of a folder."""
    files = TextFiles(find_files(path), Fields(), "line" if path.is_file() else "whole")
    return (document for document, _ in files.read())


def index_files(paths: list[str], folder: Path, encoder: str, words: int, progress: IndexProgress | None) -> Index:
    """Build an index of files and folders of texts. Raises ShoalError."""
    if folder.exists():
        raise ShoalError(f"{folder} exists already: choose another folder, or remove it")
    files = [file for path in paths for file in find_files(Path(path).expanduser())]
    documents = (document for document, _ in TextFiles(files, Fields(), "whole").read())
    passages = cut_passages(documents, words, 2**31 - 1)
    about = {"sources": [{"name": file.name, "bytes": file.stat().st_size} for file in files], "passage_words": words}
    return build_index(passages, open_encoder(cast(Any, encoder)), folder, about, progress)
