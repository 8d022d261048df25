"""What the batching engine asks of a model, wherever its layers are: forward passes, and a KV cache for each request.

Shapes: B batch, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from shoal.serve.batching.generation_job import GenerationJob, PromptOutput, TokenLogprob


class ForwardBatch(NamedTuple):
    """Tokens for one forward pass: a chunk of one prompt, the rest of several prompts, or one token of each of several requests, each with
    as many proposed ones."""

    requests: tuple[int, ...]
    ids: tuple[tuple[int, ...], ...]
    """Of each request; the same number of each, unless the backend takes prompts of different lengths."""
    needs_logits: bool = True
    """False: more of this prompt follows, so the next token is not chosen yet."""
    decodes: bool = False
    """The ids are the last chosen tokens, which a backend that chooses them has itself."""
    draws: tuple[float, ...] = ()
    """The random numbers of the next tokens, for a backend that chooses them."""
    masks: tuple[Tensor | None, ...] = ()
    """The tokens that are allowed next, a bit for each, for such a backend; None: all."""
    output: PromptOutput | None = None
    """What the result has at every token of each row, as [B, L, …]; None: it has the logits of the next tokens alone."""


class ChosenTokens(NamedTuple):
    """The next tokens, as a backend chose them."""

    tokens: list[int]
    """−1 where the logits were not finite."""
    logprobs: list[tuple[float, list[TokenLogprob]]] | None
    """Of each token, and of the most likely ones; None: no request needs them."""
    values_1LX: Tensor | None = None
    """The batch's output at all tokens, where there is one. Then more of the prompt may follow, and no token is chosen yet."""


@dataclass
class MachineEntry:
    """A machine that holds layers of the model."""

    name: str
    parameters: int
    layers: tuple[int, int] | None
    """The first and the last; None: all of them."""
    alive: bool
    weight_bytes: int
    memory_bytes: int
    """Free memory when it joined."""
    token_s: float
    """Seconds that its layers take for one token; 0: none was read yet."""
    tokens: int
    """Tokens that it has read."""
    has_ends: bool
    """Whether it embeds tokens and has the output matrix."""


class Backend(Protocol):
    """A language model that keeps a KV cache for each request, by number: on one machine (`backend.py`) or on several (`nodes/`)."""

    longest: int
    """Tokens that one request may have, prompt and answer together."""
    vocab_size: int
    ahead: int = 0
    """Steps that are started before the tokens of the earlier ones are known. Above 0 the backend chooses the tokens."""
    smallest_chunk: int = 8
    """Least number of tokens of a prompt that are read at once. Fewer cost almost as much: SmolLM2-135M on one slow core reads 2 or 4
    tokens in 0.21 s, and 8 in 0.26 s."""
    largest_chunk: int = 512
    """Tokens of prompts that are read at once where no request waits for a token meanwhile."""
    ragged: bool = False
    """Whether prompts of different lengths are read together."""
    can_verify: bool = False
    """Whether it reads several tokens of each of several answers, gives the logits at each, and removes the wrong ones with `rewind`."""

    @property
    def microbatches(self) -> int:
        """Batches under way that keep all machines busy."""

    def prepare(self) -> None:
        """Do what the first requests would else wait for."""

    def admit(self, job: GenerationJob) -> bool:
        """Reserve the memory of a request. False: it must wait until others have ended."""
        return True

    def start(self, batch: ForwardBatch) -> None:
        """Begin a forward pass. Batches of one request are read in the order in which they were started."""

    def results(self) -> Iterator[tuple[ForwardBatch, Tensor | ChosenTokens | None]]:
        """Finished batches, with the logits [B, V] of the next tokens, the output at all tokens [B, L, …], or the tokens, where they are
        needed. Waits a moment where none is done."""

    def rewind(self, request: int, length: int) -> None:
        """Remove all tokens of a request after the first `length`. Called only where `can_verify`."""
        assert self.can_verify

    def retain(self, request: int) -> bool:
        """Keep the caches of an ended request for prompts that begin like it. False: they cannot be shared, and must be released."""

    def copy_prefix(self, request: int, retained: int, length: int) -> bool:
        """Begin a new request with a copy of the first tokens of a retained one. False: its caches are gone."""

    def release(self, request: int) -> None:
        """Free the caches of a request."""

    def discard_pending(self) -> None:
        """Forget all batches that were started and are not finished."""

    def machines(self) -> list[MachineEntry]:
        """Which machine holds which layers."""

    def close(self) -> None:
        """Disconnect from other machines."""


def moving_average(before: float, now: float) -> float:
    """An exponential moving average of durations; `before` 0: there was none."""
    return now if not before else 0.7 * before + 0.3 * now
