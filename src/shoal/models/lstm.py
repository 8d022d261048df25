"""A recurrent language model.

Shapes: B batch, L tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from shoal.config import Run
from shoal.config.data_shapes import DataShapes, vocab_size_for
from shoal.config.schema import model as schema
from shoal.models.layers.documents import packed_documents


class LstmCache:
    """The recurrent state after the tokens so far, with the interface of `KeyValueCache`."""

    padded = False
    """The state has a fixed size, so rows are joined without padding."""

    def __init__(self, state: tuple[Tensor, Tensor] | None = None) -> None:
        self.state = state

    def row(self, i: int, length: int) -> LstmCache:
        assert self.state is not None
        return LstmCache((self.state[0][:, i : i + 1], self.state[1][:, i : i + 1]))

    @classmethod
    def joined(cls, rows: Sequence[LstmCache]) -> LstmCache:
        states = [row.state for row in rows if row.state is not None]
        return cls((torch.cat([state[0] for state in states], 1), torch.cat([state[1] for state in states], 1)))


class Lstm(nn.Module):
    """Embedding, recurrent layers, linear output. Dropout stands before and after each recurrent layer."""

    max_seq_len: int | None = None
    """There is no limit."""

    def __init__(self, settings: schema.Lstm, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.dropout = settings.dropout
        width, layers = settings.hidden_size, settings.num_layers
        self.token_embedding = nn.Embedding(vocab_size, width)
        # torch warns about dropout between layers if there is one layer
        self.recurrent = nn.LSTM(width, width, layers, batch_first=True, dropout=settings.dropout if layers > 1 else 0.0)
        self.output = nn.Linear(width, vocab_size, bias=False)

    def forward(self, input_ids_BL: Tensor, **given: Any) -> Tensor:
        """Logits [B, L, V]. `given`: see `hidden`."""
        return self.output(self.hidden(input_ids_BL, **given))

    def hidden(
        self,
        input_ids_BL: Tensor,
        *,
        cache: LstmCache | None = None,
        attention_mask: Tensor | None = None,
        document_lengths: Tensor | None = None,
    ) -> Tensor:
        """Input of the output layer: logits = hidden @ output_weight.T. `attention_mask` [B, L] is 0 at padding, on either side.
        `document_lengths` [B, M]: tokens of each document of packed rows; each begins with an empty state."""
        if document_lengths is not None:
            return self._recur_in_documents(input_ids_BL, document_lengths)
        if attention_mask is None:
            return self._recur(input_ids_BL, cache)
        if cache is not None:
            raise ValueError("an LSTM takes a cache or an attention mask, not both: padding would enter the state")
        # Padding on the right cannot influence a token; padding on the left is rotated to the right, and back
        order_BL = torch.arange(input_ids_BL.shape[1], device=input_ids_BL.device) + attention_mask.long().argmax(1, keepdim=True)
        order_BL = order_BL % input_ids_BL.shape[1]
        x_BLD = self._recur(input_ids_BL.gather(1, order_BL), None)
        return x_BLD.gather(1, order_BL.argsort(1).unsqueeze(-1).expand_as(x_BLD))

    def _recur(self, input_ids_BL: Tensor, cache: LstmCache | None) -> Tensor:
        x_BLD = F.dropout(self.token_embedding(input_ids_BL), self.dropout, self.training)
        with _no_fp16_on_cpu(x_BLD):
            x_BLD, state = self.recurrent(x_BLD, cache.state if cache else None)
        if cache is not None:
            cache.state = state
        return F.dropout(x_BLD, self.dropout, self.training)

    def _recur_in_documents(self, input_ids_BL: Tensor, lengths_BM: Tensor) -> Tensor:
        sizes = [size for size in packed_documents(lengths_BM, input_ids_BL.shape[1]).lengths_N.tolist() if size]
        x_BLD = F.dropout(self.token_embedding(input_ids_BL), self.dropout, self.training)
        with _no_fp16_on_cpu(x_BLD):
            outputs, _ = self.recurrent(pack_sequence(list(torch.split(x_BLD.flatten(0, 1), sizes)), enforce_sorted=False))
        hidden_BLD = torch.cat(unpack_sequence(outputs)).view(*input_ids_BL.shape, -1)
        return F.dropout(hidden_BLD, self.dropout, self.training)

    def expect_documents_apart(self) -> None:
        """Each document of a packed row begins with an empty state."""

    @property
    def output_weight(self) -> Tensor:
        return self.output.weight

    def new_cache(self, capacity: int) -> LstmCache:
        return LstmCache()

    def next_logits(self, input_ids_BL: Tensor, cache: LstmCache, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, V] of the next token; the cache advances over these tokens."""
        return self.output(self.hidden(input_ids_BL, cache=cache, attention_mask=attention_mask)[:, -1])


def _no_fp16_on_cpu(x_BLD: Tensor) -> AbstractContextManager[Any]:
    """Recurrent layers compute in fp32 where the rest of a pass computes in fp16 on a CPU: torch has no such kernel."""
    if x_BLD.device.type == "cpu" and torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16:
        return torch.autocast("cpu", enabled=False)
    return nullcontext()


def players(model: schema.Lstm, run: Run, shapes: DataShapes) -> dict[str, nn.Module]:
    return {"model": Lstm(model, vocab_size_for(model.vocab_size, shapes))}
