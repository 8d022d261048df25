"""The loaded data of a run: training samples, held-out samples, and their description for the model and the task."""

from __future__ import annotations

from typing import Literal, NamedTuple

from shoal.config.data_shapes import DataShapes
from shoal.data.interfaces import Samples, SampleStream
from shoal.data.retrieval.finder import PassageFinder
from shoal.data.text.tokenizers import Tokenizer


class Info(NamedTuple):
    """What a run must know about its data."""

    kind: Literal["image", "text", "own"]
    name: str
    """A description for people."""
    image_shape: tuple[int, int, int] | None = None
    num_classes: int | None = None
    vocab_size: int | None = None
    tokenizer: Tokenizer | None = None
    finder: PassageFinder | None = None
    """Finds passages for texts, where the model retrieves."""
    packs_documents: bool = False
    """Whether rows hold several documents that do not attend to each other."""
    is_chat: bool = False
    """Whether texts are conversations that a chat template renders."""

    @property
    def eos_id(self) -> int | None:
        """End-of-text token of the tokenizer."""
        return self.tokenizer.eos_id if self.tokenizer else None

    @property
    def shapes(self) -> DataShapes:
        """What the networks and the task are built for."""
        return DataShapes(self.image_shape, self.num_classes, self.vocab_size, self.eos_id, self.packs_documents)


class Data(NamedTuple):
    """Training data, evaluation data, and their description. Holds: no sample is in both."""

    train: Samples | SampleStream
    eval: Samples | None
    info: Info
