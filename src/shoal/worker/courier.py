"""Carries a worker's messages beside its computing: in order, one at a time, again until they are answered.

A connection that is lost is tried again with growing pauses. A coordinator that came back does not know the session any more: the worker
joins again under its name, and the message goes out once more. What it carries has a number, so it is never taken twice.
"""

from __future__ import annotations

import contextlib
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from shoal.errors import ShoalError
from shoal.updates.messages import Asked, Contribute, Heartbeat, Join, Leave, header_of

Frames = Sequence[bytes | memoryview]
_SLOWEST_LINK = 50_000
"""Bytes a second: a message that takes longer than this is taken for lost."""
_ANSWER_S = 10.0
_LONGEST_PAUSE_S = 5.0
_ASK_AGAIN = ("too-fast", "replayed", "asked-again")
"""Refusals of this one message, not of what it asks: somebody on the way doubled it, or there were too many."""


class Answer(NamedTuple):
    """What the coordinator said."""

    header: dict[str, Any]
    frames: Frames


class Lost(Exception):
    """No answer, or the connection is gone; it may come back."""


class Line(Protocol):
    """A connection to the coordinator."""

    def call(self, header: dict[str, Any], frames: Frames, timeout_s: float) -> Answer:
        """Ask and wait. Raises Lost, or ShoalError where asking again is of no use."""
        ...

    def post(self, header: dict[str, Any], frames: Frames) -> bool:
        """Ask without waiting; False where the line cannot. Raises like `call`."""
        ...

    def answer(self, timeout_s: float) -> Answer:
        """Wait for the answer to what was posted. Raises like `call`."""
        ...

    def close(self) -> None: ...


class Pending(Protocol):
    """An answer that may not be there yet."""

    def result(self) -> Answer: ...


class _Posted(NamedTuple):
    """An answer that is waited for by whoever wants it."""

    result: Callable[[], Answer]


class Left(ShoalError):
    """The worker is not wanted any more."""


class Courier:
    """The messages of one worker. `ask` returns at once; the answer comes when it comes."""

    def __init__(self, line: Line, joining: Join, patience_s: float, tell: Callable[[str], None]) -> None:
        self.line, self.patience_s, self.tell = line, patience_s, tell
        self.joining = joining._replace(instance=secrets.token_hex(8))
        self.session = ""
        self.welcome: dict[str, Any] = {}
        self.sessions = 0
        """How often it has joined: who holds weights from another session asks for them anew."""
        self.round_trip_s = 0.0
        self._numbers = {False: 0, True: 0}
        self._closing = threading.Event()
        self._jobs: queue.SimpleQueue[tuple[Future[Answer], Asked, Frames] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="courier", daemon=True)

    def join(self) -> Answer:
        """Take part. The answer is the coordinator's welcome."""
        answer = self._join()
        self._thread.start()
        return answer

    def ask(self, asked: Asked, frames: Frames = (), soon: bool = False) -> Pending:
        """`soon`: the answer is asked for before long, by this thread. Where the line can, the message is then sent here and now: to hand a
        small one over to the courier's thread takes longer than to send it."""
        started = time.monotonic()
        if soon and self._post(asked, frames):
            return _Posted(lambda: self._deliver(asked, frames, posted_at=started))
        future: Future[Answer] = Future()
        self._jobs.put((future, asked, frames))
        return future

    def close(self) -> None:
        """Stop. Whatever is still under way is given up."""
        self._closing.set()
        self._jobs.put(None)
        self.line.close()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def beat(self, line: Line, state: str) -> bool:
        """A sign of life, over a line of its own, so that a long upload does not look like death. One that is lost is no matter.
        Whether the run is over, as far as is known."""
        with contextlib.suppress(Lost, ShoalError):
            return bool(line.call(self._addressed(Heartbeat("", 0, state)), (), _ANSWER_S).header.get("done"))
        return False

    def _post(self, asked: Asked, frames: Frames) -> bool:
        with contextlib.suppress(Lost):
            return self.line.post(self._addressed(asked), frames)
        return False

    # --- the thread --------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, asked, frames = job
            try:
                future.set_result(self._deliver(asked, frames))
            except BaseException as error:
                future.set_exception(error)

    def _deliver(self, asked: Asked, frames: Frames, posted_at: float | None = None) -> Answer:
        """Ask until there is an answer. `posted_at`: it was asked once already."""
        if isinstance(asked, Leave):
            return self._leave(asked)
        session = self.sessions
        while True:
            started = posted_at or time.monotonic()
            answer = self._insist(lambda: self._addressed(asked), frames, 4 * self.welcome.get("size", 0), posted_at is not None)
            posted_at = None
            reason = answer.header.get("reason") if answer.header.get("kind") == "refused" else None
            if reason is None:
                self.round_trip_s = time.monotonic() - started
                return answer
            if reason == "unknown-session":
                if self.sessions == session:
                    self._join()
                if isinstance(asked, Contribute):  # the caller must see the new weights before it sends this again
                    taken = asked.seq == self.welcome["last_seq"]
                    return Answer({"kind": "rejoined", "taken": taken}, ())
                session = self.sessions
            elif reason in _ASK_AGAIN:
                self._closing.wait(0.1)
            else:
                raise Left(f"the coordinator refused: {answer.header.get('detail') or reason}")

    def _leave(self, asked: Leave) -> Answer:
        """Say goodbye once: a coordinator that is gone, or has never heard of us, need not know."""
        with contextlib.suppress(Lost):
            return self.line.call(self._addressed(asked), (), _ANSWER_S)
        return Answer({"kind": "goodbye"}, ())

    def _insist(self, header: Callable[[], dict[str, Any]], frames: Frames, answer_bytes: int = 0, posted: bool = False) -> Answer:
        """Call until the line answers, or patience is at its end. The answer may be as long as all weights are: over a slow link that takes
        its time, and to ask again would make it longer."""
        size = sum(len(frame) for frame in frames) + answer_bytes
        timeout = _ANSWER_S + size / _SLOWEST_LINK if size else min(_ANSWER_S, max(0.1, self.patience_s))
        since, pause = time.monotonic(), 0.1
        while True:
            try:
                return self.line.answer(timeout) if posted else self.line.call(header(), frames, timeout)
            except Lost as lost:
                posted = False
                if self._closing.is_set():
                    raise Left("closed") from None
                gone = time.monotonic() - since
                if gone > self.patience_s:
                    raise ShoalError(f"the coordinator has not answered for {gone:.0f} s: {lost}") from None
                if pause >= 0.4:
                    self.tell(f"the coordinator does not answer ({lost}); trying again")
                self._closing.wait(pause * random.uniform(0.7, 1.3))
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _join(self) -> Answer:
        answer = self._insist(lambda: header_of(self.joining), ())
        if answer.header.get("kind") != "welcome":
            raise Left(f"the coordinator refused: {answer.header.get('detail') or answer.header.get('reason')}")
        self.welcome, self.session = answer.header, answer.header["session"]
        self.joining = self.joining._replace(name=answer.header["name"])
        self.sessions += 1
        return answer

    def _addressed(self, asked: Asked) -> dict[str, Any]:
        beats = isinstance(asked, Heartbeat)
        self._numbers[beats] += 1
        return header_of(asked) | {"session": self.session, "number": self._numbers[beats]}


class Pulse:
    """Signs of life, at regular times, for as long as it is open."""

    def __init__(self, beat: Callable[[], None], interval_s: float) -> None:
        self.beat, self.interval_s = beat, interval_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._closing.wait(self.interval_s):
            self.beat()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5.0)
