"""Text in memory: parts, held-out documents, samples, mixture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shoal.config import Run
from shoal.config.schema.data import Preferences
from shoal.data.hub.dataset import DataRequest
from shoal.data.interfaces import Samples
from shoal.data.loaded_data import Data
from shoal.data.splits import counts, share_out, some_of, split_and_limit
from shoal.data.text.documents import Document, InMemoryDocuments, TextPart, split
from shoal.data.text.mixture import ChainedText, MixedText, probabilities
from shoal.data.text.preferences import PreferencePairs, read_preferences
from shoal.data.text.run_tokenizer import contents, find_encoding, joined_name, noun, text_info
from shoal.data.text.samples import TextSamples, expect_one_sequence, joined, padding_note, text_samples
from shoal.data.text.sources import expect_reader, reads_context
from shoal.errors import ShoalError


class LoadedText(NamedTuple):
    """Data, and a function that reads its training documents from the beginning."""

    data: Data
    training_text: Callable[[], Iterable[Document]]


def load_text(parts: Sequence[TextPart], run: Run, cache_dir: Path | None, token: str | None) -> LoadedText:
    name = joined_name([part.name for part in parts])
    documents = [_divide(part, run.seed) for part in parts]

    def texts() -> Iterable[str]:
        # An alphabet must contain the characters of the held-out text; a vocabulary must not be trained on it.
        both = run.data.tokenizer == "characters"
        return (text for train, held_out in documents for text in contents(train + held_out if both else train))

    encoding = find_encoding(run, texts, cache_dir, token)
    train = [text_samples(part, encoding) for part, _ in documents]
    held_out = joined([text_samples(part, encoding) for _, part in documents])
    expect_one_sequence(name, joined(train), encoding)
    train_count, eval_count = counts(run.data, sum(map(len, train)), len(held_out))
    kept = _limit(train, train_count, run.seed)
    samples = _mix(kept, parts, run)
    info = text_info(f"{name}: {noun(encoding, len(samples))}{padding_note(kept)}", encoding)
    expect_contexts(run, (document for train, _ in documents for document in train))
    data = Data(samples, some_of(held_out, eval_count, run.seed) if eval_count else None, info)
    return LoadedText(data, lambda: (document for train, _ in documents for document in train))


def expect_contexts(run: Run, documents: Iterable[Document]) -> None:
    """Cross-attention needs something to attend to. Raises ShoalError if no document has a context, and nothing is retrieved."""
    retrieval = getattr(run.model, "retrieval", None)
    if reads_context(run) and not (retrieval and retrieval.enabled) and not any(document.context for document in documents):
        raise ShoalError(
            "model.cross_attention.enabled: there is nothing to attend to: the texts have no `context` field (data.source.context_field), "
            "and model.retrieval is off"
        )


def _divide(part: TextPart, seed: int) -> tuple[list[Document], list[Document]]:
    documents = [document for document, _ in part.train.read()]
    if not documents:
        raise ShoalError(f"{part.name} is empty: there is no text in it")
    if part.held_out is not None:
        return documents, [document for document, _ in part.held_out.read()]
    return split(documents, seed)


def _limit(parts: Sequence[TextSamples], count: int, seed: int) -> list[TextSamples]:
    """Keep `count` samples of all parts together, of each part in proportion to its size."""
    sizes = np.asarray([len(part) for part in parts])
    if count >= sizes.sum():
        return list(parts)
    return [some_of(part, share, seed) for part, share in zip(parts, share_out(count, sizes / sizes.sum()), strict=True)]


def _mix(samples: Sequence[TextSamples], parts: Sequence[TextPart], run: Run) -> Samples:
    if len(parts) == 1:
        return samples[0]
    if not run.data.mixing.enabled:
        return ChainedText(samples)
    return MixedText(samples, probabilities(parts, [len(part) for part in samples], run.data.mixing.temperature))


def load_preferences(source: Preferences, run: Run, request: DataRequest) -> LoadedText | list[TextPart]:
    """Pairs of answers for a task that compares; for a language model, the chosen answers, each after its prompt."""
    expect_reader(source, run)
    pairs, held_pairs, left_out = read_preferences(source, reads_context(run))
    if run.chosen_task.needs == "tokens":
        chosen, held = (InMemoryDocuments([pair.document() for pair in some]) for some in (pairs, held_pairs))
        return [TextPart(f"{Path(source.path).name}: chosen answers", chosen, held if held_pairs else None)]
    encoding = find_encoding(run, lambda: [text for pair in pairs for text in pair if text], request.folder, request.token)
    train, held_out = PreferencePairs(pairs, encoding), PreferencePairs(held_pairs, encoding) if held_pairs else None
    train, held_out = split_and_limit(run.data, run.seed, train, held_out)
    note = f" ({left_out} rows that prefer nothing left out)" if left_out else ""
    described = f"{Path(source.path).name}: {len(train):,} pairs of answers{note}"
    info = text_info(described, encoding)
    expect_contexts(run, (pair.document() for pair in train.pairs))
    return LoadedText(Data(train, held_out, info), lambda: (pair.document() for pair in train.pairs))
