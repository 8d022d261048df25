"""Packed rows for models of transformers.

They make the mask of attention from positions that begin anew with each document. The cost of that mask grows with the square of a row's
length. On a CPU most models can do without it: they call a function of this module for attention, which gets the documents and goes through
them one by one. Whether an architecture does either in all its layers is tested with a small random copy.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.models.huggingface.small_copy import small_copy
from shoal.models.layers.documents import PackedDocuments, attend_inside, needs_mask, packed_documents

_TOLERANCE = 1e-4
_ATTENTION = "shoal_documents"
"""The name of `_attend` among transformers' attention functions."""
_HARMLESS = {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
"""Arguments of attention functions that change nothing here. Others do: windows, caps of scores, biases."""
_APART: dict[tuple[str, bool], bool] = {}


def document_arguments(lengths_BM: Tensor, length: int, one_by_one: bool = False) -> dict[str, Any]:
    """The arguments of a model for packed rows, by the lengths of their documents. `one_by_one`: the model `attends_one_by_one`."""
    documents = packed_documents(lengths_BM, length)
    if not one_by_one or lengths_BM.device.type != "cpu" or needs_mask(documents, torch.float32, 0.0):
        return {"position_ids": documents.positions_BL}
    return _without_mask(documents)


def _without_mask(documents: PackedDocuments) -> dict[str, Any]:
    """transformers takes a mask of four dimensions as it is, and `_attend` does not read it."""
    return {"position_ids": documents.positions_BL, "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool), "documents": documents}


def check_documents_apart(inner: Any) -> None:
    """Raises ShoalError if tokens of one document would change what the model computes for another."""
    if not _apart(inner, one_by_one=False):
        raise ShoalError(
            f"data.packing: {type(inner).__name__} (model.pretrained) does not keep the documents of a packed row apart: "
            "set data.packing to stream, or data.batching to dynamic"
        )


def attends_one_by_one(inner: Any) -> bool:
    """Whether the model can go through documents one by one. If so, it calls `_attend` from now on, which without documents is
    transformers' own function."""
    if inner.config._attn_implementation == "sdpa" and _apart(inner, one_by_one=True):
        inner.config._attn_implementation = _registered()
    return bool(inner.config._attn_implementation == _ATTENTION)


@cache
def _registered() -> str:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    return _ATTENTION


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any) -> tuple[Tensor, None]:
    """Attention as transformers calls it: heads [B, H, L, E], the result [B, L, H, E]."""
    documents: PackedDocuments | None = given.pop("documents", None)
    if documents is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    dropout, scale = given.pop("dropout", 0.0), given.pop("scaling", None)
    if changing := [name for name, value in given.items() if value is not None and name not in _HARMLESS]:
        raise NotImplementedError(f"attention with {', '.join(changing)} does not go through documents one by one")
    return attend_inside(query, key, value, documents, dropout, scale).transpose(1, 2), None


def _apart(inner: Any, one_by_one: bool) -> bool:
    key = f"{type(inner).__name__} {inner.config.to_json_string()}", one_by_one
    if key not in _APART:
        _APART[key] = "position_ids" in inspect.signature(inner.forward).parameters and _computes_apart(inner.config, one_by_one)
    return _APART[key]


@torch.no_grad()
def _computes_apart(config: Any, one_by_one: bool) -> bool:
    """Compare two documents in one row with each in a row of its own."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        small = small_copy(config)
        first, second = torch.tensor([[3, 1, 4, 1]]), torch.tensor([[5, 9, 2]])
        apart = torch.cat([small(input_ids=document, use_cache=False).logits for document in (first, second)], 1)
        documents = packed_documents(torch.tensor([[4, 3]]), 7)
        arguments: dict[str, Any] = {"position_ids": documents.positions_BL}
        if one_by_one:
            small.config._attn_implementation, arguments = _registered(), _without_mask(documents)
        try:
            together = small(input_ids=torch.cat([first, second], 1), use_cache=False, **arguments).logits
        except (NotImplementedError, RuntimeError, TypeError, ValueError):
            if one_by_one:
                return False
            raise
    return bool((together - apart).abs().max() <= _TOLERANCE * apart.abs().max())
