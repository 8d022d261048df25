"""Permits for large messages, so that a server's memory does not grow with the number of clients that send at the same time.

ZeroMQ takes in what every client sends, and hands a message over when it is whole. So a client asks for a permit before a large message,
and the server lets a few of them send at a time. A permit lapses after the time that its message should take: a slow client then no longer
keeps others waiting. Addresses take turns, so that many connections from one of them delay the others little. A client that does not ask is
limited by `byte_limits.py` alone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

LARGE_BYTES = 32 << 20
"""Messages from this size on need a permit."""
KIND, GO, LATER = "permit", {"kind": "go"}, {"kind": "later"}
_ANSWER_AFTER_S = 5.0
"""A client that waits is answered that often, so that it knows that the server is there."""
_PERMIT_S, _BYTES_PER_S = 2.0, 20e6
"""How long a permit holds: some seconds, and as long as its message takes on a line of 160 Mbit/s."""
_MOST_WAITING, _MOST_ADDRESSES = 10_000, 1000


class Waiting(NamedTuple):
    """A client that waits for a permit."""

    peer: bytes
    address: str
    number: int
    """The number of its request; -1: it was told to ask again, and keeps its place until then."""
    size: int
    since: float


class PermitAnswer(NamedTuple):
    peer: bytes
    number: int
    header: dict[str, str]


class UploadPermits:
    """Which clients may send a large message now."""

    def __init__(self, at_once: int, largest_message: int) -> None:
        self.at_once, self._largest = at_once, largest_message
        self.given: OrderedDict[bytes, float] = OrderedDict()
        """By client with a permit: when that lapses."""
        self.waiting: OrderedDict[bytes, Waiting] = OrderedDict()
        self._turns: OrderedDict[str, float] = OrderedDict()
        """By address: when it last got a permit."""

    def ask(self, peer: bytes, address: str, number: int, size: object, now: float) -> None:
        """A client asks. If it asked before, it keeps its place."""
        self.finish(peer)
        if peer in self.waiting or len(self.waiting) < _MOST_WAITING:
            known = min(size, self._largest) if type(size) is int and size >= 0 else 0
            self.waiting[peer] = Waiting(peer, address, number, known, now)

    def finish(self, peer: bytes) -> None:
        """A message of this client is whole."""
        self.given.pop(peer, None)

    def answers(self, now: float) -> list[PermitAnswer]:
        """The answers that are due: permits, and notices to those that have waited for some seconds, which then ask again."""
        if not self.waiting:
            return []
        for peer in [peer for peer, until in self.given.items() if until <= now]:
            del self.given[peer]
        due = []
        while len(self.given) < self.at_once and (first := self._next()) is not None:
            del self.waiting[first.peer]
            self.given[first.peer] = now + _PERMIT_S + first.size / _BYTES_PER_S
            self._note_turn(first.address, now)
            due.append(PermitAnswer(first.peer, first.number, GO))
        for one in [one for one in self.waiting.values() if now - one.since >= _ANSWER_AFTER_S]:
            if one.number < 0:
                del self.waiting[one.peer]
            else:
                due.append(PermitAnswer(one.peer, one.number, LATER))
                self.waiting[one.peer] = one._replace(number=-1, since=now)
        return due

    def _next(self) -> Waiting | None:
        """The first client that waits of the address whose last permit is the longest ago."""
        asking = [one for one in self.waiting.values() if one.number >= 0]
        return min(asking, key=lambda one: self._turns.get(one.address, float("-inf")), default=None)

    def _note_turn(self, address: str, now: float) -> None:
        self._turns.pop(address, None)
        self._turns[address] = now
        if len(self._turns) > _MOST_ADDRESSES:
            self._turns.popitem(last=False)
