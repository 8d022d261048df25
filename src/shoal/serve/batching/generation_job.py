"""One answer to generate: what a request asks for, how far its generation is, and the events that report it.

Shapes: V vocabulary, L tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from shoal.models.generation.decoding import NO_PENALTIES, LogitPenalties, TextPenalties, TokenDraws, Warp
from shoal.serve.constraints import TokenConstraint
from shoal.serve.speculation import NO_PROPOSAL, Proposal, Proposer

PromptOutput = Literal["logits", "hidden"]
"""What the model computes at every token of a prompt."""


class TokenLogprob(NamedTuple):
    """A token and the logarithm of its probability."""

    token: int
    logprob: float


class GeneratedToken(NamedTuple):
    """One token of an answer."""

    token: int
    logprob: float | None = None
    """None where the request did not ask for it."""
    others: tuple[TokenLogprob, ...] = ()
    """The most likely tokens at this position."""
    is_end: bool = False
    """Whether it ends the text and has no text itself. Such tokens are reported only with the log-probabilities of the prompt."""


class PromptCollector(ABC):
    """Takes what the model computes at the tokens of one prompt, in their order."""

    output: PromptOutput

    @abstractmethod
    def add(self, values_LX: Tensor) -> None:
        """Take the values at the next tokens. Raises NotFiniteError."""


EndReason = Literal["stop", "length", "timeout", "cancelled", "failed", "not_finite", "grammar"]
"""`not_finite`: the model itself gives no finite numbers for this text; with several machines, the server has computed them itself.
`grammar`: no token of the vocabulary continues the text as its grammar demands, or the grammar became too complex."""


class Finished(NamedTuple):
    """The last event of a job."""

    reason: EndReason


JobEvent = GeneratedToken | Finished


@dataclass
class GenerationJob:
    """One answer to generate. `on_event` is called in the engine's thread; it returns true when the text is to end."""

    prompt_ids: Sequence[int]
    max_tokens: int
    draws: TokenDraws
    on_event: Callable[[JobEvent], bool]
    warp: Warp
    penalties: LogitPenalties = NO_PENALTIES
    eos_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    """How many likely tokens are reported beside each token; None: no probabilities at all."""
    deadline: float = float("inf")
    constraint: TokenConstraint | None = None
    """The grammar that the answer follows."""
    collector: PromptCollector | None = None
    """Takes what is computed at the tokens of the prompt, of which nothing comes from the prefix cache then."""
    adapter: str = ""
    """The name of the LoRA adapter that changes the weights; empty: none."""
    number: int = -1
    request: int = -1
    """The number of the first job of its request."""
    read: int = 0
    """Tokens of the prompt that the model has read, or is reading."""
    reused: int = 0
    """Tokens of the prompt that came from the prefix cache."""
    cached: int = 0
    """Tokens that the caches of this job hold for certain."""
    pending: int = 0
    """Batches of this job that were started and are not finished."""
    started: int = 0
    """Tokens whose choice was started."""
    reading: int = 0
    """Tokens of the prompt that the model is reading."""
    group: int = -1
    """The microbatch in which it is decoded; −1: none yet."""
    written: list[int] = field(default_factory=list)
    proposal: Proposal = NO_PROPOSAL
    """What is being verified."""
    proposer: Proposer | None = None
    begun_at: float = float("-inf")
    """When the last batch of this job was started."""
    text_penalties: TextPenalties | None = None

    def penalized(self, logits_V: Tensor) -> Tensor:
        """The logits of the next token after the penalties."""
        if self.penalties == NO_PENALTIES:
            return logits_V
        if self.text_penalties is None:
            self.text_penalties = TextPenalties(self.penalties, self.prompt_ids, len(logits_V), logits_V.device)
        self.text_penalties.count(self.written)
        return self.text_penalties.apply(logits_V)

    def propose(self, most: int) -> Proposal:
        """Propose at most `most` next tokens."""
        if self.proposer is None:
            self.proposer = Proposer(self.prompt_ids)
        self.proposer.extend(self.written[len(self.proposer) - len(self.prompt_ids) :])
        found = self.proposer.propose(min(most, self.max_tokens - len(self.written) - 1))
        if found.tokens and self.constraint is not None:
            return found._replace(tokens=found.tokens[: self.constraint.accepted(found.tokens)])
        return found

    def continues_as_proposed(self, position: int) -> bool:
        """Whether the last token is the proposed one of this position."""
        return self.proposal.tokens[position : position + 1] == (self.written[-1],)


def probe_job(on_event: Callable[[JobEvent], bool], deadline: float) -> GenerationJob:
    """A job of one token, which shows whether the model works."""
    return GenerationJob([0], 1, TokenDraws(0, [0]), on_event, Warp(0.0), deadline=deadline)


def is_answer(event: JobEvent) -> bool:
    """Whether the first event of a probe shows that the model works."""
    return not isinstance(event, Finished) or event.reason == "stop"
