"""Pairs of a chosen and a rejected answer, answers with a label, and prompts: read from files, checked, and made into batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from shoal.config.fields import EMPTY
from shoal.config.schema.data import Preferences
from shoal.data.interfaces import Batch, Indices, SelectableSamples, as_index
from shoal.data.text.context_text import Contexts, DocumentSamples, Origins, contexts_of
from shoal.data.text.documents import Document, origin_of
from shoal.data.text.encoding import Encoding, Sample, Tokens, collate, encode, join, to_sample
from shoal.data.text.files import by_split, decode, find_files, is_rows, open_file, read_rows
from shoal.data.text.rows import CONTEXT
from shoal.errors import ShoalError

_TURN = "\n\nAssistant:"
_ROLES = {"system": "", "user": "\n\nHuman: ", "assistant": f"{_TURN} "}
_PROMPT, _COMPLETION, _LABEL = "prompt", "completion", "label"


class Pair(NamedTuple):
    """Two answers to a prompt, the first of them preferred."""

    prompt: str
    chosen: str
    rejected: str
    context: str = ""
    """The context of the prompt and of both answers."""

    @property
    def origin(self) -> str:
        """The origin of both answers, so that neither retrieves passages from the chosen one."""
        return origin_of(self.prompt + self.chosen)

    def document(self) -> Document:
        """The chosen answer, to learn to write."""
        return Document(self.chosen, self.prompt, origin=self.origin, context=self.context)


class LabelledAnswer(NamedTuple):
    """An answer to a prompt, good or bad."""

    prompt: str
    answer: str
    desirable: bool
    context: str = ""

    @property
    def origin(self) -> str:
        return origin_of(self.prompt + self.answer)

    def document(self) -> Document:
        """The answer, to learn to write."""
        return Document(self.answer, self.prompt, origin=self.origin, context=self.context)


class PreferencePairs(DocumentSamples, SelectableSamples):
    """Pairs as samples. A batch has `input_ids`, `labels` and `attention_mask` of both answers, named chosen_… and rejected_…;
    the prompt is in the inputs and not in the labels. Where any pair has a context, both have `context_ids`, too."""

    sides = ("chosen_", "rejected_")

    def __init__(self, pairs: Sequence[Pair], encoding: Encoding) -> None:
        self.pairs = list(pairs)
        self._encoding = encoding._replace(batching="padded" if encoding.batching == "padded" else "dynamic")
        self._chosen = answer_samples([(pair.prompt, pair.chosen) for pair in pairs], encoding)
        self._rejected = answer_samples([(pair.prompt, pair.rejected) for pair in pairs], encoding)
        self._contexts = _contexts([pair.context for pair in pairs], encoding)
        numbers = torch.arange(len(self.pairs))
        self.origins = Origins([pair.origin for pair in self.pairs], torch.stack([numbers, numbers], 1))

    def __len__(self) -> int:
        return len(self.pairs)

    def batch(self, indices: Indices) -> Batch:
        index = as_index(indices)
        batch: Batch = {}
        for side, samples in zip(self.sides, (self._chosen, self._rejected), strict=True):
            columns = collate([samples[number] for number in index.tolist()], self._encoding)
            if self._contexts is not None:
                columns["context_ids"] = self._contexts.batch(index)
            batch |= {f"{side}{name}": tensor for name, tensor in columns.items()}
        return batch

    def select(self, indices: torch.Tensor) -> Self:
        return type(self)([self.pairs[number] for number in indices.tolist()], self._encoding)

    def unpaired(self) -> LabelledAnswers:
        """The chosen answers as good ones, and the rejected answers as bad ones."""
        answers = [LabelledAnswer(pair.prompt, pair.chosen, True, pair.context) for pair in self.pairs]
        answers += [LabelledAnswer(pair.prompt, pair.rejected, False, pair.context) for pair in self.pairs]
        return LabelledAnswers(answers, self._encoding)


class LabelledAnswers(SelectableSamples):
    """Answers with a label as samples. Beside prompt and answer and the label `desirable`, each row of a batch has its prompt with the
    answer of the row before, `kl_…`: from these KTO estimates how far a model has moved."""

    def __init__(self, answers: Sequence[LabelledAnswer], encoding: Encoding) -> None:
        self.answers = list(answers)
        self._encoding = encoding._replace(batching="padded" if encoding.batching == "padded" else "dynamic")
        self._tokens = _answer_tokens([(one.prompt, one.answer) for one in answers], encoding)
        self._contexts = _contexts([one.context for one in answers], encoding)
        self._desirable_N = torch.tensor([one.desirable for one in answers], dtype=torch.bool)

    @property
    def desirable(self) -> int:
        """The number of good answers."""
        return int(self._desirable_N.sum())

    def __len__(self) -> int:
        return len(self.answers)

    def batch(self, indices: Indices) -> Batch:
        index = as_index(indices)
        own = [self._tokens[number] for number in index.tolist()]
        others = [_with_answer_of(one, before) for one, before in zip(own, own[-1:] + own[:-1], strict=True)]
        batch: Batch = {"desirable": self._desirable_N[index]}
        for side, texts in (("", own), ("kl_", others)):
            columns = collate([_answer_sample(tokens, self._encoding.sequence_length) for tokens in texts], self._encoding)
            if self._contexts is not None:
                columns["context_ids"] = self._contexts.batch(index)
            batch |= {f"{side}{name}": tensor for name, tensor in columns.items()}
        return batch

    def select(self, indices: torch.Tensor) -> Self:
        return type(self)([self.answers[number] for number in indices.tolist()], self._encoding)


def answer_samples(texts: Sequence[tuple[str, str]], encoding: Encoding) -> list[Sample]:
    """Prompt and answer. Of a long prompt the end is kept; of a long answer the beginning."""
    return [_answer_sample(tokens, encoding.sequence_length) for tokens in _answer_tokens(texts, encoding)]


def _answer_tokens(texts: Sequence[tuple[str, str]], encoding: Encoding) -> list[Tokens]:
    end = () if encoding.tokenizer.eos_id is None else (encoding.tokenizer.eos_id,)
    return [join(some) for some in encode([Document(answer, prompt=prompt) for prompt, answer in texts], encoding, [end] * len(texts))]


def _answer_sample(tokens: Tokens, length: int) -> Sample:
    prompt = int((~tokens.learned).sum())
    start = max(0, min(len(tokens) - length - 1, prompt - 1))
    return to_sample(tokens.slice(start, start + length + 1))


def _with_answer_of(one: Tokens, other: Tokens) -> Tokens:
    """The prompt of one text with the answer of another."""
    return join([one.slice(0, int((~one.learned).sum())), other.slice(int((~other.learned).sum()), len(other))])


def _contexts(texts: Sequence[str], encoding: Encoding) -> Contexts | None:
    """The contexts of samples, some of which may be empty; None: all are empty."""
    documents = [Document("", context=text) for text in texts]
    samples = [to_sample(one) for tokens in encode(documents, encoding, [()] * len(documents)) for one in tokens] if any(texts) else []
    return contexts_of(samples, encoding.sequence_length) if samples else None


class PreferenceRows(NamedTuple):
    """What the files of a source hold: either pairs, or answers with a label."""

    train: list[Pair] | list[LabelledAnswer]
    held_out: list[Pair] | list[LabelledAnswer]
    """The source's own held-out rows."""
    left_out: int
    """Pairs that are left out, since both answers are equal."""

    @property
    def are_pairs(self) -> bool:
        return isinstance(self.train[0], Pair)

    def documents(self, rows: list[Pair] | list[LabelledAnswer]) -> list[Document]:
        """The answers that a language model learns to write."""
        return [row.document() for row in rows if isinstance(row, Pair) or row.desirable]


def read_preferences(source: Preferences, reads_context: bool = False) -> PreferenceRows:
    """The rows of a source. `reads_context`: whether to read the contexts. Raises ShoalError."""
    context = (source.context_field or CONTEXT) if reads_context else None
    path = Path(source.path).expanduser()
    train, held_out = by_split(path, find_files(path))
    rows = [[row for file in files for row in _read(file, source, context)] for files in (train, held_out)]
    if not rows[0]:
        raise ShoalError(f"data.source.path: there are no pairs in {path}")
    labelled = [[row for row in part if isinstance(row, LabelledAnswer)] for part in rows]
    pairs = [[row for row in part if isinstance(row, Pair)] for part in rows]
    if any(labelled) and any(pairs):
        raise ShoalError(
            f"data.source.path: {path} holds pairs of answers and single answers with a label: put them into files of their own"
        )
    if any(labelled):
        return PreferenceRows(labelled[0], labelled[1], 0)
    kept = [[pair for pair in part if pair.chosen != pair.rejected] for part in pairs]
    return PreferenceRows(kept[0], kept[1], sum(map(len, pairs)) - sum(map(len, kept)))


def _read(file: Path, source: Preferences, context: str | None) -> list[Pair | LabelledAnswer]:
    with open_file(file) as content:
        rows = [(row, where) for row, where, _, _ in read_rows(file, content)]
    return [_row(row, where, source)._replace(context=_context(row, context, where)) for row, where in rows]


def _row(row: dict[str, object], where: str, source: Preferences) -> Pair | LabelledAnswer:
    labelled = _LABEL in row and _COMPLETION in row and source.chosen_field not in row
    return _labelled(row, where) if labelled else _pair(row, where, source)


def _context(row: dict[str, object], name: str | None, where: str) -> str:
    """The context of a row, in the field of this name; empty if there is none. Raises ShoalError."""
    value = None if name is None else row.get(name)
    if value is not None and not isinstance(value, str):
        raise ShoalError(f"{where}: `{name}` must be a text, and it is {type(value).__name__}")
    return value or ""


def _pair(row: dict[str, object], where: str, source: Preferences) -> Pair:
    chosen, rejected = (_written(row, name, where) for name in (source.chosen_field, source.rejected_field))
    prompt = _prompt_of(row, where)
    return _split(chosen, rejected) if prompt is None else Pair(prompt, _answer(chosen, prompt), _answer(rejected, prompt))


def _labelled(row: dict[str, object], where: str) -> LabelledAnswer:
    label, text, prompt = row[_LABEL], _written(row, _COMPLETION, where), _prompt_of(row, where)
    if label not in (True, False):
        raise ShoalError(f"{where}: `{_LABEL}` must be true for a good answer or false for a bad one, and it is {label!r}")
    whole = _split(text, text)
    prompt, answer = (whole.prompt, whole.chosen) if prompt is None else (prompt, _answer(text, prompt))
    return LabelledAnswer(prompt, answer, bool(label))


def _prompt_of(row: dict[str, object], where: str) -> str | None:
    """The field `prompt`; None where the answer holds the prompt, too."""
    prompt = row.get(_PROMPT)
    if isinstance(prompt, list):
        return _dialogue(prompt, _PROMPT, where) + _TURN
    return prompt if isinstance(prompt, str) else None


def _answer(text: str, prompt: str) -> str:
    """The text after the prompt, which the answer may repeat; of a message only its content."""
    return text.removeprefix(prompt) if text.startswith(prompt) or not prompt.endswith(_TURN) else text.removeprefix(_TURN)


def _written(row: dict[str, object], name: str, where: str) -> str:
    """A field that is a text, or a list of messages. Raises ShoalError."""
    value = row.get(name)
    if isinstance(value, list) and value:
        return _dialogue(value, name, where)
    if not isinstance(value, str) or not value:
        found = "there is none" if name not in row else "it is empty" if value in ("", []) else f"it is {type(value).__name__}"
        raise ShoalError(f"{where}: `{name}` must be a text, and {found}: the fields are {', '.join(f'`{key}`' for key in row)}")
    return value


def _dialogue(messages: Sequence[object], name: str, where: str) -> str:
    """Messages with a role and a content as a dialogue in plain text, turn by turn."""
    turns = []
    for message in messages:
        role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
        if role not in _ROLES or not isinstance(content, str):
            raise ShoalError(f"{where}: each message of `{name}` must have a `role` ({', '.join(_ROLES)}) and a `content` that is a text")
        turns.append(f"{_ROLES[role]}{content}")
    return "".join(turns)


def _split(chosen: str, rejected: str) -> Pair:
    """Split two dialogues that differ in their last turn: the prompt is their common prefix, up to the beginning of an answer."""
    shared = next(
        (at for at, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), min(len(chosen), len(rejected))
    )
    turn = chosen.rfind(_TURN, 0, shared)
    at = turn + len(_TURN) if turn >= 0 else 0
    return Pair(chosen[:at], chosen[at:], rejected[at:])


class Prompt(NamedTuple):
    """A prompt, and the correct answer if the file has one."""

    text: str
    answer: str | None = None
    context: str = ""
    """A text for cross-attention."""
    columns: Mapping[str, Any] = EMPTY
    """The other fields of its row, for rewards; `answer` is called `expected`."""
    where: str = ""
    """Its file and line."""


def read_prompts(path: str | Path, reads_context: bool = False) -> list[Prompt]:
    """Prompts: lines of text, or JSON lines with a field `prompt`, optionally `answer` and, with `reads_context`, `context`."""
    prompts = [prompt for file in find_files(Path(path).expanduser()) for prompt in _prompts(file, reads_context)]
    if not prompts:
        raise ShoalError(f"there are no prompts in {path}")
    return prompts


def _prompts(file: Path, reads_context: bool) -> list[Prompt]:
    with open_file(file) as content:
        if not is_rows(file):
            lines = enumerate(decode(content.read(), str(file)).splitlines(), 1)
            return [Prompt(line, where=f"{file}:{number}") for number, line in lines if line.strip()]
        return [_prompt(row, where, reads_context) for row, where, _, _ in read_rows(file, content)]


def _prompt(row: dict[str, object], where: str, reads_context: bool) -> Prompt:
    prompt, answer = row.get(_PROMPT), row.get("answer")
    if isinstance(prompt, list):
        prompt = _dialogue(prompt, _PROMPT, where) + _TURN
    if not isinstance(prompt, str) or not prompt:
        raise ShoalError(f"{where}: `{_PROMPT}` must be a text: the fields are {', '.join(f'`{key}`' for key in row)}")
    columns = {"expected" if name == "answer" else name: value for name, value in row.items() if name != _PROMPT}
    return Prompt(prompt, None if answer is None else str(answer), _context(row, CONTEXT if reads_context else None, where), columns, where)
