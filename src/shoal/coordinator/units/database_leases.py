"""Leases and weights in a database, as the driver uses them.

Results stay in the database until their round closes: then accepting them, closing the round, publishing the weights and issuing the next
units are one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal.coordinator.driver_interfaces import LeaseDatabase
from shoal.coordinator.effects import Effect, Issue, Published
from shoal.coordinator.events import LeaseResult, UnusableResult
from shoal.coordinator.machine import Coordinator
from shoal.coordinator.members.authentication import NOTES_AT_ONCE, NOTES_PER_S, TokenBucket
from shoal.coordinator.rounds.weights_publisher import WeightsFeed, WeightsMessage
from shoal.errors import printable
from shoal.protocol.messages import STOPPED, BadMessage, Request, parse_from_leases

_NOTES_EVERY_S = 1.0


class DatabaseNotes:
    """Notes from the database, read once a second. They contain students' text, so they are made printable and rate-limited."""

    def __init__(self, database: LeaseDatabase) -> None:
        self.database = database
        self._next_at = 0.0
        self._limit = TokenBucket(NOTES_PER_S, NOTES_AT_ONCE)

    def read(self, now: float) -> list[str]:
        """New notes, warnings first, so that frequent notes cannot hide them."""
        if now < self._next_at:
            return []
        self._next_at = now + _NOTES_EVERY_S
        found = sorted(self.database.notes(), key=lambda note: not note.startswith("warning: "))
        shown = [printable(note) for note in found if self._limit.take(now)]
        more = len(found) - len(shown)
        return [*shown, f"{more} more notes came from the database"] if more else shown


class DatabaseLeases:
    """Weights that the coordinator publishes in the database, and results that it takes from there."""

    def __init__(self, database: LeaseDatabase, coordinator: Coordinator) -> None:
        self.database, self.coordinator = database, coordinator
        self.feed = WeightsFeed(coordinator.publisher)
        self.published_end = False
        """Whether the published weights say that the run is over."""
        self._taken: list[Request] = []
        """Results that are in an open round, and still in the database."""
        self._effects: list[Effect] = []
        """Effects to carry out when the round closes."""
        self.notes = DatabaseNotes(database)
        self._count_workers()

    def _count_workers(self) -> None:
        """Tell the coordinator how many workers the database knows: leases may lag as far as their number asks for."""
        if self.coordinator.units is not None:
            self.coordinator.units.workers_elsewhere = self.database.workers_here()

    def is_resumed(self) -> bool:
        """Whether the units that were on offer before a restart still are."""
        return self.database.iteration() == self.coordinator.state.version and self.database.has_open_units()

    def split(self, requests: list[Request]) -> tuple[list[Request], list[Request]]:
        """Requests of workers, and results of units."""
        results = [request for request in requests if self.database.is_from_leases(request)]
        return [request for request in requests if request not in results], results

    def take(self, request: Request, more: bool, now: float) -> bool:
        """Let the coordinator handle a result. Return whether a round has closed."""
        effects = self.coordinator.handle(_event_of(request, more), now)
        self._effects += effects
        self._taken.append(request)
        return any(isinstance(effect, (Published, Issue)) for effect in effects)

    @property
    def has_taken(self) -> bool:
        """Whether there are results whose effects are still to be carried out."""
        return bool(self._taken)

    def commit(self, carry_out: Callable[[list[Effect], Callable[[], None] | None], None], then: Sequence[Effect] = ()) -> None:
        """Carry out the effects of all taken results and consume the results, in one transaction. `then`: effects of a later event."""
        effects, requests = [*self._effects, *then], self._taken
        self._effects, self._taken = [], []

        def consume() -> None:
            for request in requests:
                self.database.consume(request)

        carry_out(effects, consume if requests else None)

    def publish(self) -> None:
        """Publish the newest weights for all workers that lease units."""
        self._publish(self.coordinator.state.version, self.feed.messages(), self.coordinator.finished)

    def publish_last(self) -> None:
        """Publish the last weights once more, as the end of the run. Workers read only newer versions, so they get the next number."""
        last = [WeightsMessage("full", {"weights": "full"}, self.coordinator.publisher.everything())]
        self._publish(self.coordinator.state.version + 1, last, True)

    def _publish(self, version: int, messages: list[WeightsMessage], done: bool) -> None:
        known = {"step": self.coordinator.replayed.step, "done": done, "outcome": self.coordinator.completion.outcome}
        for kind, header, frames in messages:
            self.database.publish(version, kind, header | known, frames)
        self.published_end = done

    def announce_end(self) -> None:
        """Report how the run has ended or was stopped. Workers of a run that was stopped wait for it to be resumed."""
        self.database.set_end(self.coordinator.completion.outcome)

    def issue(self, effect: Issue) -> None:
        plan = self.coordinator.plan
        assert plan.cut is not None
        units = [plan.cut.unit(number) for number in effect.units]
        assert self.coordinator.units is not None
        self.database.issue(effect.version, units, plan.lease_s, plan.attempts, self.coordinator.units.per_version, effect.most_lag)
        self._count_workers()

    def has_workers(self, interrupted: bool) -> bool:
        """Whether there is a worker that has not left yet; where the run was `interrupted`, one that does not know it yet."""
        return any(worker["alive"] and not (interrupted and worker["state"] == STOPPED) for worker in self.database.workers())


def _event_of(request: Request, more: bool) -> LeaseResult | UnusableResult:
    header: dict[str, Any] = request.message.header
    fields = {name: value for name, value in header.items() if name not in ("unit", "seq")}
    if header["kind"] == "delivered":
        fields["seq"] = header["unit"]  # a unit is submitted once, so it serves as the number of the contribution
    else:
        del fields["base"]
    try:
        return LeaseResult(parse_from_leases(fields), request.message.frames, more)
    except BadMessage as error:  # its fields come from a worker
        return UnusableResult(header["epoch"], header["start"], f"what {header.get('worker')} sent cannot be used: {error}")
