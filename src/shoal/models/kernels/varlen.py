"""Attention inside documents of different lengths on a GPU: FlashAttention's kernel for them, which torch has since 2.10.

Shapes: T tokens of all documents, N documents, H query heads, K key and value heads, E head size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_PARAMETERS = inspect.signature(varlen_attn).parameters
_CAUSAL: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _PARAMETERS else {"is_causal": True}
_GROUPS_HEADS = "enable_gqa" in _PARAMETERS


def attend_to_each(query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor, lengths_N: Tensor, longest: int) -> Tensor:
    """Causal attention [T, H, E] inside each document. Documents may be empty: so a batch of another number of documents has the same
    shapes. `longest`: at least the length of the longest one; it is not read from the GPU."""
    bounds = F.pad(lengths_N.cumsum(0), (1, 0)).to(torch.int32)
    given = dict(_CAUSAL)
    groups = query_THE.shape[1] // key_TKE.shape[1]
    if groups > 1 and _GROUPS_HEADS:
        given["enable_gqa"] = True
    elif groups > 1:
        key_TKE, value_TKE = (heads.repeat_interleave(groups, dim=1) for heads in (key_TKE, value_TKE))
    query_THE, key_TKE, value_TKE = (heads.contiguous() for heads in (query_THE, key_TKE, value_TKE))
    attended: Any = varlen_attn(query_THE, key_TKE, value_TKE, bounds, bounds, longest, longest, **given)
    whole: Tensor = attended
    return whole
