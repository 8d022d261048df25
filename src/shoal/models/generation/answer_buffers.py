"""Buffers for a batch of answers while they are generated; each step appends a token to every row.

Everything is on the model's device, including the step number, so every step runs the same kernels and can be captured as a CUDA graph.

Shapes: B batch, T tokens of the longest answer, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.models.generation.decoding import Warp, draw_tokens


class AnswerBuffers:
    """Answers of at most T tokens, with the log-probability and value of each token."""

    def __init__(self, rows: int, columns: int, warp: Warp, eos_id: int | None, pad_id: int, device: torch.device) -> None:
        self.warp, self.eos_id, self.pad_id = warp, eos_id, pad_id
        self.answer_BT = torch.full((rows, columns), pad_id, device=device)
        self.log_probs_BT, self.values_BT = (torch.zeros(rows, columns, device=device) for _ in range(2))
        self.real_BT = torch.zeros(rows, columns, dtype=torch.bool, device=device)
        self.going_B = torch.ones(rows, dtype=torch.bool, device=device)
        """Rows whose answers have not ended."""
        self.step_1 = torch.zeros(1, dtype=torch.long, device=device)
        """The next column."""
        self.valued = False
        """Whether the model has a value head."""

    def take(self, logits_BV: Tensor, draws_B: Tensor, value_B: Tensor | None) -> None:
        """Append the token that each row's draw selects."""
        self.put(*draw_tokens(logits_BV, self.warp, draws_B), value_B)

    def put(self, next_B: Tensor, log_p_B: Tensor, value_B: Tensor | None) -> None:
        """Append tokens with their log-probabilities and values. Rows that have ended get padding."""
        self._put(self.answer_BT, torch.where(self.going_B, next_B, self.pad_id))
        self._put(self.log_probs_BT, log_p_B * self.going_B)
        self._put(self.real_BT, self.going_B)
        if value_B is not None:
            self._put(self.values_BT, value_B * self.going_B)
            self.valued = True
        if self.eos_id is not None:
            self.going_B &= next_B != self.eos_id
        self.step_1 += 1

    def _put(self, whole_BT: Tensor, column_B: Tensor) -> None:
        whole_BT.index_copy_(1, self.step_1, column_B.to(whole_BT.dtype)[:, None])

    @property
    def last_B(self) -> Tensor:
        """The last token of each row."""
        return self.answer_BT.index_select(1, self.step_1 - 1).squeeze(1)
