"""Pushes the newest state of a run from a thread of its own, so that the run never waits for a push and never fails because of one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from shoal.reporters.hub_repository import PushError
from shoal.reporters.model_card import CardFacts

FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 120.0


class Snapshot(NamedTuple):
    """The data of a run at one step that is pushed."""

    step: int
    facts: CardFacts
    weights: dict[str, Tensor]


class Pusher:
    """At most one state is under way and one waits; a newer one takes the place of the one that waits.

    A failure that may pass is tried again after longer and longer pauses, with the newest state. After a failure that will not pass by
    itself, the pusher tries again with the next state. Each reason is reported once.
    """

    def __init__(self, send: Callable[[Snapshot], None]) -> None:
        self.messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.pushed_step: int | None = None
        self.pushes = 0
        self.trouble = ""
        """Why the last attempt failed; empty if it succeeded."""
        self._send = send
        self._wakeup = threading.Condition()
        self._waiting: Snapshot | None = None
        self._not_before = 0.0
        self._asked_to_wait = False
        self._failures = 0
        self._until: float | None = None
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="hub", daemon=True)
        self._thread.start()

    def offer(self, state: Snapshot) -> None:
        """Push this state as soon as possible."""
        with self._wakeup:
            self._waiting = state
            self._wakeup.notify()

    def finish(self, within_s: float) -> None:
        """Wait until the last state is pushed, for at most `within_s` seconds."""
        with self._wakeup:
            self._until = time.monotonic() + within_s
            if not self._asked_to_wait:
                self._not_before = 0.0
            self._wakeup.notify()
        self._thread.join(within_s)
        if self._thread.is_alive():
            self.trouble = self.trouble or f"the hub took longer than {within_s:.0f} s"

    def _next_state(self) -> Snapshot | None:
        """The next state to push, once its time has come; None after `finish`."""
        with self._wakeup:
            while True:
                now = time.monotonic()
                if self._until is not None and (self._waiting is None or max(now, self._not_before) > self._until):
                    return None
                if self._waiting is not None and now >= self._not_before:
                    state, self._waiting = self._waiting, None
                    return state
                self._wakeup.wait(self._not_before - now if self._waiting is not None else None)

    def _work(self) -> None:
        while (state := self._next_state()) is not None:
            try:
                self._send(state)
            except PushError as error:
                self._failed(state, error)
            except Exception as error:
                self._failed(state, PushError(f"{type(error).__name__}: {error}", lasting=True))
            else:
                self.pushed_step, self.trouble, self._failures = state.step, "", 0
                self.pushes += 1

    def _failed(self, state: Snapshot, error: PushError) -> None:
        reason = self.trouble = str(error)
        with self._wakeup:
            self._failures += 1
            self._asked_to_wait = error.wait_s is not None
            own = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (self._failures - 1))
            self._not_before = time.monotonic() + (0.0 if error.lasting else own if error.wait_s is None else error.wait_s)
            if self._waiting is None and not error.lasting:
                self._waiting = state
        if reason not in self._told:
            self._told.add(reason)
            again = "the next upload tries again" if error.lasting else "it is tried again"
            self.messages.put(f"warning: step {state.step} did not get to the hub: {reason}; {again}, and training goes on")
