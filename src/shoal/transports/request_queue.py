"""Where threads that ask meet the one thread that answers: behind every server whose clients are served by threads of this process."""

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
    """A question, and the box its answer will be put in. An empty answer means that none will come."""

    def __init__(self, peer: bytes, number: int, message: Message, size: int, address: str = "") -> None:
        self.request = Request(peer, number, message, address=address)
        self.size = size
        self._box: queue.SimpleQueue[list[Frame]] = queue.SimpleQueue()

    def put(self, parts: list[Frame]) -> None:
        self._box.put(parts)

    def give_up(self) -> None:
        self._box.put([])

    def answer(self, timeout_s: float) -> list[Frame]:
        """The answer's parts; TimeoutError where none came in time."""
        try:
            return self._box.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise TimeoutError from None


class RequestQueue:
    """`ask` and `wake` belong to any thread; `poll`, `reply` and `close` to one."""

    def __init__(self, limits: wire.Limits, traffic: Traffic, rate: Rate) -> None:
        self.limits = limits
        self.traffic = traffic
        self._rates = RateLimit(rate)
        self._inbox: queue.Queue[PendingRequest | None] = queue.Queue(MOST_WAITING)
        self._waiting: dict[tuple[bytes, int], PendingRequest] = {}
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, peer: bytes, parts: list[Frame], address: str = "") -> PendingRequest:
        """Queue a question. One that cannot be passed on is answered at once, with a refusal; Malformed is for the asker to handle.
        `address`: where the peer is, for people."""
        try:
            number, message = wire.decode(parts, self.limits)
        except wire.Oversized as problem:
            return self._refused(peer, problem.number, problem.reason, str(problem))
        waiting = PendingRequest(peer, number, message, wire.size_of(parts), address)
        with self._lock:
            if self._closed:
                waiting.give_up()
                return waiting
        try:
            self._inbox.put_nowait(waiting)
        except queue.Full:
            return self._refused(peer, number, "too-fast", "too many questions wait here")
        return waiting

    def _refused(self, peer: bytes, number: int, reason: str, why: str) -> PendingRequest:
        self.traffic.refuse(reason)
        refused = wire.refusal(reason, why)
        waiting = PendingRequest(peer, number, refused, 0)
        waiting.put(wire.encode(refused, number, self.limits))
        return waiting

    def poll(self, timeout_s: float) -> list[Request]:
        requests: list[Request] = []
        try:
            waiting = self._inbox.get(timeout_s > 0, max(0.0, timeout_s))
            while waiting is not None:
                requests += self._accepted(waiting)
                if len(requests) >= BATCH:
                    break
                waiting = self._inbox.get_nowait()
        except queue.Empty:
            pass
        return requests

    def _accepted(self, waiting: PendingRequest) -> list[Request]:
        request = waiting.request
        self.traffic.receive(waiting.size)
        if not self._rates.admits(request.peer, time.monotonic()):
            refused = self._refused(request.peer, request.number, "too-fast", self._rates.why)
            waiting.put(refused.answer(0))
            return []
        self._waiting[request.peer, request.number] = waiting
        return [request]

    def reply(self, request: Request, message: Message) -> None:
        parts = wire.encode(message, request.number, self.limits)
        waiting = self._waiting.pop((request.peer, request.number), None)
        if waiting is None:
            return self.traffic.refuse("gone")
        self.traffic.send(wire.size_of(parts))
        waiting.put(parts)

    def forget(self, waiting: PendingRequest) -> None:
        """From the asker's thread: it no longer waits."""
        self._waiting.pop(waiting.request[:2], None)

    def wake(self) -> None:
        with contextlib.suppress(queue.Full):  # then a poll has more than enough to wake up for
            self._inbox.put_nowait(None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for waiting in list(self._waiting.values()):
            waiting.give_up()
        while not self._inbox.empty():
            if left := self._inbox.get_nowait():
                left.give_up()
