"""How much of the waiting prompts is read beside requests that decode."""

from __future__ import annotations

from shoal.serve.batching.backend_interface import moving_average

_PREFILL_SHARE = 0.75
"""Prefill budget per decode step, as a share of decode time: a token then takes 1.75 times as long on the mean; twice is the goal. Where
more prompts wait than requests decode, each prompt counts as much as a request; else many would wait long for the sake of a few."""
_MOST_PROMPTS_PER_DECODER = 4.0
"""Waiting prompts that count for each request that decodes: they make its tokens slower, and never stop them."""
_MOST_DEBT = 4.0
"""Tokens' time for which no prompt is read after a chunk that took longer than expected."""


class PrefillBudget:
    """How much of the prompts is read beside requests that decode: on the mean, `_PREFILL_SHARE` of the time for their tokens.

    A chunk of any size costs the time to go through all weights: so it takes about as long as a token, and not every token has one.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest, self._largest = smallest, largest
        self.decode_s = 0.0
        """For one step of decoding."""
        self.prefill_s = 0.0
        """For one token of a prompt."""
        self.credit_s = 0.0
        """How much longer prompts may be read. Decoding adds to it, and prefill takes from it."""
        self._prompts_per_decoder = 1.0
        """From 1 to `_MOST_PROMPTS_PER_DECODER`."""

    def set_load(self, unread: int, decoding: int) -> None:
        self._prompts_per_decoder = min(_MOST_PROMPTS_PER_DECODER, max(1.0, unread / max(1, decoding)))

    def tokens(self) -> int:
        """Tokens of prompts that may be read beside the next step."""
        if self.credit_s < 0:
            return 0
        if not self.decode_s or not self.prefill_s:
            return self._smallest
        return int(min(self._largest, max(self._smallest, self._prompts_per_decoder * self.decode_s / self.prefill_s)))

    def add_prefill(self, tokens: int, seconds: float) -> None:
        self.credit_s = max(self.credit_s - seconds, -_MOST_DEBT * self._prompts_per_decoder * self.decode_s)
        if tokens >= self._smallest:
            self.prefill_s = moving_average(self.prefill_s, seconds / tokens)

    def add_decode(self, seconds: float) -> None:
        self.credit_s = min(self.credit_s, 0.0) + _PREFILL_SHARE * self._prompts_per_decoder * seconds
        self.decode_s = moving_average(self.decode_s, seconds)
