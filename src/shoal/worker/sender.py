"""Sends a worker's requests while it computes, over a connection that may break, until the session has no more requests.

If a step takes less than 50 ms, the worker's own thread posts the request: handing a small one over to another thread takes longer.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from shoal.errors import ShoalError
from shoal.protocol.messages import Frames, Pull, header_of
from shoal.worker.session import ANSWER_S, FIRST_PAUSE_S, TOO_FAST, SessionEndedError, SessionEvent, SessionRequest, WorkerSession
from shoal.worker.timing import LinkMeasurements

JOINING_PAUSE_S = 2.0
"""Pause between two attempts to join when too many workers join at once."""


class CoordinatorAnswer(NamedTuple):
    """Header and frames of the coordinator's answer."""

    header: dict[str, Any]
    frames: Frames


class ConnectionLostError(Exception):
    """No answer came or the connection broke; it may come back."""


class CoordinatorConnection(Protocol):
    """A connection to the coordinator, or to a database that answers in its place."""

    def call(self, header: dict[str, Any], frames: Frames, timeout_s: float) -> CoordinatorAnswer:
        """Send a request and wait for the answer. Raises ConnectionLostError, or ShoalError if a retry is of no use."""

    def post(self, header: dict[str, Any], frames: Frames) -> bool:
        """Send a request without waiting for the answer. Returns False if the connection does not support that. Raises like `call`."""

    def answer(self, timeout_s: float) -> CoordinatorAnswer:
        """Wait for the answer to the posted request. Raises like `call`."""

    def still_wanted(self, unit: int) -> bool:
        """Whether a unit's lease still holds, as far as the connection knows. The call is cheap."""

    def wake(self) -> None:
        """Interrupt a call that waits for work. Any thread may call this."""

    def close(self) -> None: ...


class Sender:
    """Drives one worker's session over a connection. Only one thread at a time exchanges messages."""

    def __init__(
        self,
        connection: CoordinatorConnection,
        protocol: WorkerSession,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connection, self.protocol, self.report, self.clock = connection, protocol, report, clock
        self._random = random.Random()
        """Randomises pauses, so that workers which lost their coordinator at the same time do not all return at once."""
        self.round_trip_s, self.link = 0.0, LinkMeasurements()
        self._told_lost = False
        """Whether the user was told that the coordinator does not answer."""
        self._closing = threading.Event()
        self._jobs: queue.SimpleQueue[Future[list[SessionEvent]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def exchange(self) -> list[SessionEvent]:
        """Send all requests of the session and wait for the answers. Returns the resulting events."""
        return self._exchange(self.clock(), posted=None)

    def send(self, soon: bool) -> Callable[[], list[SessionEvent]]:
        """Begin to send the session's requests. Returns at once a function that waits for the resulting events. `soon`: the calling thread
        will ask for them shortly; the request is then posted from this thread, if the connection supports that."""
        started = self.clock()
        if soon and (question := self.protocol.next_request(started)) is not None and self._post(question):
            return lambda: self._exchange(started, question)
        return self.begin().result

    def begin(self) -> Future[list[SessionEvent]]:
        """Send the session's requests from the sender's thread."""
        future: Future[list[SessionEvent]] = Future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="sender", daemon=True)
            self._thread.start()
        self._jobs.put(future)
        return future

    def leave_early(self, reason: str) -> None:
        """Leave early and report the reason if the coordinator is reachable. A request that is under way is finished first."""
        self.protocol.stop()
        self.protocol.leave(reason)
        with contextlib.suppress(ShoalError, ConnectionLostError):
            self.exchange() if self._thread is None else self.send(soon=False)()

    def send_heartbeat(self, connection: CoordinatorConnection, state: str, figures: Mapping[str, float]) -> None:
        """Send a heartbeat over a connection of its own, as a long upload may be under way. A lost heartbeat does no harm."""
        if not self.protocol.session:
            return
        with contextlib.suppress(ConnectionLostError, ShoalError):
            heartbeat, began = self.protocol.heartbeat(state, figures), self.clock()
            self.protocol.on_heartbeat_answer(connection.call(header_of(heartbeat), (), ANSWER_S).header)
            self.link.answered(self.clock() - began)
            if self.protocol.notice:
                self.report(f"warning: {self.protocol.notice}")

    def close(self) -> None:
        """Stop. Requests that are under way are abandoned."""
        self._closing.set()
        self._jobs.put(None)
        self.connection.close()
        if self._thread is not None:
            self._thread.join(5.0)

    # --- requests and answers ----------------------------------------------------------------------

    def _post(self, question: SessionRequest) -> bool:
        with contextlib.suppress(ConnectionLostError):
            return self.connection.post(header_of(question.asked), question.frames)
        return False

    def _exchange(self, started: float, posted: SessionRequest | None) -> list[SessionEvent]:
        """`posted`: a request that was already sent and whose answer is still to be received."""
        events: list[SessionEvent] = []
        while (question := posted or self.protocol.next_request(self.clock())) is not None:
            asked_at = self.clock()
            answer, posted = self._ask(question, posted is not None), None
            if answer is None:
                continue
            if isinstance(question.asked, Pull):  # only pulls are answered at once, independently of the other workers
                self.link.carried(sum(map(len, answer.frames)), self.clock() - asked_at)
            events += self.protocol.on_answer(answer.header, answer.frames)
            if self.protocol.forgotten:
                self.report(self.protocol.forgotten)
                self.protocol.forgotten = ""
            if answer.header["kind"] == "refused" and (self.protocol.session or answer.header.get("reason") == TOO_FAST):
                self._closing.wait((FIRST_PAUSE_S if self.protocol.session else JOINING_PAUSE_S) * self._random.uniform(0.7, 1.3))
            else:
                self.round_trip_s = self.clock() - started
        return events

    def _ask(self, question: SessionRequest, posted: bool) -> CoordinatorAnswer | None:
        """Send one request and return the answer; None: no answer came, and the request has to be repeated."""
        try:
            if posted:
                answer = self.connection.answer(question.timeout_s)
            else:
                answer = self.connection.call(header_of(question.asked), question.frames, question.timeout_s)
            if self._told_lost:
                self._told_lost = False
                self.report("the coordinator answers again: going on")
            return answer
        except ConnectionLostError as lost:
            retry = self.protocol.on_no_answer(self.clock(), str(lost))
            if self._closing.is_set() and not self.protocol.left:
                raise SessionEndedError("closed") from None
            if retry.message:
                self._told_lost = True
                self.report(retry.message)
            self._closing.wait(retry.pause_s * self._random.uniform(0.7, 1.3))
            return None

    def _work(self) -> None:
        while (future := self._jobs.get()) is not None:
            try:
                future.set_result(self.exchange())
            except BaseException as error:
                future.set_exception(error)


class HeartbeatThread:
    """Sends heartbeats at regular intervals while it is open."""

    def __init__(self, send: Callable[[], None], interval_s: float) -> None:
        self.send, self.interval_s = send, interval_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._closing.wait(self.interval_s):
            self.send()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5.0)
