"""The tokenizer and the encoding of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path

from shoal.config import Run
from shoal.config.schema.data import CHAT_TEMPLATES
from shoal.data.loaded_data import Info
from shoal.data.text.chat_template import ChatTemplate, read_template, template_of
from shoal.data.text.documents import Document
from shoal.data.text.encoding import Encoding
from shoal.data.text.preferences import Prompt
from shoal.data.text.tokenizers import Tokenizer, load_tokenizer
from shoal.data.text.tokenizers.interface import chat_time
from shoal.errors import ShoalError

CONVERSATIONS = "rows are conversations"
"""In the description of data, where they are."""
_CLOCK = "strftime_now"
"""The function by which a template reads the time. A run records the time, so that its tokens stay the same."""


def find_encoding(
    run: Run, texts: Callable[[], Iterable[str]], cache_dir: Path | None, token: str | None, *, chats: bool = False
) -> Encoding:
    """The encoding of documents to samples. `texts` returns the training text, for tokenizers that are trained on it; `chats`: whether
    documents are conversations."""
    data = run.data
    of_model = data.tokenizer is not None and data.tokenizer == getattr(run.model, "pretrained", None)
    setting = "model.pretrained" if of_model else "data.tokenizer"
    tokenizer = load_tokenizer(data.tokenizer or "bytes", texts=texts, cache_dir=cache_dir, token=token, setting=setting)
    _check_vocabulary(run, tokenizer)
    length = data.sequence_length
    if length is None:
        raise ShoalError(f"data.sequence_length: a text needs one, and a model of kind {run.model.kind} does not define one")
    if data.chat_template is not None:
        tokenizer = tokenizer.with_chat_template(read_template(data.chat_template))
    if tokenizer.chat_time is None and any(_CLOCK in source for source in tokenizer.chat_templates.values()):
        tokenizer.chat_time = chat_time(data.chat_time or datetime.now().isoformat(), "data.chat_time")
    template = _template(tokenizer) if chats else None
    packing = data.packing or ("documents" if chats else "stream")
    return Encoding(
        tokenizer, length, data.batching, data.padding_side, data.truncation, packing, template=template, learn_from=data.learn_from
    )


def _template(tokenizer: Tokenizer) -> ChatTemplate:
    """The template of a run's conversations. Raises ShoalError where there is none."""
    template = template_of(tokenizer, tokenizer.chat_time)
    if template is None:
        raise ShoalError(
            f"data.chat_template: the rows are conversations, and the tokenizer {tokenizer.name} has no chat template: set it to "
            f"{', '.join(CHAT_TEMPLATES)}, or to a file"
        )
    return template


class PromptEncoder:
    """Prompts as the tokens that a model continues: rendered where they are conversations, else after what the tokenizer puts before every
    text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._template: ChatTemplate | None = None

    def encode(self, prompt: Prompt) -> list[int]:
        if prompt.conversation is None:
            return [*self.tokenizer.opening, *self.tokenizer.encode(prompt.text)]
        return self.tokenizer.encode(self.template.prompt(prompt.conversation.messages, prompt.conversation.tools))

    @property
    def template(self) -> ChatTemplate:
        """Raises ShoalError where there is none."""
        self._template = self._template or _template(self.tokenizer)
        return self._template

    @property
    def end_id(self) -> int | None:
        """The token that ends an answer in a conversation."""
        end = self.template.end_of_turn
        ids = self.tokenizer.encode(end) if end else []
        return ids[0] if len(ids) == 1 else self.tokenizer.eos_id


def _check_vocabulary(run: Run, tokenizer: Tokenizer) -> None:
    size: int | None = getattr(run.model, "vocab_size", None)
    if size is not None and size < tokenizer.vocab_size:
        raise ShoalError(
            f"model.vocab_size is {size}, and the tokenizer {tokenizer.name} has {tokenizer.vocab_size:,} ids: "
            "set it at least as high, or leave it out"
        )


def contents(documents: Iterable[Document]) -> Iterable[str]:
    return (text for document in documents for text in (document.prompt, document.text) if text)


def chat_note(documents: Sequence[Document], learn_from: str) -> str:
    """How many of the assistant's turns conversations have; empty: the documents are none."""
    turns = [document.conversation.assistant_turns for document in documents if document.conversation is not None]
    without = turns.count(0) if learn_from != "all" else 0
    left_out = f" ({without:,} rows without one are left out)" if without else ""
    return f"{CONVERSATIONS}: {sum(turns):,} assistant turns{left_out}; " if turns else ""


def noun(encoding: Encoding, count: int | None = None) -> str:
    """A description of the samples: `4,096 training sequences of 128 tokens`."""
    number = "" if count is None else f"{count:,} training "
    packed = "sequences of whole documents," if encoding.packs_documents else "sequences of"
    return f"{number}{packed if encoding.packed else 'texts of up to'} {encoding.sequence_length} tokens"


def text_info(described: str, encoding: Encoding) -> Info:
    """What a run must know about samples of this encoding."""
    tokenizer = encoding.tokenizer
    whole, chats = encoding.packs_documents, encoding.template is not None
    return Info("text", described, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer, packs_documents=whole, is_chat=chats)


def joined_name(names: Sequence[str]) -> str:
    return " + ".join(names) if len(names) <= 3 else f"{names[0]} + {len(names) - 1} more"
