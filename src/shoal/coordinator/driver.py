"""Drives the coordinator: polls for requests, has them handled, and carries out the effects in the order that makes them durable.

Clock, randomness, store, server and watcher are passed in. With `threads=False` it starts none: the simulator is this driver on a virtual
clock, with a server that hands over what its workers say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from shoal.coordinator.driver_interfaces import CoordinatorStore, LeaseDatabase, RequestServer, RunObserver, SavedState
from shoal.coordinator.durable.journal_writer import JournalWriter
from shoal.coordinator.durable.snapshots import SnapshotWriter
from shoal.coordinator.effects import Dismiss, Effect, Issue, LedgerEntry, Note, Persist, Published, Reply, StopRun
from shoal.coordinator.events import Event, RequestReceived, ServingStarted, Tick
from shoal.coordinator.machine import Coordinator
from shoal.coordinator.units.database_leases import DatabaseLeases
from shoal.protocol.messages import BadMessage, Message, Request, parse

TICK_S = 0.1
_LEAST_JOURNAL_BYTES = 128 << 20
_JOURNAL_STATES = 4
"""A snapshot is taken when the journal is this many times as large as what a snapshot holds. Up to three journals are there at a time, and
to write over one is cheap only while the system has it in memory."""
_MOST_RECORDS = 8000


class SnapshotContent(NamedTuple):
    """All there is to a run now, for a snapshot."""

    weights: dict[str, Tensor]
    state: dict[str, Any]


class DriverDeps(NamedTuple):
    """What the driver works with."""

    server: RequestServer
    store: CoordinatorStore
    watcher: RunObserver
    welcome: Message
    """What every worker that joins is told."""
    capture: Callable[[], SnapshotContent]
    clock: Callable[[], float]
    new_session: Callable[[], str]
    """A word that nobody can guess."""
    board: LeaseDatabase | None = None
    """The same as the server, where a database keeps the leases of units."""
    threads: bool = True
    status: Callable[[], bytes] = lambda: b"{}"
    """How the run goes, for its owner: JSON."""


class CoordinatorDriver:
    """A coordinator at work. All methods are for one thread."""

    def __init__(self, coordinator: Coordinator, around: DriverDeps) -> None:
        self.coordinator, self.server, self.store, self.around = coordinator, around.server, around.store, around
        self.board = DatabaseLeases(around.board, coordinator) if around.board is not None else None
        beside = around.threads and not around.store.transactional
        self.scribe = JournalWriter(self._write, self._keep, around.server.wake) if beside else None
        """Files can be written beside the work; in a database what belongs together is one transaction."""
        self.snapshots = SnapshotWriter(around.store, around.watcher.say, around.threads)
        self._replaying = False
        self._tick_at = 0.0
        self._listens_until: float | None = None
        self._long_journal = max(_LEAST_JOURNAL_BYTES, _JOURNAL_STATES * 16 * coordinator.learner.vector.numel())

    # --- the service -------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to serve, or go on: units that are still on offer are not offered again."""
        if not self.store.snapshots.all() or not self.store.journal.open:
            self.snapshot()
        version, goes_on = self.coordinator.state.version, self.board is not None and self.board.goes_on()
        effects = self.coordinator.handle(ServingStarted(), self.around.clock())
        if self.board is not None:
            self.store.carry_out(self.board.publish)
        self._carry_out([effect for effect in effects if not (goes_on and isinstance(effect, Issue) and effect.version == version)])
        self._tick_at = self.around.clock()

    def step(self, timeout_s: float = TICK_S) -> bool:
        """Serve what comes in within the time. Return whether time has passed enough for the coordinator to hear of it."""
        self.serve(self.server.poll(timeout_s))
        now = self.around.clock()
        if now < self._tick_at:
            return False
        if self._may_judge(now):
            self.happen(Tick())
        self._tick_at = now + TICK_S
        for note in self.board.notes(now) if self.board is not None else ():
            self.around.watcher.say(note)
        if self.snapshots.due(self._journal_is_long(), now):
            self.snapshot(wait=False)
        return True

    def _may_judge(self, now: float) -> bool:
        """Whether the silence of workers is their own. A coordinator that was away (stopped, or its whole machine was) first listens for as
        long as a sign of life takes to come. One that is always slow judges after that all the same."""
        interval_s = self.coordinator.members.heartbeat_interval_s
        if self._listens_until is None and now - self._tick_at > interval_s:
            self._listens_until = now + interval_s
        if self._listens_until is not None and now < self._listens_until:
            return False
        self._listens_until = None
        return True

    def happen(self, event: Event) -> None:
        """Have an event handled, and carry out what comes of it."""
        self._carry_out(self.coordinator.handle(event, self.around.clock()))

    def serve(self, requests: list[Request]) -> None:
        if self.scribe is not None:
            self.scribe.go_on()
        questions, results = self.board.split(requests) if self.board is not None else (requests, [])
        for request in sorted(questions, key=_oldest_first):
            self._serve(request)
        for request in results:
            assert self.board is not None
            if self.board.take(request, request is not results[-1], self.around.clock()):
                self.board.settle(self._carry_out)

    def _serve(self, request: Request) -> None:
        try:
            asked = parse(request.message.header)
        except BadMessage as error:
            self.server.traffic.refuse("malformed")
            return self.server.reply(request, Message({"kind": "refused", "reason": "malformed", "detail": str(error)}))
        return self.happen(
            RequestReceived(request, asked, request.message.frames, self.around.new_session(), request.guest, request.address)
        )

    # --- effects -----------------------------------------------------------------------------------

    def _carry_out(self, effects: list[Effect], also: Callable[[], None] | None = None) -> None:
        """First what must survive and what others see, all together, and again where a database was gone for a moment. Then the rest."""
        if self.scribe is not None:
            self.scribe.take([effect for effect in effects if not isinstance(effect, (Published, Note, StopRun))])
        elif len(effects) == 1 and isinstance(effects[0], Reply) and also is None and not self.store.transactional:
            return self._reply(effects[0])  # most of what a crowd asks changes nothing
        elif effects or also is not None:
            self.store.carry_out(lambda: self._keep_all(effects, also))
        for effect in effects:
            if isinstance(effect, Published):
                self.around.watcher.published(effect, self._replaying)
            elif isinstance(effect, (Note, StopRun)):
                self.around.watcher.say(effect.text if isinstance(effect, Note) else f"warning: {effect.reason}")
        return None

    def _keep_all(self, effects: list[Effect], also: Callable[[], None] | None) -> None:
        if self.board is not None and len(effects) > 1:
            effects = sorted(effects, key=lambda effect: not isinstance(effect, Published))  # weights take the longest: they go first
        for effect in effects:
            self._keep(effect)
        if also is not None:
            also()
        if self.board is not None:
            self._issue(effects)

    def _issue(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Issue) and self.board is not None and not self._replaying:
                self.board.issue(effect)

    def _keep(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            self._reply(effect)
        elif isinstance(effect, Persist):
            self._write(effect)
        elif isinstance(effect, LedgerEntry):
            self.store.ledger.append(effect.line)
        elif isinstance(effect, Dismiss) and self.board is not None:
            self.board.board.keep_out(effect.worker, effect.out)
        elif isinstance(effect, Published) and self.board is not None and not self._replaying:
            self.board.publish()

    def _write(self, effect: Persist) -> None:
        self.store.journal.append(effect.record, effect.frames)

    def _reply(self, effect: Reply) -> None:
        header, frames = effect.header, tuple(effect.frames)
        if header["kind"] == "welcome":
            header, frames = header | self.around.welcome.header, self.around.welcome.frames
        elif header["kind"] == "status":
            frames = (self.around.status(),)
        self.server.reply(effect.caller, Message(header, frames))

    # --- the end -----------------------------------------------------------------------------------

    def say_goodbye(self, until: float, interrupted: bool, beside: Callable[[], None]) -> None:
        """Let every worker hear that it is over, until this time at most. Workers that lease units hear it with the weights."""
        board = None if interrupted else self.board
        if board is not None and not board.says_over:
            self.store.carry_out(board.publish_last)
        while (board.some_are_here() if board is not None else self.coordinator.members.by_name) and self.around.clock() < until:
            self.serve(self.server.poll(TICK_S))
            self.happen(Tick())
            beside()

    def close(self) -> None:
        if self.scribe is not None:
            self.scribe.close()
        self.snapshots.close()
        self.store.journal.close()
        self.store.ledger.close()

    # --- what survives -----------------------------------------------------------------------------

    def _journal_is_long(self) -> bool:
        """Long enough to be worth a snapshot, and short enough to be replayed in a second or two."""
        journal = self.store.journal
        return journal.bytes_since_snapshot > self._long_journal or journal.records_since_snapshot > _MOST_RECORDS

    def snapshot(self, wait: bool = True) -> None:
        """Keep all there is now; the journal starts over. The new journal is there first, so that no moment is without one."""
        if self.board is not None:
            self.board.settle(self._carry_out)
        self.drain()
        captured = self.around.capture()
        self.snapshots.write(self.coordinator.pending(), captured.weights, captured.state)
        if wait:
            self.snapshots.finish()

    def drain(self) -> None:
        """Wait until every record is written: a checkpoint holds nothing that a crash could undo."""
        if self.scribe is not None:
            self.scribe.drain()

    def recover(self, snapshot: SavedState) -> None:
        """Become what the coordinator was when it ended, however it ended. The learner has the snapshot's weights already."""
        self.coordinator.load_state_dict(snapshot.state["coordinator"])
        self.store.ledger.cut(snapshot.state["ledger"])
        self._replaying = True
        for record, frames in self.store.journal.recover(snapshot.step):
            self._carry_out(self.coordinator.replay(record, frames))
        self._replaying = False
        for remark in self.store.settle():
            self.around.watcher.say(f"warning: {remark}")


def _oldest_first(request: Request) -> int:
    """Of what is there at once, what was computed on the oldest weights goes first: the longer it waits, the less it is worth."""
    base = request.message.header.get("base")
    return base if isinstance(base, int) else -1
