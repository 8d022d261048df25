"""Causal language models of the Hugging Face hub or of a folder.

Shapes: B batch, L tokens, S tokens seen (L and those in the cache), V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.models.generation.kv_cache import padded_rows
from shoal.models.huggingface import merged_weights, pretrained
from shoal.models.huggingface.frozen_weights import FrozenLinear
from shoal.models.huggingface.output_matrix import gives_product
from shoal.models.huggingface.packing import attends_one_by_one, check_documents_apart, document_arguments

CACHE_NAMES = ("past_key_values", "cache_params")
"""The cache argument of attention models and of state-space models."""
_MERGED_FILE = 256 * 10**6
"""Bytes of a file of merged weights."""


class HuggingFaceCache:
    """The model's own cache object, with the interface of `KeyValueCache`."""

    padded = True

    def __init__(self, past: Any = None) -> None:
        self.past = past

    def crop(self, length: int) -> None:
        self.past.crop(length - self.past.get_seq_length())  # a negative number: tokens to remove

    def row(self, i: int, length: int) -> HuggingFaceCache:
        return HuggingFaceCache(
            _filled([(keys[i : i + 1, :, -length:], values[i : i + 1, :, -length:]) for keys, values in self._layers()])
        )

    def select(self, columns: Tensor) -> HuggingFaceCache:
        """The tokens of these numbers alone, as a copy."""
        return HuggingFaceCache(_filled([(keys[:, :, columns], values[:, :, columns]) for keys, values in self._layers()]))

    @classmethod
    def joined(cls, rows: Sequence[HuggingFaceCache]) -> HuggingFaceCache:
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

    kept_layers = ""
    """Why it does not have Shoal's own layers, for the user."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        config = inner.config.get_text_config()
        self.inner = inner
        self.vocab_size: int = config.vocab_size
        self.width: int = config.hidden_size
        self.max_seq_len: int | None = getattr(config, "max_position_embeddings", None)
        self.accepts = frozenset(inspect.signature(inner.forward).parameters)
        self.cache_name = next((name for name in CACHE_NAMES if name in self.accepts), None)

    def forward(
        self,
        input_ids_BL: Tensor,
        *,
        cache: HuggingFaceCache | None = None,
        attention_mask: Tensor | None = None,
        document_lengths: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, L, V]. `attention_mask` [B, S] is 0 at padding, the tokens in the cache counted. `document_lengths` [B, M]: tokens of
        each document of packed rows, which do not attend to each other."""
        return self._logits(input_ids_BL, cache, **self._layout(input_ids_BL, attention_mask, document_lengths))

    def _layout(self, input_ids_BL: Tensor, attention_mask: Tensor | None, document_lengths: Tensor | None) -> dict[str, Any]:
        """The arguments that say which tokens attend to which."""
        if document_lengths is None:
            return mask_arguments(self.accepts, input_ids_BL.shape[1], attention_mask)
        one_by_one = document_lengths.device.type == "cpu" and self.skips_padding
        return document_arguments(document_lengths, input_ids_BL.shape[1], one_by_one)

    def expect_documents_apart(self) -> None:
        """Raises ShoalError if the model cannot keep the documents of packed rows apart."""
        check_documents_apart(self._base)

    @property
    def skips_padding(self) -> bool:
        """Whether on a CPU padded rows are computed as documents of one packed row, of any length, which attend one by one."""
        return attends_one_by_one(self._base)

    @property
    def gives_product(self) -> bool:
        """Whether logits are the product of `hidden` with `product_weight`."""
        return gives_product(self._base)

    @property
    def product_weight(self) -> Tensor:
        """The output matrix: bfloat16 where the frozen weights are stored in few bits."""
        head: Any = self._base.get_output_embeddings()
        weight: Tensor = head.codes if isinstance(head, FrozenLinear) and head.scales is None else head.weight
        return weight

    @property
    def _base(self) -> Any:
        """The model without the wrapper of peft; LoRA matrices are in its layers."""
        return self.inner.get_base_model() if self.has_adapters else self.inner

    def _logits(self, input_ids_BL: Tensor, cache: HuggingFaceCache | None, **arguments: Any) -> Tensor:
        logits_BLV: Tensor = self._computed(self.inner, input_ids_BL, cache, **arguments).logits
        return logits_BLV

    def _computed(self, module: Any, input_ids_BL: Tensor, cache: HuggingFaceCache | None, **arguments: Any) -> Any:
        """The output of the model or its decoder; the tokens are appended to the cache."""
        if "use_cache" in self.accepts:
            arguments["use_cache"] = cache is not None
        if cache is not None and self.cache_name is not None:
            arguments[self.cache_name] = cache.past
        output = module(input_ids=input_ids_BL, **arguments)
        if cache is not None and self.cache_name is not None:
            cache.past = getattr(output, self.cache_name)
        return output

    @property
    def joins_rows(self) -> bool:
        """Whether the cache is keys and values of every token and nothing else, so that rows of several requests can be joined."""
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        # Sliding-window layers have another class: they drop tokens that a padded row would still need
        return self.cache_name == CACHE_NAMES[0] and all(
            type(layer) is DynamicLayer for layer in DynamicCache(config=self.inner.config).layers
        )

    def hidden(
        self,
        input_ids_BL: Tensor,
        *,
        cache: HuggingFaceCache | None = None,
        attention_mask: Tensor | None = None,
        document_lengths: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states [B, L, D], which the output matrix reads; these tokens are appended to the cache."""
        arguments = self._layout(input_ids_BL, attention_mask, document_lengths)
        hidden_BLD: Tensor = self._computed(self._base.get_decoder(), input_ids_BL, cache, **arguments).last_hidden_state
        return hidden_BLD

    def without_adapters(self) -> AbstractContextManager[None]:
        """Context: the model without its LoRA adapters."""
        return self.inner.disable_adapter()

    @property
    def has_adapters(self) -> bool:
        return hasattr(self.inner, "disable_adapter")

    def new_cache(self, capacity: int) -> HuggingFaceCache:
        if self.cache_name is None:
            raise ShoalError(f"{type(self.inner).__name__} (model.pretrained) has no KV cache that Shoal supports, so it cannot generate")
        return HuggingFaceCache()

    def next_logits(self, input_ids_BL: Tensor, cache: HuggingFaceCache, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, V] of the next token; these tokens are appended to the cache."""
        last_only = {"logits_to_keep": 1} if "logits_to_keep" in self.accepts else {}
        return self._logits(input_ids_BL, cache, **mask_arguments(self.accepts, input_ids_BL.shape[1], attention_mask), **last_only)[:, -1]

    def gradient_checkpointing(self, enabled: bool) -> None:
        """Whether the backward pass computes activations again instead of keeping them."""
        if not enabled:
            self.inner.gradient_checkpointing_disable()
            return
        try:
            self.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except ValueError as error:
            raise ShoalError(f"training.gradient_checkpointing: {type(self.inner).__name__} (model.pretrained) does not have it") from error

    def save_adapters(self, folder: Path) -> None:
        """Save the LoRA adapters alone, for `peft.PeftModel.from_pretrained`."""
        if not self.has_adapters:
            raise ShoalError(
                "the run trained all weights of the model (model.lora is null), so there are no adapters: export the whole model"
            )
        pretrained.save(self.inner, folder)

    def save(self, folder: Path) -> None:
        """Save for `AutoModelForCausalLM.from_pretrained`, with LoRA adapters merged, one file after the other."""
        inner, weights = self._unread()
        self._write(inner, weights, folder)

    def save_scored(self, folder: Path, head_1D: Tensor) -> None:
        """Save for `AutoModelForSequenceClassification.from_pretrained`, with one label."""
        self._write(*pretrained.as_classifier(*self._unread(), head_1D), folder)

    def _unread(self) -> tuple[Any, dict[str, Tensor]]:
        """The model of transformers that it would be without adapters, and the weights for it, which are computed when they are read."""
        inner, readers = merged_weights.without_adapters(self.inner)
        return inner, merged_weights.unread(inner, readers)

    def _write(self, inner: Any, weights: dict[str, Tensor], folder: Path) -> None:
        """Merged weights are in memory until their file is written, so the files are small."""
        pretrained.save(inner, folder, weights, **({"most_bytes": _MERGED_FILE} if self.has_adapters else {}))

    def merged(self) -> Any:
        """The model of transformers, with LoRA adapters merged in float32."""
        return merged_weights.merged(self.inner)


def mask_arguments(accepts: Container[str], length: int, attention_mask: Tensor | None) -> dict[str, Any]:
    """The mask, and positions that count from the first real token: padding on the left changes nothing."""
    if attention_mask is None:
        return {}
    positions_BS = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
    positions = {"position_ids": positions_BS[:, -length:]} if "position_ids" in accepts else {}
    return {"attention_mask": attention_mask, **positions}
