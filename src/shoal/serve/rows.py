"""The caches of requests, of a whole model or of a stage. Requests that are decoded together have one joined cache, padded on the left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.models.cache import mask_of_rows


class Rows:
    """A cache for each request, by number, and how many tokens it holds."""

    def __init__(self, new_cache: Callable[[int], Any], joins: bool, device: torch.device) -> None:
        """`joins`: whether requests are decoded together; some models of Hugging Face keep what cannot be joined."""
        self.joins, self.device, self._new_cache = joins, device, new_cache
        self._alone: dict[int, Any] = {}
        self._members: list[int] = []
        self._joined: Any = None
        self._lengths: dict[int, int] = {}

    @property
    def empty(self) -> bool:
        return not self._lengths and not self._alone and self._joined is None

    @property
    def requests(self) -> set[int]:
        """The requests of which a cache is here."""
        return set(self._lengths) | set(self._alone)

    def length(self, request: int) -> int:
        """Tokens that the request's cache holds."""
        return self._lengths.get(request, 0)

    def of_one(self, request: int, tokens: int) -> Any:
        """The request's own cache, into which so many tokens are read next."""
        if request not in self._lengths:
            self._alone[request], self._lengths[request] = self._new_cache(0), 0
        cache = self._own(request)
        self._lengths[request] += tokens
        return cache

    def of_several(self, requests: Sequence[int], tokens: int) -> tuple[Any, Tensor | None]:
        """The joined cache of requests of which so many tokens are read next, and the mask with those tokens; null: no row is padded.
        Either nothing of them was read before, or one token of each is read."""
        if not any(self.length(request) for request in requests):
            self._leave_out(requests)
            self._joined, self._members = self._new_cache(0), list(requests)
        elif list(requests) != self._members:
            self._join(requests)
        for request in requests:
            self._lengths[request] = self.length(request) + tokens
        lengths = [self._lengths[request] for request in requests]
        return self._joined, mask_of_rows(lengths, self.device) if self._joined.padded and len(set(lengths)) > 1 else None

    def rewind(self, request: int, length: int) -> None:
        """Forget all tokens of a request after so many."""
        if length == 0:
            self.release(request)
        elif length < self.length(request):
            self._own(request).crop(length)
            self._lengths[request] = length

    def share(self, request: int, other: int, length: int) -> None:
        """A request begins with a copy of the first tokens of another one, whose cache stays as it is."""
        held = self._lengths[other]
        view = self._own(other).row(0, held)
        if length < held:
            view.crop(length)
        self._alone[request], self._lengths[request] = type(view).joined([view]), length

    def release(self, request: int) -> None:
        self._alone.pop(request, None)
        self._lengths.pop(request, None)
        if not any(member in self._lengths for member in self._members):
            self._members, self._joined = [], None

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
        self._leave_out(requests)
        self._joined, self._members = type(rows[0]).joined(rows), list(requests)
        for request in requests:
            self._alone.pop(request, None)

    def _leave_out(self, requests: Sequence[int]) -> None:
        """Members that are not among these get caches of their own."""
        for member in [member for member in self._members if member not in requests and member in self._lengths]:
            self._alone[member] = type(self._joined).joined([self._row(member)])

    def _row(self, request: int) -> Any:
        if request in self._alone:
            return self._alone[request]
        return self._joined.row(self._members.index(request), self._lengths[request])
