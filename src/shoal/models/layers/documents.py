"""Packed rows: several documents in one row, each with positions of its own, and attention inside documents only.

On a CPU attention is computed document by document, so that its cost does not grow with the length of a row; or with a mask, where
documents are so short that the calls would take longer. On a GPU FlashAttention takes documents of any lengths in half precision and
without dropout, and other cases are computed with a mask.

Shapes: B batch, L tokens of a row, M documents of a row, N documents of a batch, H query heads, K key and value heads, E head size.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_CALL_COST = 2000
"""Pairs of tokens whose attention takes as long as the call for one more document (float32, 9 heads of 64, forward and backward)."""
_HALF = (torch.bfloat16, torch.float16)
_HAS_VARLEN = find_spec("torch.nn.attention.varlen") is not None


class PackedDocuments(NamedTuple):
    """The documents of packed rows. The padding at the end of a row is a document, too."""

    positions_BL: Tensor
    """The place of each token in its document."""
    numbers_BL: Tensor
    """The number of each token's document in its row."""
    lengths_N: Tensor
    """Tokens of each document, row after row; some are 0."""

    def mask(self) -> Tensor:
        """True where a token attends to another, [B, 1, L, L]."""
        same_BLL = self.numbers_BL[:, :, None] == self.numbers_BL[:, None, :]
        return same_BLL.tril().unsqueeze(1)


def packed_documents(lengths_BM: Tensor, length: int) -> PackedDocuments:
    """The documents of rows of `length` tokens, by the lengths of the documents without padding."""
    padding_B1 = length - lengths_BM.sum(1, keepdim=True)
    lengths_BM = torch.cat([lengths_BM, padding_B1], dim=1)
    starts_BM = lengths_BM.cumsum(1) - lengths_BM
    index_BL = torch.arange(length, device=lengths_BM.device).expand(len(lengths_BM), -1).contiguous()
    numbers_BL = torch.searchsorted(starts_BM, index_BL, right=True) - 1
    return PackedDocuments(index_BL - starts_BM.gather(1, numbers_BL), numbers_BL, lengths_BM.flatten())


def needs_mask(documents: PackedDocuments, dtype: torch.dtype, dropout: float) -> bool:
    """Whether attention is computed with a mask. `dropout`: the share of attention weights that are dropped."""
    if documents.lengths_N.is_cuda:
        return not _HAS_VARLEN or dtype not in _HALF or dropout > 0
    if documents.lengths_N.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    rows, length = documents.numbers_BL.shape
    pairs = sum(size * size + _CALL_COST for size in documents.lengths_N.tolist() if size)
    return bool(pairs >= rows * length * length)


def attend_inside(
    query_BHLE: Tensor, key_BKLE: Tensor, value_BKLE: Tensor, documents: PackedDocuments, dropout: float, scale: float | None = None
) -> Tensor:
    """Causal attention inside each document: [B, H, L, E]. `scale`: of the products, on a CPU; None: 1 / sqrt(E)."""
    query, key, value = (heads.transpose(1, 2).flatten(0, 1) for heads in (query_BHLE, key_BKLE, value_BKLE))
    if query.is_cuda:
        from shoal.models.kernels.varlen import attend_to_each

        attended = attend_to_each(query, key, value, documents.lengths_N, query_BHLE.shape[2])
    else:
        attended = _one_by_one(query, key, value, [size for size in documents.lengths_N.tolist() if size], dropout, scale)
    return attended.view(len(query_BHLE), -1, *attended.shape[1:]).transpose(1, 2)


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, sizes: list[int], dropout: float, scale: float | None) -> Tensor:
    """Attention [tokens, H, E], document by document. Splitting copies nothing, and the gradients of all parts are written once."""
    how = {"is_causal": True, "dropout_p": dropout, "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    attended = []
    for of_document in zip(*(torch.split(heads, sizes) for heads in (query, key, value)), strict=True):
        query_1HLE, key_1KLE, value_1KLE = (heads.transpose(0, 1).unsqueeze(0) for heads in of_document)
        heads_1HLE = F.scaled_dot_product_attention(query_1HLE, key_1KLE, value_1KLE, **how)  # type: ignore[arg-type]
        attended.append(heads_1HLE.squeeze(0).transpose(0, 1))
    return torch.cat(attended)
