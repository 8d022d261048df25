"""Packed rows for models of transformers, which make the mask of attention from positions that begin anew with each document.

Whether an architecture does so in all its layers is tested with a small random copy.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.models.huggingface.small_copy import small_copy
from shoal.models.layers.documents import packed_documents

_TOLERANCE = 1e-4
_APART: dict[str, bool] = {}


def document_arguments(lengths_BM: Tensor, length: int) -> dict[str, Any]:
    """The arguments of a model for packed rows, by the lengths of their documents."""
    return {"position_ids": packed_documents(lengths_BM, length).positions_BL}


def check_documents_apart(inner: Any) -> None:
    """Raises ShoalError if tokens of one document would change what the model computes for another."""
    key = f"{type(inner).__name__} {inner.config.to_json_string()}"
    if key not in _APART:
        _APART[key] = "position_ids" in inspect.signature(inner.forward).parameters and _computes_apart(inner.config)
    if not _APART[key]:
        raise ShoalError(
            f"data.packing: {type(inner).__name__} (model.pretrained) does not keep the documents of a packed row apart: "
            "set data.packing to stream, or data.batching to dynamic"
        )


@torch.no_grad()
def _computes_apart(config: Any) -> bool:
    """Compare two documents in one row with each in a row of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = small_copy(config)
    first, second = torch.tensor([[3, 1, 4, 1]]), torch.tensor([[5, 9, 2]])
    arguments = document_arguments(torch.tensor([[4, 3]]), 7)
    together = small(input_ids=torch.cat([first, second], 1), use_cache=False, **arguments).logits
    apart = torch.cat([small(input_ids=document, use_cache=False).logits for document in (first, second)], 1)
    return bool((together - apart).abs().max() <= _TOLERANCE * apart.abs().max())
