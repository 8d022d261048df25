"""The interface of servers, which the coordinator uses and transports implement, and their traffic counts."""

from __future__ import annotations

import threading
from typing import Protocol

from shoal.protocol.messages import Message, Request


class Traffic:
    """What went through, and what was turned away. Several threads may count at once."""

    def __init__(self) -> None:
        self.received_bytes = 0
        self.sent_bytes = 0
        self.messages = 0
        """Messages received, refused ones among them."""
        self.refused: dict[str, int] = {}
        """By reason: oversized, malformed, unauthorised, handshake (broken off), too-fast, crowded (too many connections),
        late (a reply that its caller no longer waits for), gone (the caller has disconnected)."""
        self._lock = threading.Lock()

    def receive(self, size: int) -> None:
        with self._lock:
            self.received_bytes += size
            self.messages += 1

    def send(self, size: int) -> None:
        with self._lock:
            self.sent_bytes += size

    def refuse(self, reason: str) -> None:
        with self._lock:
            self.refused[reason] = self.refused.get(reason, 0) + 1


class Server(Protocol):
    """Receives requests and replies to them. `poll`, `reply` and `close` belong to one thread; `wake` to any."""

    address: str
    """What workers connect to."""
    traffic: Traffic

    def poll(self, timeout_s: float) -> list[Request]:
        """The requests that wait, as soon as there is one; an empty list after the timeout, or when woken."""

    def reply(self, request: Request, message: Message) -> None:
        """Answer a request, now or much later. A peer that has gone is no error."""

    def wake(self) -> None:
        """Make a `poll` in progress return early."""

    def close(self) -> None:
        """Stop listening. Answers already given still leave, for a moment."""
