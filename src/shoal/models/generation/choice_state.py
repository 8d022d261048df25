"""What the choice of tokens in slots reads and writes.

Shapes: R rows, N slots.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ChoiceState(NamedTuple):
    """What the kernel reads and writes by slot. Slot 0 belongs to rows that stand for no request."""

    temperature_N: Tensor
    """0: the most likely token."""
    top_k_N: Tensor
    """0: all tokens."""
    top_p_N: Tensor
    min_p_N: Tensor
    tokens_N: Tensor
    """The last token."""
    lengths_N: Tensor
    """Tokens before the last one."""


class Choices(NamedTuple):
    """The chosen tokens, row by row."""

    tokens_R: Tensor
    """−1 where the row's logits were not finite."""
    log_probs_R: Tensor
    """In the distribution that it was drawn from."""
