"""Text in memory: parts, held-out documents, samples, mixture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.config import Run
from shoal.config.schema.data import Preferences
from shoal.data.hub.dataset import DataRequest
from shoal.data.interfaces import Samples
from shoal.data.loaded_data import Data
from shoal.data.splits import counts, share_out, some_of, split_and_limit
from shoal.data.text.documents import Document, InMemoryDocuments, TextPart, split
from shoal.data.text.mixture import ChainedText, MixedText, probabilities
from shoal.data.text.preferences import LabelledAnswers, PreferencePairs, read_preferences
from shoal.data.text.run_tokenizer import CONVERSATIONS, chat_note, contents, find_encoding, joined_name, noun, text_info
from shoal.data.text.samples import TextSamples, Truncated, expect_one_sequence, joined, padding_note, text_samples
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

    chats = any(document.conversation is not None for train, _ in documents for document in train)
    encoding = find_encoding(run, texts, cache_dir, token, chats=chats)
    truncated = Truncated()
    train = [text_samples(part, encoding, truncated) for part, _ in documents]
    held_out = joined([text_samples(part, encoding) for _, part in documents])
    expect_one_sequence(name, joined(train), encoding, truncated)
    train_count, eval_count = counts(run.data, sum(map(len, train)), len(held_out))
    kept = _limit(train, train_count, run.seed)
    samples = _mix(kept, parts, run)
    note = chat_note([document for train, _ in documents for document in train], run.data.learn_from)
    described = f"{name}: {note}{noun(encoding, len(samples))}{padding_note(kept)}{truncated.note()}"
    info = text_info(described, encoding)
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
    """Pairs of answers, or answers with a label, for a task that learns from them; for a language model, the chosen or good answers, each
    after its prompt."""
    expect_reader(source, run)
    rows, task, name = read_preferences(source, reads_context(run)), run.chosen_task, Path(source.path).name
    if task.needs == "tokens":
        chosen, held = (InMemoryDocuments(rows.documents(some)) for some in (rows.train, rows.held_out))
        return [TextPart(f"{name}: chosen answers", chosen, held if rows.held_out else None)]
    if not rows.are_pairs and not task.unpaired:
        raise ShoalError(
            f"data.source.path: {source.path} holds single answers with a label, and the task {task.kind} compares pairs: set task to "
            "{kind: dpo, loss: kto}"
        )
    encoding = find_encoding(
        run,
        lambda: [text for row in rows.train for text in row if isinstance(text, str) and text],
        request.folder,
        request.token,
        chats=rows.are_chats,
    )
    samples_of: Any = PreferencePairs if rows.are_pairs else LabelledAnswers
    train, held_out = samples_of(rows.train, encoding), samples_of(rows.held_out, encoding) if rows.held_out else None
    train, held_out = split_and_limit(run.data, run.seed, train, held_out)
    if task.unpaired and rows.are_pairs:  # not before, since both answers to a prompt belong to the same part
        train, held_out = train.unpaired(), held_out.unpaired() if held_out else None
    note = f" ({rows.left_out} rows that prefer nothing left out)" if rows.left_out else ""
    described = f"{name}: {f'{CONVERSATIONS}: ' if rows.are_chats else ''}{_answers(train)}{note}{train.cut_note}"
    info = text_info(described, encoding)
    expect_contexts(run, _documents(train))
    return LoadedText(Data(train, held_out, info), lambda: _documents(train))


def _answers(samples: PreferencePairs | LabelledAnswers) -> str:
    """What the samples are, for people."""
    if isinstance(samples, PreferencePairs):
        return f"{len(samples):,} pairs of answers"
    return f"{len(samples):,} answers, {samples.desirable:,} of them good"


def _documents(samples: PreferencePairs | LabelledAnswers) -> Iterable[Document]:
    return (row.document() for row in (samples.pairs if isinstance(samples, PreferencePairs) else samples.answers))
