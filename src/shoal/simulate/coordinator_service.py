"""The real coordinator in virtual time, as virtual workers reach it: requests and answers travel over simulated links."""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal.coordinator import Coordinator
from shoal.coordinator.driver import CoordinatorDriver, DriverDeps, SnapshotContent
from shoal.coordinator.effects import Published
from shoal.coordinator.events import RequestReceived
from shoal.protocol.messages import Contribute, Frames, Message, WorkerRequest
from shoal.simulate.event_queue import EventQueue
from shoal.simulate.links import Link
from shoal.simulate.report import SimulationReport
from shoal.simulate.virtual_store import CallbackServer, CountingStore
from shoal.worker.session import SLOWEST_LINK_BYTES_PER_S, SessionRequest

_HEADER_BYTES = 300
"""Size of a message without its frames, on the wire."""
_TIMED_HEARTBEATS = 16
"""One in this many heartbeats is timed and counts for all: reading the thread's CPU time takes a tenth as long as handling a heartbeat."""
SERVICE_S = 0.0003
SERVICE_BYTES_PER_S = 0.7e9
"""Assumed cost of a request to a coordinator that handles one at a time: an estimate for two slow cores, not a measurement."""

OnAnswer = Callable[[Message], None]


class CoordinatorService:
    """A coordinator with its driver. Holds: requests are handled in the order of their arrival, and answers leave after them."""

    def __init__(
        self,
        coordinator: Coordinator,
        store: CountingStore,
        published: Callable[[Published, bool], None],
        say: Callable[[str], None],
        timeline: EventQueue,
        report: SimulationReport,
        scale: float,
    ) -> None:
        """`scale`: bytes on a simulated link per byte of a frame."""
        self.coordinator, self.finishing = coordinator, False
        """`finishing`: the run is over, and virtual time continues only so that workers receive the reply that the run is over."""
        self._timeline, self._report, self._scale = timeline, report, scale
        self._sessions, self._busy_until = 0, 0.0
        coordinator.authenticator.is_proved = lambda *claimed: True  # signatures take CPU time, and virtual workers do not forge any
        self.driver = CoordinatorDriver(
            coordinator,
            DriverDeps(
                server=CallbackServer(),
                store=store,
                published=published,
                say=say,
                welcome=Message({"size": round(scale * coordinator.learner.vector.numel())}),
                capture=lambda: SnapshotContent({}, {}),
                clock=lambda: timeline.now,
                new_session=self._new_session,
                threads=False,
            ),
        )

    def _new_session(self) -> str:
        self._sessions += 1
        return f"session-{self._sessions}"

    def send(self, link: Link, asked: WorkerRequest, frames: Frames, on_answer: OnAnswer) -> bool:
        """Send a request. Returns whether it will arrive; `on_answer` is called when the answer has travelled back, if it does."""
        size = self._size(frames)
        arrives = link.arrival(size, self._timeline.now, down=False)
        self._report.received_bytes += size
        if arrives is None:
            return False
        self._timeline.at(arrives, self._receive, link, asked, frames, on_answer)
        return True

    def timeout_s(self, request: SessionRequest) -> float:
        """How long a worker waits for an answer: the session's timeout, plus the time of the bytes that only the simulated link counts."""
        more_bytes = (self._scale - 1) * sum(map(len, request.frames)) if request.frames else 0.0
        return request.timeout_s + more_bytes / SLOWEST_LINK_BYTES_PER_S

    def _size(self, frames: Frames) -> float:
        return _HEADER_BYTES + self._scale * sum(map(len, frames)) if frames else _HEADER_BYTES

    def _receive(self, link: Link, asked: WorkerRequest, frames: Frames, on_answer: OnAnswer) -> None:
        self._busy_until = max(self._timeline.now, self._busy_until) + SERVICE_S + self._size(frames) / SERVICE_BYTES_PER_S

        def reply(message: Message) -> None:
            size = self._size(message.frames)
            self._report.sent_bytes += size
            arrives = link.arrival(size, max(self._timeline.now, self._busy_until), down=True)
            if arrives is not None:  # else the worker waits until its timeout
                self._timeline.at(arrives, on_answer, message)

        self._handle(RequestReceived(reply, asked, frames, self._new_session()))
        if isinstance(asked, Contribute):
            member = self.coordinator.members.by_session.get(asked.session)
            if member is not None:
                self._report.lags[member.lag] += 1

    def heartbeat(self, asked: WorkerRequest, on_answer: OnAnswer) -> None:
        """Handle a heartbeat that has arrived. Its answer takes no time: nothing depends on when it arrives."""
        self._report.heartbeats += 1
        request = RequestReceived(on_answer, asked)
        if self._report.heartbeats % _TIMED_HEARTBEATS:
            self.driver.handle(request)
        else:
            self._handle(request, _TIMED_HEARTBEATS)

    def _handle(self, request: RequestReceived, counts_for: int = 1) -> None:
        began = time.thread_time()
        self.driver.handle(request)
        self._report.coordinator_s += counts_for * (time.thread_time() - began)
        self._stop_if_finished()

    def tick(self) -> None:
        """Let the coordinator act on the time that has passed."""
        began = time.thread_time()
        self.driver.step(0.0)
        self._report.ticks_s += time.thread_time() - began
        self._stop_if_finished()

    def _stop_if_finished(self) -> None:
        if self.coordinator.finished and not self.finishing:
            self._timeline.stop()
