"""What the engine needs of a model, wherever its layers are, and the model that is whole on one machine.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.models.cache import mask_of_rows

_LONGEST_UNBOUNDED = 32_768
"""Tokens that a request may have where the model itself has no longest sequence: its cache, or the time to read it, is bounded so."""


class Machine(NamedTuple):
    """One machine that holds layers of the model."""

    name: str
    parameters: int
    layers: tuple[int, int] | None = None
    """The first and the last; null: all of them."""
    alive: bool = True


class Stages(Protocol):
    """A language model that keeps a cache for each request, by number."""

    longest: int
    """Tokens that one request may have, prompt and answer together."""
    vocab_size: int

    def prefill(self, request: int, ids: Sequence[int]) -> Tensor:
        """Read more of a prompt; the logits [V] of the token after it."""
        ...

    def decode(self, requests: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Read one token of each request; the logits [B, V] of the tokens after them."""
        ...

    def release(self, request: int) -> None:
        """Forget what is kept of a request."""
        ...

    def machines(self) -> list[Machine]:
        """Who holds which layers."""
        ...


class OneNode:
    """The whole model on this machine. Requests that are decoded together have one joined cache, padded on the left."""

    def __init__(self, model: Any) -> None:
        if not hasattr(model, "next_logits"):
            raise ShoalError(f"a {type(model).__name__} does not write text; serving needs model.kind lstm, gpt, moe or huggingface")
        if getattr(model, "memory", None) is not None or getattr(model, "reader", None) is not None:
            raise ShoalError("a model that reads passages, a context or its memory is not served yet; `shoal generate` writes with it")
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.vocab_size: int = model.vocab_size
        self.longest: int = model.max_seq_len or _LONGEST_UNBOUNDED
        self.joins: bool = getattr(model, "joins_rows", True)
        """Whether requests are decoded together; some models of Hugging Face keep what cannot be joined."""
        self._alone: dict[int, Any] = {}
        self._members: list[int] = []
        self._joined: Any = None
        self._lengths: dict[int, int] = {}

    @torch.inference_mode()
    def prefill(self, request: int, ids: Sequence[int]) -> Tensor:
        if request not in self._lengths:
            self._alone[request], self._lengths[request] = self.model.new_cache(0), 0
        cache = self._own(request)
        self._lengths[request] += len(ids)
        logits_BV: Tensor = self.model.next_logits(torch.tensor([ids], device=self.device), cache)
        return logits_BV[0]

    @torch.inference_mode()
    def decode(self, requests: Sequence[int], ids: Sequence[int]) -> Tensor:
        if len(requests) == 1 or not self.joins:
            return torch.stack([self.prefill(request, [token]) for request, token in zip(requests, ids, strict=True)])
        if list(requests) != self._members:
            self._join(requests)
        for request in requests:
            self._lengths[request] += 1
        mask_BS = mask_of_rows([self._lengths[request] for request in requests], self.device) if self._joined.padded else None
        logits_BV: Tensor = self.model.next_logits(torch.tensor(ids, device=self.device)[:, None], self._joined, mask_BS)
        return logits_BV

    def release(self, request: int) -> None:
        self._alone.pop(request, None)
        self._lengths.pop(request, None)
        if not any(member in self._lengths for member in self._members):
            self._members, self._joined = [], None

    def machines(self) -> list[Machine]:
        return [Machine("this machine", sum(parameter.numel() for parameter in self.model.parameters()))]

    def _own(self, request: int) -> Any:
        """The request's cache outside the joined one."""
        if request not in self._alone:
            others = [member for member in self._members if member != request and member in self._lengths]
            self._alone[request] = type(self._joined).joined([self._row(request)])
            if others:
                self._join(others)
            else:
                self._members, self._joined = [], None
        return self._alone[request]

    def _join(self, requests: Sequence[int]) -> None:
        """Copy the requests' caches into one. It happens when a request comes or goes, and costs about as much as one token."""
        rows = [self._row(request) for request in requests]
        left_out = [member for member in self._members if member not in requests and member in self._lengths]
        for member in left_out:
            self._alone[member] = type(self._joined).joined([self._row(member)])
        self._joined, self._members = type(rows[0]).joined(rows), list(requests)
        for request in requests:
            self._alone.pop(request, None)

    def _row(self, request: int) -> Any:
        if request in self._alone:
            return self._alone[request]
        return self._joined.row(self._members.index(request), self._lengths[request])
