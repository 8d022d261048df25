"""What the engine needs of a model, wherever its layers are, and the model that is whole on one machine.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.models.generation.side_texts import SideTextReader, SideTexts
from shoal.models.kernels.cpu_packing import pack_matrices
from shoal.serve.kv_caches import KvCaches
from shoal.serve.nodes.layer_host import free_memory

LONGEST_UNBOUNDED = 32_768
"""Tokens that a request may have where the model itself has no longest sequence: its cache, or the time to read it, is bounded so."""


class MachineStatus(NamedTuple):
    """One machine that holds layers of the model."""

    name: str
    parameters: int
    layers: tuple[int, int] | None = None
    """The first and the last; null: all of them."""
    alive: bool = True
    weight_bytes: int = 0
    memory_bytes: int = 0
    """What it had free when it came; 0: nobody knows."""
    token_s: float = 0.0
    """How long one token takes in its layers; 0: none went through them yet."""
    tokens: int = 0
    """Tokens that it has read."""
    has_ends: bool = True
    """Whether it embeds tokens and has the output matrix."""


class ForwardBatch(NamedTuple):
    """Tokens that the model reads next: a piece of one request's prompt, whole prompts of one length, or one token of each of several
    requests."""

    requests: tuple[int, ...]
    ids: tuple[tuple[int, ...], ...]
    """Of each request; as many of each."""
    ends: bool = True
    """False: more of this prompt follows, so nobody asks what the next token is."""

    @property
    def is_decoding(self) -> bool:
        """One token of each request, that is, no piece of a prompt that has several."""
        return len(self.ids[0]) == 1


def moving_average(before: float, now: float) -> float:
    """A mean of times that follows the newest ones; 0: there was none before."""
    return now if not before else 0.7 * before + 0.3 * now


class Backend(Protocol):
    """A language model that keeps a cache for each request, by number."""

    longest: int
    """Tokens that one request may have, prompt and answer together."""
    vocab_size: int

    @property
    def groups(self) -> int:
        """Works that it takes to keep all machines busy."""
        ...

    def start(self, work: ForwardBatch) -> None:
        """Let the model read. Works of one request are read in the order in which they were started."""
        ...

    def finished(self) -> Iterator[tuple[ForwardBatch, Tensor | None]]:
        """What was read, with the logits [B, V] of the tokens that come next, where somebody asks for them; it waits a moment where nothing
        is finished yet."""
        ...

    def rest(self, request: int) -> bool:
        """Keep the caches of a request that has ended, for others that begin like it. False: this model's caches cannot be shared, and the
        request is to be released."""
        ...

    def share(self, request: int, resting: int, length: int) -> bool:
        """Let a new request begin with the first tokens of one that rests. False: what was kept of that one is gone."""
        ...

    def release(self, request: int) -> None:
        """Forget what is kept of a request."""
        ...

    def drop(self) -> None:
        """Forget what was started and is not finished."""
        ...

    def machines(self) -> list[MachineStatus]:
        """Who holds which layers."""
        ...

    def close(self) -> None:
        """Let other machines go."""
        ...


def refuse_unserved(model: Any) -> None:
    """Raises ShoalError for models that do not write text."""
    if not hasattr(model, "next_logits"):
        raise ShoalError(f"a {type(model).__name__} does not write text; serving needs model.kind lstm, gpt, moe or huggingface")


def reads_beside(model: Any) -> bool:
    """Whether a model reads passages, a context or its memory beside its input."""
    return getattr(model, "memory", None) is not None or getattr(model, "reader", None) is not None


class LocalBackend:
    """The whole model on this machine."""

    groups = 1

    def __init__(self, model: Any, beside: SideTexts | None = None) -> None:
        """`beside`: where texts that are written find what the model reads. What each request has read is its own, so the requests of a
        model that reads are decoded one by one."""
        refuse_unserved(model)
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.memory_bytes, self.token_s, self.tokens = free_memory(), 0.0, 0
        pack_matrices(self.model, self.memory_bytes)
        self.vocab_size: int = model.vocab_size
        self.longest: int = model.max_seq_len or LONGEST_UNBOUNDED
        self.beside = beside
        self.rows = KvCaches(model.new_cache, getattr(model, "joins_rows", True) and not reads_beside(model), self.device)
        self._readers: dict[int, SideTextReader] = {}
        self._started: deque[ForwardBatch] = deque()

    def start(self, work: ForwardBatch) -> None:
        self._started.append(work)

    def finished(self) -> Iterator[tuple[ForwardBatch, Tensor | None]]:
        while self._started:
            work, start = self._started.popleft(), time.perf_counter()
            logits_BV = self._read(work)
            self.tokens += sum(map(len, work.ids))
            if work.is_decoding:
                self.token_s = moving_average(self.token_s, time.perf_counter() - start)
            yield work, logits_BV

    def drop(self) -> None:
        self._started.clear()

    @torch.inference_mode()
    def _read(self, work: ForwardBatch) -> Tensor | None:
        if not work.ends and hasattr(self.model, "project") and not reads_beside(self.model):
            # A model of our own can leave out the product with its output matrix, which is as large as many layers
            self.model.hidden(torch.tensor(work.ids, device=self.device), cache=self.rows.of_one(work.requests[0], len(work.ids[0])))
            return None
        if len(work.requests) == 1 or not self.rows.joins:
            return torch.cat([self._alone(request, ids) for request, ids in zip(work.requests, work.ids, strict=True)])
        cache, mask_BS = self.rows.of_several(work.requests, len(work.ids[0]))
        logits_BV: Tensor = self.model.next_logits(torch.tensor(work.ids, device=self.device), cache, mask_BS)
        return logits_BV

    def _alone(self, request: int, ids: Sequence[int]) -> Tensor:
        cache, ids_1L = self.rows.of_one(request, len(ids)), torch.tensor([ids], device=self.device)
        keywords = self._readers.setdefault(request, SideTextReader(self.model, self.beside)).after(ids_1L) if self.beside else {}
        logits_1V: Tensor = self.model.next_logits(ids_1L, cache, **keywords)
        return logits_1V

    def rest(self, request: int) -> bool:
        """What one cache holds can be given to another if it is keys and values, of which the last can be left out."""
        return self.rows.joins and hasattr(self.model.new_cache(0), "crop")

    @torch.inference_mode()
    def share(self, request: int, resting: int, length: int) -> bool:
        self.rows.share(request, resting, length)
        return True

    def release(self, request: int) -> None:
        self.rows.release(request)
        self._readers.pop(request, None)

    def machines(self) -> list[MachineStatus]:
        parameters = list(self.model.parameters())
        count, size = sum(one.numel() for one in parameters), sum(one.nbytes for one in parameters)
        return [MachineStatus("this machine", count, None, True, size, self.memory_bytes, self.token_s, self.tokens)]

    def close(self) -> None:
        """There are none."""
