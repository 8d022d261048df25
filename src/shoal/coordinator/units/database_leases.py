"""A board in a database where units are leased and weights hang out, as the driver works with it.

Results stay at the board until their round closes: then accepting them, closing the round, publishing the weights and issuing the next
units are one transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.coordinator.driver_interfaces import LeaseDatabase
from shoal.coordinator.effects import Effect, Issue, Published
from shoal.coordinator.events import LeaseResult, UnusableResult
from shoal.coordinator.machine import Coordinator
from shoal.coordinator.members.authentication import TokenBucket
from shoal.coordinator.rounds.weights_publisher import WeightsFeed, WeightsMessage
from shoal.errors import printable
from shoal.protocol.messages import BadMessage, Request, parse_from_leases

_NOTES_EVERY_S = 1.0
_NOTES_PER_S, _NOTES_AT_ONCE = 1.0, 200.0


class DatabaseNotes:
    """What a board wants people to know. It is asked once a second; what students said in it must not steer a terminal, nor fill it."""

    def __init__(self, board: LeaseDatabase) -> None:
        self.board = board
        self._next_at = 0.0
        self._room = TokenBucket(_NOTES_PER_S, _NOTES_AT_ONCE)

    def read(self, now: float) -> list[str]:
        """Warnings come first: a student that comes and goes all the time hides none."""
        if now < self._next_at:
            return []
        self._next_at = now + _NOTES_EVERY_S
        found = sorted(self.board.notes(), key=lambda note: not note.startswith("warning: "))
        shown = [printable(note) for note in found if self._room.take(now)]
        more = len(found) - len(shown)
        return [*shown, f"{more} more notes came from the database"] if more else shown


class DatabaseLeases:
    """What the coordinator hangs out and takes in at a board."""

    def __init__(self, board: LeaseDatabase, coordinator: Coordinator) -> None:
        self.board, self.coordinator = board, coordinator
        self.bulletin = WeightsFeed(coordinator.publisher)
        self.says_over = False
        """Whether the weights that hang out say that the run is over."""
        self._taken: list[Request] = []
        """Results that are in an open round, and still at the board."""
        self._effects: list[Effect] = []
        """What is to be done about them, when the round closes."""
        self._notes = DatabaseNotes(board)

    def goes_on(self) -> bool:
        """Whether what was on offer when the coordinator ended still is."""
        return self.board.iteration() == self.coordinator.state.version and self.board.has_open_units()

    def split(self, requests: list[Request]) -> tuple[list[Request], list[Request]]:
        """Questions of workers, and results of units."""
        results = [request for request in requests if self.board.is_from_leases(request)]
        return [request for request in requests if request not in results], results

    def take(self, request: Request, more: bool, now: float) -> bool:
        """A result counts, and is not passed on again: both or neither. Return whether a round has closed."""
        effects = self.coordinator.handle(_event_of(request, more), now)
        self._effects += effects
        self._taken.append(request)
        return any(isinstance(effect, (Published, Issue)) for effect in effects)

    def settle(self, carry_out: Callable[[list[Effect], Callable[[], None] | None], None]) -> None:
        """Have what was taken written down, and removed from the board, all together."""
        effects, requests = self._effects, self._taken
        self._effects, self._taken = [], []

        def consume() -> None:
            for request in requests:
                self.board.consume(request)

        carry_out(effects, consume if requests else None)

    def publish(self) -> None:
        """Hang out the newest weights, for all who lease units."""
        self._hang_out(self.coordinator.state.version, self.bulletin.notices(), self.coordinator.finished)

    def publish_last(self) -> None:
        """Hang out the last weights once more: the run is over. Workers read only newer weights, so they count as newer."""
        last = [WeightsMessage("full", {"weights": "full"}, self.coordinator.publisher.everything())]
        self._hang_out(self.coordinator.state.version + 1, last, True)

    def _hang_out(self, version: int, notices: list[WeightsMessage], done: bool) -> None:
        for kind, header, frames in notices:
            self.board.publish(version, kind, header | {"step": self.coordinator.step, "done": done}, frames)
        self.says_over = done

    def issue(self, effect: Issue) -> None:
        plan = self.coordinator.plan
        assert plan.cut is not None
        units = [plan.cut.unit(number) for number in effect.units]
        contributions = self.coordinator.policies.rounds.contributions
        quorum = contributions if plan.needed <= 1 else None  # a rule may need results of more workers
        self.board.issue(effect.version, units, plan.lease_s, plan.attempts, quorum)

    def notes(self, now: float) -> list[str]:
        """What the board wants people to know."""
        return self._notes.read(now)

    def some_are_here(self) -> bool:
        return any(worker["alive"] for worker in self.board.workers())


def _event_of(request: Request, more: bool) -> LeaseResult | UnusableResult:
    header: dict[str, Any] = request.message.header
    fields = {name: value for name, value in header.items() if name not in ("unit", "seq")}
    if header["kind"] == "delivered":
        fields["seq"] = header["unit"]  # which is handed in once, so it serves as the number of the contribution
    else:
        del fields["base"]
    try:
        return LeaseResult(parse_from_leases(fields), request.message.frames, more)
    except BadMessage as error:  # the figures in it are a worker's
        return UnusableResult(header["epoch"], header["start"], f"what {header.get('worker')} sent cannot be used: {error}")
