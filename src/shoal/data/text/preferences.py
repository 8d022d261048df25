"""Pairs of a chosen and a rejected answer, answers with a label, and prompts: read from files, checked, and made into batches."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from shoal.config.fields import EMPTY
from shoal.config.rules.chat_rows import list_column
from shoal.config.schema.data import Preferences
from shoal.data.interfaces import Batch, Indices, SelectableSamples, as_index
from shoal.data.text.context_text import Contexts, DocumentSamples, Origins, contexts_of
from shoal.data.text.conversations import dialogue, messages_of, tools_of
from shoal.data.text.documents import Conversation, Document, origin_of
from shoal.data.text.encoding import Encoding, Sample, Tokens, collate, encode, join, to_sample
from shoal.data.text.files import by_split, decode, find_files, is_rows, open_file, read_rows
from shoal.data.text.rows import CONTEXT
from shoal.errors import ShoalError

_TURN = "\n\nAssistant:"
"""What begins an answer in dialogues that are plain text."""
_PROMPT, _COMPLETION, _LABEL = "prompt", "completion", "label"


class Pair(NamedTuple):
    """Two answers to a prompt, the first of them preferred."""

    prompt: str
    chosen: str
    rejected: str
    context: str = ""
    """The context of the prompt and of both answers."""
    chats: tuple[Conversation, Conversation] | None = None
    """Where the texts are conversations: the prompt's messages with those of either answer."""

    @property
    def origin(self) -> str:
        """The origin of both answers, so that neither retrieves passages from the chosen one."""
        return origin_of(self.prompt + self.chosen)

    @property
    def conversation(self) -> Conversation | None:
        return self.chats[0] if self.chats is not None else None

    def document(self, rejected: bool = False) -> Document:
        """An answer after the prompt, to learn to write."""
        return _document(self.prompt, self.rejected if rejected else self.chosen, self.chats and self.chats[rejected])._replace(
            origin=self.origin, context=self.context
        )


class LabelledAnswer(NamedTuple):
    """An answer to a prompt, good or bad."""

    prompt: str
    answer: str
    desirable: bool
    context: str = ""
    conversation: Conversation | None = None
    """Where the texts are a conversation: the messages of prompt and answer."""

    @property
    def origin(self) -> str:
        return origin_of(self.prompt + self.answer)

    def document(self) -> Document:
        """The answer after the prompt, to learn to write."""
        return _document(self.prompt, self.answer, self.conversation)._replace(origin=self.origin, context=self.context)


def _document(prompt: str, answer: str, chat: Conversation | None) -> Document:
    return Document(answer, prompt) if chat is None else chat.document()


class PreferencePairs(DocumentSamples, SelectableSamples):
    """Pairs as samples. A batch has `input_ids`, `labels` and `attention_mask` of both answers, named chosen_… and rejected_…;
    the prompt is in the inputs and not in the labels. Where any pair has a context, both have `context_ids`, too."""

    sides = ("chosen_", "rejected_")

    def __init__(self, pairs: Sequence[Pair], encoding: Encoding) -> None:
        self.pairs = list(pairs)
        self._encoding = encoding._replace(batching="padded" if encoding.batching == "padded" else "dynamic")
        both = [_answer_tokens([pair.document(rejected) for pair in pairs], encoding) for rejected in (False, True)]
        length = encoding.sequence_length
        self._chosen, self._rejected = ([_answer_sample(tokens, length) for tokens in answers] for answers in both)
        self._cut_N2 = _are_cut(both[0], length) | _are_cut(both[1], length)
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
        some, numbers = copy.copy(self), indices.tolist()
        some.pairs, some._chosen, some._rejected = ([kept[one] for one in numbers] for kept in (self.pairs, self._chosen, self._rejected))
        some._contexts = self._contexts and self._contexts.select(indices)
        some.origins, some._cut_N2 = self.origins.select(indices), self._cut_N2[indices]
        return some

    @property
    def cut_note(self) -> str:
        return _cut_note(self._cut_N2)

    def unpaired(self) -> LabelledAnswers:
        """The chosen answers as good ones, and the rejected answers as bad ones."""
        both = [(pair, pair.chats or (None, None)) for pair in self.pairs]
        answers = [LabelledAnswer(pair.prompt, pair.chosen, True, pair.context, chats[0]) for pair, chats in both]
        answers += [LabelledAnswer(pair.prompt, pair.rejected, False, pair.context, chats[1]) for pair, chats in both]
        return LabelledAnswers(answers, self._encoding)


class LabelledAnswers(SelectableSamples):
    """Answers with a label as samples. Beside prompt and answer and the label `desirable`, each row of a batch has its prompt with the
    answer of the row before, `kl_…`: from these KTO estimates how far a model has moved."""

    def __init__(self, answers: Sequence[LabelledAnswer], encoding: Encoding) -> None:
        self.answers = list(answers)
        self._encoding = encoding._replace(batching="padded" if encoding.batching == "padded" else "dynamic")
        self._tokens = _answer_tokens([one.document() for one in answers], encoding)
        self._contexts = _contexts([one.context for one in answers], encoding)
        self._desirable_N = torch.tensor([one.desirable for one in answers], dtype=torch.bool)

    @property
    def desirable(self) -> int:
        """The number of good answers."""
        return int(self._desirable_N.sum())

    @property
    def cut_note(self) -> str:
        return _cut_note(_are_cut(self._tokens, self._encoding.sequence_length))

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
        some, numbers = copy.copy(self), indices.tolist()
        some.answers, some._tokens = [self.answers[one] for one in numbers], [self._tokens[one] for one in numbers]
        some._contexts, some._desirable_N = self._contexts and self._contexts.select(indices), self._desirable_N[indices]
        return some


def answer_samples(documents: Sequence[Document], encoding: Encoding) -> list[Sample]:
    """Prompt and answer. Of a long prompt the end is kept; of a long answer the beginning."""
    return [_answer_sample(tokens, encoding.sequence_length) for tokens in _answer_tokens(documents, encoding)]


def _answer_tokens(documents: Sequence[Document], encoding: Encoding) -> list[Tokens]:
    """The tokens of prompts and answers. Holds: the last token is the end of the answer, whatever a template writes after it."""
    end = () if encoding.tokenizer.eos_id is None else (encoding.tokenizer.eos_id,)
    encoded = [join(texts) for texts in encode(documents, encoding._replace(learn_from="completion"), [end] * len(documents))]
    return [tokens.slice(0, len(tokens) - int(tokens.learned[::-1].argmax())) for tokens in encoded]


def _prompt_length(tokens: Tokens) -> int:
    return int(tokens.learned.argmax()) if tokens.learned.any() else len(tokens)


def _answer_sample(tokens: Tokens, length: int) -> Sample:
    start = _start(tokens, length)
    return to_sample(tokens.slice(start, start + length + 1))


def _start(tokens: Tokens, length: int) -> int:
    """How many tokens a prompt loses at its beginning."""
    return max(0, min(len(tokens) - length - 1, _prompt_length(tokens) - 1))


def _are_cut(rows: Sequence[Tokens], length: int) -> torch.Tensor:
    """By row, whether the prompt loses its beginning, and whether the answer loses its end."""
    starts = [(_start(tokens, length), len(tokens)) for tokens in rows]
    return torch.tensor([(start > 0, whole - start > length + 1) for start, whole in starts], dtype=torch.bool).reshape(-1, 2)


def _cut_note(cut_N2: torch.Tensor) -> str:
    """For the user; empty: all rows are whole."""
    prompts, answers = cut_N2.sum(0).tolist()
    parts = ((prompts, "prompts lose their beginning"), (answers, "answers lose their end"))
    lost = " and ".join(f"{count:,} {what}" for count, what in parts if count)
    return f"; {lost}, since prompt and answer are longer than data.sequence_length" if lost else ""


def _with_answer_of(one: Tokens, other: Tokens) -> Tokens:
    """The prompt of one text with the answer of another."""
    return join([one.slice(0, _prompt_length(one)), other.slice(_prompt_length(other), len(other))])


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
    def are_chats(self) -> bool:
        return any(row.conversation is not None for row in self.train)

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
    if any(isinstance(row.get(name), list) for name in (source.chosen_field, source.rejected_field)):
        return _chat_pair(row, where, source)
    chosen, rejected = (_written(row, name, where) for name in (source.chosen_field, source.rejected_field))
    prompt = _prompt_of(row, where)
    return _split(chosen, rejected) if prompt is None else Pair(prompt, _answer(chosen, prompt), _answer(rejected, prompt))


def _chat_pair(row: dict[str, object], where: str, source: Preferences) -> Pair:
    """Two answers as messages, after a prompt of their own or after the messages that both begin with."""
    chosen, rejected = (messages_of(row.get(name), name, where) for name in (source.chosen_field, source.rejected_field))
    shared = sum(takewhile(bool, (one == other for one, other in zip(chosen, rejected, strict=False))))
    prompt = _messages_before(row, chosen[: min(shared, len(chosen) - 1, len(rejected) - 1)], where)
    answers = [_after(prompt, messages) for messages in (chosen, rejected)]
    chats = [Conversation([*prompt, *answer], tools_of(row, where), len(prompt), where) for answer in answers]
    return Pair(dialogue(prompt, continues=True), dialogue(answers[0]), dialogue(answers[1]), chats=(chats[0], chats[1]))


def _messages_before(row: dict[str, object], shared: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """The messages of a prompt: its own field, or those that are shared. Raises ShoalError where there are none."""
    given = row.get(_PROMPT)
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    prompt = messages_of(given, _PROMPT, where) if given is not None else shared
    if not prompt:
        raise ShoalError(f"{where}: an answer needs the messages before it: give them in `{_PROMPT}`, or begin both answers with them")
    return prompt


def _after(prompt: list[dict[str, Any]], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages after the prompt, which they may repeat."""
    return messages[len(prompt) :] if messages[: len(prompt)] == prompt and len(messages) > len(prompt) else messages


def _labelled(row: dict[str, object], where: str) -> LabelledAnswer:
    label = row[_LABEL]
    if label not in (True, False):
        raise ShoalError(f"{where}: `{_LABEL}` must be true for a good answer or false for a bad one, and it is {label!r}")
    if isinstance(row.get(_COMPLETION), list):
        answer = messages_of(row[_COMPLETION], _COMPLETION, where)
        before = _messages_before(row, answer[:-1], where)
        answer = _after(before, answer)
        chat = Conversation([*before, *answer], tools_of(row, where), len(before), where)
        return LabelledAnswer(dialogue(before, continues=True), dialogue(answer), bool(label), conversation=chat)
    text, prompt = _written(row, _COMPLETION, where), _prompt_of(row, where)
    whole = _split(text, text)
    prompt, text = (whole.prompt, whole.chosen) if prompt is None else (prompt, _answer(text, prompt))
    return LabelledAnswer(prompt, text, bool(label))


def _prompt_of(row: dict[str, object], where: str) -> str | None:
    """The field `prompt`; None where the answer holds the prompt, too."""
    prompt = row.get(_PROMPT)
    if isinstance(prompt, list):
        raise ShoalError(f"{where}: `{_PROMPT}` is a list of messages, so the answers must be lists of messages, too")
    return prompt if isinstance(prompt, str) else None


def _answer(text: str, prompt: str) -> str:
    """The text after the prompt, which the answer may repeat."""
    return text.removeprefix(prompt)


def _written(row: dict[str, object], name: str, where: str) -> str:
    """A field that is a text. Raises ShoalError."""
    value = row.get(name)
    if not isinstance(value, str) or not value:
        found = "there is none" if name not in row else "it is empty" if value in ("", []) else f"it is {type(value).__name__}"
        raise ShoalError(
            f"{where}: `{name}` must be a text, and {found}: the fields are {', '.join(f'`{key}`' for key in row)}; preferences have "
            "`prompt`, `chosen` and `rejected`, or `prompt`, `completion` and `label`"
        )
    return value


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
    conversation: Conversation | None = None
    """Where the prompt is a conversation: its messages."""


def read_prompts(path: str | Path, reads_context: bool = False) -> list[Prompt]:
    """Prompts: lines of text, or JSON lines with a field `prompt`, or with `messages`, whose last answer is left out; optionally `answer`
    and, with `reads_context`, `context`."""
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


def _asked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without the answers at their end."""
    count = len(messages)
    while count > 1 and messages[count - 1]["role"] == "assistant":
        count -= 1
    return messages[:count]


def _prompt(row: dict[str, object], where: str, reads_context: bool) -> Prompt:
    name = _PROMPT if _PROMPT in row else list_column(row) or _PROMPT
    prompt, answer, chat = row.get(name), row.get("answer"), None
    if isinstance(prompt, list):
        messages = _asked(messages_of(prompt, name, where))
        chat, prompt = Conversation(messages, tools_of(row, where), len(messages), where), dialogue(messages, continues=True)
    if not isinstance(prompt, str) or not prompt:
        raise ShoalError(f"{where}: `{_PROMPT}` must be a text: the fields are {', '.join(f'`{key}`' for key in row)}")
    columns = {"expected" if column == "answer" else column: value for column, value in row.items() if column != name}
    context = _context(row, CONTEXT if reads_context else None, where)
    return Prompt(prompt, None if answer is None else str(answer), context, columns, where, chat)
