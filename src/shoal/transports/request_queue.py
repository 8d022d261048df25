"""A server's queue of requests from many threads to the one thread that answers them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time

from shoal.transports import wire
from shoal.transports.interface import Frame, Message, Request, Traffic
from shoal.transports.request_rate import Rate, RateLimit

BATCH = 64
MOST_WAITING = 4096


class PendingRequest:
    """A request and the slot for its reply. An empty reply means that none will come."""

    def __init__(self, peer: bytes, number: int, message: Message, size: int, address: str = "") -> None:
        self.request = Request(peer, number, message, address=address)
        self.size = size
        self._reply: queue.SimpleQueue[list[Frame]] = queue.SimpleQueue()

    def put(self, parts: list[Frame]) -> None:
        self._reply.put(parts)

    def give_up(self) -> None:
        self._reply.put([])

    def wait(self, timeout_s: float) -> list[Frame]:
        """The parts of the reply. Raises TimeoutError if none came in time."""
        try:
            return self._reply.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise TimeoutError from None


class QueueServer:
    """Base of servers whose clients have threads in this process. `add`, `forget` and `wake` belong to any thread; `poll`, `reply` and
    `close` to one."""

    def __init__(self, max_frame_bytes: int, rate: Rate) -> None:
        self.limits = wire.Limits(max_frame_bytes)
        self.traffic = Traffic()
        self._rates = RateLimit(rate)
        self._inbox: queue.Queue[PendingRequest | None] = queue.Queue(MOST_WAITING)
        self._pending: dict[tuple[bytes, int], PendingRequest] = {}
        self._lock = threading.Lock()
        self.closed = False

    def add(self, peer: bytes, parts: list[Frame], address: str = "") -> PendingRequest:
        """Queue a request. One that is too large or comes too fast gets a refusal as its reply; Malformed is for the caller to handle.
        `address`: the peer's, for messages."""
        try:
            number, message = wire.decode(parts, self.limits)
        except wire.Oversized as problem:
            return self._refused(peer, problem.number, problem.reason, str(problem))
        pending = PendingRequest(peer, number, message, wire.size_of(parts), address)
        with self._lock:
            if self.closed:
                pending.give_up()
                return pending
        try:
            self._inbox.put_nowait(pending)
        except queue.Full:
            return self._refused(peer, number, "too-fast", "too many requests are waiting")
        return pending

    def _refused(self, peer: bytes, number: int, reason: str, why: str) -> PendingRequest:
        self.traffic.refuse(reason)
        refused = wire.refusal(reason, why)
        pending = PendingRequest(peer, number, refused, 0)
        pending.put(wire.encode(refused, number, self.limits))
        return pending

    def poll(self, timeout_s: float) -> list[Request]:
        requests: list[Request] = []
        try:
            pending = self._inbox.get(timeout_s > 0, max(0.0, timeout_s))
            while pending is not None:
                requests += self._accepted(pending)
                if len(requests) >= BATCH:
                    break
                pending = self._inbox.get_nowait()
        except queue.Empty:
            pass
        return requests

    def _accepted(self, pending: PendingRequest) -> list[Request]:
        request = pending.request
        self.traffic.receive(pending.size)
        if not self._rates.admits(request.peer, time.monotonic()):
            refused = self._refused(request.peer, request.number, "too-fast", self._rates.why)
            pending.put(refused.wait(0))
            return []
        self._pending[request.peer, request.number] = pending
        return [request]

    def reply(self, request: Request, message: Message) -> None:
        parts = wire.encode(message, request.number, self.limits)
        pending = self._pending.pop((request.peer, request.number), None)
        if pending is None:
            return self.traffic.refuse("gone")
        self.traffic.send(wire.size_of(parts))
        pending.put(parts)

    def forget(self, pending: PendingRequest) -> None:
        """From the caller's thread: it no longer waits for the reply."""
        self._pending.pop(pending.request[:2], None)

    def wake(self) -> None:
        with contextlib.suppress(queue.Full):  # then a poll has more than enough to wake up for
            self._inbox.put_nowait(None)

    def close(self) -> None:
        with self._lock:
            self.closed = True
        for pending in list(self._pending.values()):
            pending.give_up()
        while not self._inbox.empty():
            if left := self._inbox.get_nowait():
                left.give_up()
