"""The sizes of the data that models and tasks are built for, and errors where a model does not fit them."""

from __future__ import annotations

from typing import NamedTuple

from shoal.errors import ShoalError


class DataShapes(NamedTuple):
    """The sizes of the data; None where they do not apply."""

    image_shape: tuple[int, int, int] | None = None
    """Channels, height and width of an image."""
    num_classes: int | None = None
    """Number of labels."""
    vocab_size: int | None = None
    """Tokens of the tokenizer."""
    eos_id: int | None = None
    """End-of-text token of the tokenizer."""
    packs_documents: bool = False
    """Whether rows hold several documents that do not attend to each other."""


def vocab_size_for(setting: int | None, shapes: DataShapes) -> int:
    """The vocabulary size of a language model: the setting, or that of the tokenizer."""
    if setting is None and shapes.vocab_size is None:
        raise ShoalError("a language model needs text: data.source gives no tokens; choose a text source, or set model.vocab_size")
    if setting is not None and shapes.vocab_size is not None and setting < shapes.vocab_size:
        fact = f"the tokenizer (data.tokenizer) has {shapes.vocab_size} tokens"
        raise misfit("model.vocab_size", setting, fact, f"{shapes.vocab_size} or more")
    return setting or shapes.vocab_size or 0


def misfit(name: str, setting: int | None, fact: str, fitting: str) -> ShoalError:
    """The error for a setting that contradicts the data or the model."""
    return ShoalError(f"{name} is {setting}, but {fact}; set {name} to {fitting}, or to null")
