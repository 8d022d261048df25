"""Speculative decoding: tokens that an answer may continue with are proposed, and one forward pass verifies several of them.

A text often repeats itself: an answer that edits code or quotes a document has parts of the prompt. A proposal is what followed where the
last tokens occurred before. The engine chooses each token from the logits as it would without proposals, and a proposed token only saves
the forward pass after it, so texts stay the same.

Further tokens in a pass cost time: SmolLM2-135M on one slow core takes 93 ms for a token in fp32 and 114 ms for five, and in 4 bits 13 and
32 ms. `Speculation` measures that, and chooses how many tokens pay.

Shapes: N tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST_MATCH, MOST_PROPOSED = 2, 16
"""Tokens that must have occurred before, and most tokens that one proposal has."""
_LONGEST_MATCH = 8
_WIDTHS = (2, 3, 4, 5, 8)
"""Tokens of a row in one pass, from which the best number is chosen; few, so that the time of each is soon known. Products with packed
matrices have another kernel for more than 8 rows, which may round otherwise."""
_PRIOR_WEIGHT, _FORGET = 4.0, 0.95
"""The share of accepted tokens is first assumed, with the weight of four that were seen; what was seen counts less with every step."""
_FRESH_EVERY = 32
"""Verifying steps after which one step without proposals measures again what it takes."""
_RETRY = 0.98
"""Factor of a measured cost whenever it keeps proposals from being verified: one wrong measurement must not do so for ever."""


class Proposal(NamedTuple):
    """Tokens that may come next."""

    tokens: tuple[int, ...]
    accepted_share: float
    """Estimated probability of each token, if those before it were right."""
    match: int
    """How many of the last tokens occurred before."""


NO_PROPOSAL = Proposal((), 0.0, 0)


class Proposer:
    """Proposes how one text goes on, from the text itself, and learns how often that is right."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids_N = np.zeros(max(64, 2 * len(ids)), dtype=np.int64)
        self._length = 0
        self._seen: dict[int, tuple[float, float]] = {}
        """Tokens that were accepted and that were tested, by the length of the match."""
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Add the next tokens of the text."""
        end = self._length + len(ids)
        if end > len(self._ids_N):
            self._ids_N = np.pad(self._ids_N, (0, max(len(self._ids_N), len(ids))))
        self._ids_N[self._length : end] = ids
        self._length = end

    def __len__(self) -> int:
        return self._length

    def propose(self, most: int) -> Proposal:
        """What followed the last occurrence of the longest sequence that the text now ends with. It may overlap with the end."""
        self._seen = {match: (_FORGET * accepted, _FORGET * tested) for match, (accepted, tested) in self._seen.items()}
        if most < 1 or self._length <= LEAST_MATCH:
            return NO_PROPOSAL
        ids_N, match = self._ids_N[: self._length], LEAST_MATCH
        # Where the last two tokens end, not counting the end of the text itself
        ends = 1 + np.flatnonzero((ids_N[:-2] == ids_N[-2]) & (ids_N[1:-1] == ids_N[-1]))
        if not len(ends):
            return NO_PROPOSAL
        while match < _LONGEST_MATCH and match < self._length:
            longer = ends[(ends >= match) & (ids_N[ends - match] == ids_N[-1 - match])]
            if not len(longer):
                break
            ends, match = longer, match + 1
        start = int(ends[-1]) + 1
        period = self._length - start
        tokens = tuple(ids_N[start + i % period] for i in range(min(most, MOST_PROPOSED)))
        return Proposal(tuple(map(int, tokens)), self._share(match), match)

    def _share(self, match: int) -> float:
        accepted, tested = self._seen.get(match, (0.0, 0.0))
        return (_PRIOR_WEIGHT * _assumed_share(match) + accepted) / (_PRIOR_WEIGHT + tested)

    def learn(self, match: int, accepted: int, tested: int) -> None:
        """Count the tokens of a proposal that were verified. `tested`: the accepted ones, and the first wrong one."""
        before = self._seen.get(match, (0.0, 0.0))
        self._seen[match] = (before[0] + accepted, before[1] + tested)


def _assumed_share(match: int) -> float:
    """In greedy answers of SmolLM2-135M to questions 0.53 to 0.9, drawn at temperature 0.8 about 0.4 to 0.5."""
    return 0.35 + 0.08 * (match - LEAST_MATCH)


class Speculation:
    """Decides how many proposed tokens are verified in a step, from their chances and from what steps took."""

    def __init__(self, tokens: int | None = None) -> None:
        """`tokens`: propose this many, whatever they cost; None: as many as pay."""
        self.most, self.is_adaptive = MOST_PROPOSED if tokens is None else tokens, tokens is None
        self._plain_s: dict[int, float] = {}
        """Seconds of a step without proposals, by its number of rows."""
        self._extra_s: dict[int, float] = {}
        """Seconds for each further token of a row, by the number of tokens of a row."""
        self._verified: dict[int, int] = {}
        """Verifying steps since the last one without proposals, by the number of rows."""

    def width(self, proposals: Sequence[Proposal], longest: int) -> int:
        """Tokens of each row in the next pass; 1: no proposal is verified. `longest`: most tokens that each row may have."""
        longest = min(longest, 1 + max(len(one.tokens) for one in proposals))
        if not self.is_adaptive or longest < 2:
            return max(1, longest)
        rows = len(proposals)
        plain_s = self._plain_s.get(rows)
        if plain_s is None or self._verified.get(rows, 0) >= _FRESH_EVERY:
            return 1
        rates = {1: rows / plain_s} if plain_s else {1: 0.0}
        for width in {min(one, longest) for one in _WIDTHS}:
            gained = sum(_expected(one, width - 1) for one in proposals)
            rates[width] = (rows + gained) / (plain_s + self._extra(width, rows, plain_s)) if plain_s else gained
        best = max(rates, key=lambda width: (rates[width], -width))
        if best == 1:
            self._extra_s = {width: _RETRY * seconds for width, seconds in self._extra_s.items()}
        return best

    def _extra(self, width: int, rows: int, plain_s: float) -> float:
        """Estimated seconds that a pass takes longer with `width` tokens of each row: as measured at the most similar width."""
        known = min(self._extra_s, key=lambda one: abs(one - width), default=None)
        each_s = plain_s / (rows + 4) if known is None else self._extra_s[known]
        return each_s * rows * (width - 1)

    def observe(self, rows: int, width: int, seconds: float) -> None:
        """Take the time of a step."""
        if width == 1:
            self._plain_s[rows] = _mean(self._plain_s.get(rows), seconds)
            self._verified[rows] = 0
            return
        self._verified[rows] = self._verified.get(rows, 0) + 1
        if rows in self._plain_s:
            each_s = max(0.0, seconds - self._plain_s[rows]) / rows / (width - 1)
            self._extra_s[width] = _mean(self._extra_s.get(width), each_s)


def _expected(proposal: Proposal, most: int) -> float:
    """Tokens of a proposal that are likely to be accepted."""
    share = proposal.accepted_share
    return sum(share**i for i in range(1, 1 + min(most, len(proposal.tokens))))


def _mean(before: float | None, now: float) -> float:
    return now if before is None else 0.7 * before + 0.3 * now
