"""KV caches of requests, of a whole model or a stage, and the prefix cache. Requests decoded together share one, padded on the left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.generation.kv_cache import mask_of_rows

SHORTEST = 16
"""Tokens that a text, or what two have in common, must have: to copy fewer is not worth it."""


_MOST_REMOVED = 64
"""Columns of a joined cache that may be there only for tokens that were removed. Beyond that, the rows are copied without them."""


@dataclass(eq=False)
class _Joint:
    """A cache of several requests, which has a row for each. Rows of requests that have left it stay until it is forgotten."""

    members: tuple[int, ...]
    cache: Any
    columns: int
    """Tokens of each row, padding and removed tokens counted."""
    real_BS: Tensor | None = None
    """False at padding and at removed tokens. None: nothing was removed, so the rows' lengths say where padding is."""


class KvCaches:
    """A cache for each request, by number, and how many tokens it holds."""

    def __init__(self, new_cache: Callable[[int], Any], joins: bool, device: torch.device) -> None:
        """`joins`: whether requests are decoded together; some models of Hugging Face keep what cannot be joined."""
        self.joins, self.device, self._new_cache = joins, device, new_cache
        self._alone: dict[int, Any] = {}
        self._joints: dict[int, _Joint] = {}
        """The joined cache in which a request has its row. There are several where several groups of requests go through a pipeline."""
        self._lengths: dict[int, int] = {}

    @property
    def requests(self) -> set[int]:
        """The requests of which a cache is here."""
        return {*self._lengths, *self._alone, *self._joints}

    def length(self, request: int) -> int:
        """Tokens that the request's cache holds."""
        return self._lengths.get(request, 0)

    def of_one(self, request: int, tokens: int) -> Any:
        """The request's own cache, into which `tokens` tokens are read next."""
        if request not in self._lengths:
            self._alone[request], self._lengths[request] = self._new_cache(0), 0
        cache = self._own(request)
        self._lengths[request] += tokens
        return cache

    def of_several(self, requests: Sequence[int], tokens: int) -> tuple[Any, Tensor | None]:
        """The joined cache of requests of which `tokens` tokens each are read next, and the mask with those tokens; None: no row is padded.
        Either nothing of them was read before, or new tokens of answers are read."""
        joint = self._joined(tuple(requests))
        self._trim(joint)
        joint.columns += tokens
        for request in requests:
            self._lengths[request] = self.length(request) + tokens
        if joint.real_BS is not None:
            joint.real_BS = F.pad(joint.real_BS, (0, tokens), value=True)
            return joint.cache, joint.real_BS.long()
        lengths = [self._lengths[request] for request in requests]
        return joint.cache, mask_of_rows(lengths, self.device) if joint.cache.padded and len(set(lengths)) > 1 else None

    def rewind(self, request: int, length: int) -> None:
        """Remove all tokens of a request after the first `length`."""
        removed = self.length(request) - length
        if length == 0:
            self.release(request)
        elif removed > 0:
            if request in self._alone or removed > _MOST_REMOVED:
                self._own(request).crop(length)
            else:
                self._mark_removed(self._joints[request], request, removed)
            self._lengths[request] = length

    def _mark_removed(self, joint: _Joint, request: int, count: int) -> None:
        """The last tokens of a row stay in the joined cache, and the mask leaves them out: to copy the rows would cost more."""
        if joint.real_BS is None:
            joint.real_BS = torch.zeros(len(joint.members), joint.columns, dtype=torch.bool, device=self.device)
            for row, member in enumerate(joint.members):
                if self._joints.get(member) is joint:
                    joint.real_BS[row, joint.columns - self._lengths[member] :] = True
        real_S = joint.real_BS[joint.members.index(request)]
        real_S[real_S.nonzero()[-count:, 0]] = False

    def _trim(self, joint: _Joint) -> None:
        """Cut off the last columns that have tokens of no row, and forget the mask where nothing removed is left."""
        if joint.real_BS is None:
            return
        columns = int(joint.real_BS.any(0).nonzero()[-1]) + 1
        if columns < joint.columns:
            joint.cache.crop(columns)
            joint.columns, joint.real_BS = columns, joint.real_BS[:, :columns]
        lengths = [self._lengths[member] for member in joint.members]
        if max(lengths) == columns and torch.equal(joint.real_BS, mask_of_rows(lengths, self.device).bool()):
            joint.real_BS = None

    def copy_prefix(self, request: int, other: int, length: int) -> None:
        """A request begins with a copy of the first tokens of another one, whose cache stays as it is."""
        held = self._lengths[other]
        view = self._row(other).row(0, held)
        if length < held:
            view.crop(length)
        self._alone[request], self._lengths[request] = type(view).joined([view]), length

    def release(self, request: int) -> None:
        self._alone.pop(request, None)
        self._joints.pop(request, None)
        self._lengths.pop(request, None)

    def _own(self, request: int) -> Any:
        """The request's cache outside the joined ones."""
        if request not in self._alone:
            row = self._row(request)
            self._alone[request] = type(row).joined([row])
            del self._joints[request]
        return self._alone[request]

    def _joined(self, requests: tuple[int, ...]) -> _Joint:
        """One cache of all these requests. Their rows are copied where others were decoded with them before: it happens when a request
        comes or goes, and costs about as much as one token."""
        joint = self._joints.get(requests[0])
        longest = max(map(self.length, requests))
        is_whole = joint is not None and joint.members == requests and all(self._joints.get(one) is joint for one in requests)
        if joint is not None and is_whole and joint.columns - longest <= _MOST_REMOVED:
            return joint
        if longest:
            rows = [self._row(request) for request in requests]
            joint = _Joint(requests, type(rows[0]).joined(rows), longest)
        else:
            joint = _Joint(requests, self._new_cache(0), 0)
        for request in requests:
            self._alone.pop(request, None)
            self._joints[request] = joint
        return joint

    def _row(self, request: int) -> Any:
        if request in self._alone:
            return self._alone[request]
        joint = self._joints[request]
        row = joint.members.index(request)
        if joint.real_BS is None:
            return joint.cache.row(row, self._lengths[request])
        return joint.cache.row(row, joint.columns).select(joint.real_BS[row].nonzero()[:, 0])


class _KeptText(NamedTuple):
    """The tokens of an ended request, and the adapter with which their keys and values were computed."""

    ids: tuple[int, ...]
    adapter: str


class PrefixCache:
    """The kept texts, by the number of their request, and the one that was used last at the end. Together they are bounded. Each
    serves only requests of its own adapter."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.texts: dict[int, _KeptText] = {}

    @property
    def tokens(self) -> int:
        return sum(len(text.ids) for text in list(self.texts.values()))

    def longest(self, prompt: Sequence[int], adapter: str = "") -> tuple[int, int] | None:
        """The text that has most of the prompt's beginning, and how many tokens that are. The prompt's last token is always read."""
        fitting = ((number, text.ids) for number, text in self.texts.items() if text.adapter == adapter)
        found = max(((_common(ids, prompt[:-1]), number) for number, ids in fitting), default=(0, 0))
        if found[0] < SHORTEST:
            return None
        self.texts[found[1]] = self.texts.pop(found[1])
        return found[1], found[0]

    def add(self, number: int, text: Sequence[int], adapter: str = "") -> list[int]:
        """Keep a text. Return the requests whose caches to forget: shorter texts that it begins with, the longest unused, or itself."""
        kept = tuple(text)
        others = {one: text.ids for one, text in self.texts.items() if text.adapter == adapter}
        if len(kept) < SHORTEST or len(kept) > self.most_tokens or any(_common(ids, kept) == len(kept) for ids in others.values()):
            return [number]
        gone = [one for one, shorter in others.items() if _common(shorter, kept) == len(shorter)]
        for one in gone:
            self.forget(one)
        self.texts[number] = _KeptText(kept, adapter)
        while self.tokens > self.most_tokens:
            gone.append(next(iter(self.texts)))
            self.forget(gone[-1])
        return gone

    def forget_oldest(self) -> int | None:
        """Forget the text that was used least recently, and return its number; None: there is none."""
        number = next(iter(self.texts), None)
        if number is not None:
            self.forget(number)
        return number

    def forget(self, number: int) -> None:
        self.texts.pop(number, None)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(left), len(right)))
