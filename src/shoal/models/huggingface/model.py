"""Causal language models of the Hugging Face hub or of a folder.

Shapes: B batch, L tokens, S tokens seen (L and those in the cache), V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.generation.kv_cache import padded_rows
from shoal.models.huggingface import pretrained
from shoal.models.huggingface.lora import with_lora

CACHE_NAMES = ("past_key_values", "cache_params")
"""The cache argument of attention models and of state-space models."""


class HuggingFaceCache:
    """The model's own cache object."""

    padded = True
    """Joined rows are padded on the left: the model needs a mask."""

    def __init__(self, past: Any = None) -> None:
        self.past = past

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens. Rows must not be padded."""
        self.past.crop(length - self.past.get_seq_length())  # a negative number: tokens to remove

    def row(self, i: int, length: int) -> HuggingFaceCache:
        """The last tokens of one row, as a cache of its own."""
        return HuggingFaceCache(
            _filled([(keys[i : i + 1, :, -length:], values[i : i + 1, :, -length:]) for keys, values in self._layers()])
        )

    @classmethod
    def joined(cls, rows: Sequence[HuggingFaceCache]) -> HuggingFaceCache:
        """The caches of several rows as one."""
        layers = zip(*(row._layers() for row in rows), strict=True)
        return cls(_filled([(padded_rows([pair[0] for pair in row]), padded_rows([pair[1] for pair in row])) for row in layers]))

    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        return [(layer.keys, layer.values) for layer in self.past.layers]


def _filled(layers: list[tuple[Tensor, Tensor]]) -> Any:
    """A cache of transformers that holds these keys and values."""
    from transformers import DynamicCache

    return DynamicCache(layers)


class HuggingFace(nn.Module):
    """A model of transformers with the interface of Shoal's own models; `inner` is the model itself.

    It has no `output_weight`, since some of these models scale, cap or shift their logits.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        config = inner.config.get_text_config()
        self.inner = inner
        self.vocab_size: int = config.vocab_size
        self.width: int = config.hidden_size
        self.max_seq_len: int | None = getattr(config, "max_position_embeddings", None)
        self.accepts = frozenset(inspect.signature(inner.forward).parameters)
        self.cache_name = next((name for name in CACHE_NAMES if name in self.accepts), None)

    def forward(self, input_ids_BL: Tensor, *, cache: HuggingFaceCache | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, L, V]. `attention_mask` [B, S] is 0 at padding, the tokens in the cache counted."""
        return self._logits(input_ids_BL, cache, attention_mask)

    def _logits(self, input_ids_BL: Tensor, cache: HuggingFaceCache | None, attention_mask: Tensor | None, **arguments: Any) -> Tensor:
        if attention_mask is not None:
            arguments |= self._masked(attention_mask, input_ids_BL.shape[1])
        if "use_cache" in self.accepts:
            arguments["use_cache"] = cache is not None
        if cache is not None and self.cache_name is not None:
            arguments[self.cache_name] = cache.past
        output = self.inner(input_ids=input_ids_BL, **arguments)
        if cache is not None and self.cache_name is not None:
            cache.past = getattr(output, self.cache_name)
        logits_BLV: Tensor = output.logits
        return logits_BLV

    @property
    def joins_rows(self) -> bool:
        """Whether the cache is keys and values of every token and nothing else, so that rows of several requests can be joined."""
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        # Sliding-window layers have another class: they drop tokens that a padded row would still need
        return self.cache_name == CACHE_NAMES[0] and all(
            type(layer) is DynamicLayer for layer in DynamicCache(config=self.inner.config).layers
        )

    def hidden(self, input_ids_BL: Tensor, *, attention_mask: Tensor | None = None) -> Tensor:
        """The last hidden states [B, L, D], which the output matrix reads."""
        arguments: dict[str, Any] = {"use_cache": False} if "use_cache" in self.accepts else {}
        if attention_mask is not None:
            arguments |= self._masked(attention_mask, input_ids_BL.shape[1])
        output = self._whole().get_decoder()(input_ids=input_ids_BL, **arguments)
        hidden_BLD: Tensor = output.last_hidden_state
        return hidden_BLD

    def _whole(self) -> Any:
        """The model of transformers without the wrapper of peft; LoRA matrices are in its layers."""
        return self.inner.get_base_model() if hasattr(self.inner, "get_base_model") else self.inner

    def _masked(self, attention_mask: Tensor, length: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {"attention_mask": attention_mask}
        if "position_ids" in self.accepts:
            # Counted from the first real token, so that padding on the left changes nothing
            positions_BS = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
            arguments["position_ids"] = positions_BS[:, -length:]
        return arguments

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Context: the model without its LoRA adapters."""
        with self.inner.disable_adapter():
            yield

    @property
    def has_adapters(self) -> bool:
        return hasattr(self.inner, "disable_adapter")

    def new_cache(self, capacity: int) -> HuggingFaceCache:
        """A cache that grows as needed."""
        if self.cache_name is None:
            raise ShoalError(f"{type(self.inner).__name__} (model.pretrained) keeps no cache that Shoal knows, so it cannot generate")
        return HuggingFaceCache()

    def next_logits(self, input_ids_BL: Tensor, cache: HuggingFaceCache, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, V] of the next token; these tokens are appended to the cache."""
        last_only = {"logits_to_keep": 1} if "logits_to_keep" in self.accepts else {}
        return self._logits(input_ids_BL, cache, attention_mask, **last_only)[:, -1]

    def gradient_checkpointing(self, enabled: bool) -> None:
        """Whether the backward pass computes activations again instead of keeping them."""
        if not enabled:
            self.inner.gradient_checkpointing_disable()
            return
        try:
            self.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except ValueError as error:
            raise ShoalError(f"training.gradient_checkpointing: {type(self.inner).__name__} (model.pretrained) does not have it") from error

    def add_lora(self, lora: schema.Lora) -> None:
        """Freeze the weights and add LoRA adapters."""
        self.inner = with_lora(self.inner, lora)

    def save_adapters(self, folder: Path) -> None:
        """Save the LoRA adapters alone, for `peft.PeftModel.from_pretrained`."""
        if not hasattr(self.inner, "merge_and_unload"):
            raise ShoalError(
                "the run trained all weights of the model (model.lora is null), so there are no adapters: export the whole model"
            )
        self.inner.save_pretrained(str(folder), safe_serialization=True)

    def save(self, folder: Path) -> None:
        """Save for `AutoModelForCausalLM.from_pretrained`, with LoRA adapters merged. The model must not be used afterwards."""
        merge = getattr(self.inner, "merge_and_unload", None)
        whole = merge() if merge is not None else self.inner
        whole.save_pretrained(str(folder), safe_serialization=True)

    def save_scored(self, folder: Path, head_1D: Tensor) -> None:
        """Save for `AutoModelForSequenceClassification.from_pretrained`, with one label. The model must not be used afterwards."""
        merge = getattr(self.inner, "merge_and_unload", None)
        pretrained.as_classifier(merge() if merge is not None else self.inner, head_1D).save_pretrained(
            str(folder), safe_serialization=True
        )


def players(model: schema.HuggingFace, run: Run, shapes: DataShapes) -> dict[str, nn.Module]:
    token = run.hub.token.reveal() if run.hub.token else None
    network = HuggingFace(pretrained.load(model, token))
    _check_fit(network, model, run, shapes)
    if model.lora is not None:
        network.add_lora(model.lora)
    return {"model": network}


def _check_fit(network: HuggingFace, model: schema.HuggingFace, run: Run, shapes: DataShapes) -> None:
    if shapes.vocab_size is not None and network.vocab_size < shapes.vocab_size:
        raise ShoalError(
            f"the model (model.pretrained: {model.pretrained}) knows {network.vocab_size} tokens, but the tokenizer (data.tokenizer) has "
            f"{shapes.vocab_size}; set data.tokenizer to null for the model's own"
        )
    length = run.data.sequence_length
    if network.max_seq_len is not None and length is not None and length > network.max_seq_len:
        raise ShoalError(
            f"data.sequence_length is {length}, but the model (model.pretrained: {model.pretrained}) takes {network.max_seq_len} tokens"
        )
