"""Driver of the coordinator: polls for requests, passes them to `handle`, and carries out the effects in the order that makes them durable.

Clock, randomness, store, server and observing functions are passed in. With `threads=False` it starts no thread: the simulator is this
driver on a virtual clock, with a server that hands over its virtual workers' messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shoal.coordinator.driver_interfaces import CoordinatorStore, LeaseDatabase
from shoal.coordinator.durable.journal_writer import JournalWriter
from shoal.coordinator.durable.snapshots import SnapshotWriter
from shoal.coordinator.effects import Dismiss, Effect, Issue, LedgerEntry, Measured, Note, Persist, Published, Reply, StopRun
from shoal.coordinator.events import Event, RequestReceived, ServingStarted, Tick
from shoal.coordinator.machine import Coordinator
from shoal.coordinator.units.database_leases import DatabaseLeases
from shoal.protocol.messages import BadMessage, Message, Request, parse
from shoal.protocol.server import Server
from shoal.updates.state_packing import Checkpoint

TICK_S = 0.1
_LEAST_JOURNAL_BYTES = 128 << 20
_JOURNAL_STATES = 4
"""A snapshot is taken when the journal is this many times as large as a snapshot. Up to three journals exist at a time, and writing over
one is cheap only while the system has it in memory."""
_MOST_RECORDS = 8000
_READ_S = 0.3
"""Right after new weights were published in a database, all workers read them: a snapshot waits for this long."""
_LONGER = 1.5
"""How much longer a journal may become until then: where rounds are short, workers always read."""


class SnapshotContent(NamedTuple):
    """Weights and state of a run, for a snapshot."""

    weights: dict[str, Tensor]
    state: dict[str, Any]


class DriverDeps(NamedTuple):
    """Collaborators of the driver."""

    server: Server
    store: CoordinatorStore
    published: Callable[[Published, bool], None]
    """Called with each new version, and whether it is replayed: then it existed before a crash, too."""
    say: Callable[[str], None]
    """Shows a text to the user."""
    welcome: Message
    """Reply to every worker that joins."""
    capture: Callable[[], SnapshotContent]
    clock: Callable[[], float]
    new_session: Callable[[], str]
    """Returns an unguessable string."""
    database: LeaseDatabase | None = None
    """The server again, where it is a database that keeps the leases of units."""
    threads: bool = True
    measured: Callable[[Measured], None] = lambda one: None
    """Keeps what the scores of a round were measured with."""
    status: Callable[[], bytes] = lambda: b"{}"
    """Status of the run for its owner, as JSON."""


class CoordinatorDriver:
    """Runs a coordinator. All methods are for one thread."""

    def __init__(self, coordinator: Coordinator, deps: DriverDeps) -> None:
        self.coordinator, self.server, self.store, self.deps = coordinator, deps.server, deps.store, deps
        self.leases = DatabaseLeases(deps.database, coordinator) if deps.database is not None else None
        threaded = deps.threads and not deps.store.transactional
        self.journal_writer = JournalWriter(self._write, self._carry_out_one, deps.server.wake) if threaded else None
        """Files can be written in a thread; in a database the effects of an event are one transaction."""
        self.snapshots = SnapshotWriter(deps.store, deps.say, deps.threads)
        self._replaying = False
        self._tick_at = 0.0
        self._read_until = 0.0
        self._listens_until: float | None = None
        self._long_journal = max(_LEAST_JOURNAL_BYTES, _JOURNAL_STATES * 16 * coordinator.learner.vector.numel())

    # --- the service -------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to serve. Units that are still on offer after a restart are not offered again."""
        if not self.store.snapshots.all() or not self.store.journal.open:
            self.snapshot()
        version, resumed = self.coordinator.state.version, self.leases is not None and self.leases.is_resumed()
        effects = self.coordinator.handle(ServingStarted(), self.deps.clock())
        if self.leases is not None:
            self.store.carry_out(self.leases.publish)
        self._carry_out([effect for effect in effects if not (resumed and isinstance(effect, Issue) and effect.version == version)])
        self._tick_at = self.deps.clock()

    def step(self, timeout_s: float = TICK_S) -> bool:
        """Serve the requests that arrive within the timeout. Return whether a tick was due."""
        self.serve(self.server.poll(timeout_s))
        now = self.deps.clock()
        if now < self._tick_at:
            return False
        if self._may_tick(now):
            self.handle(Tick())
        self._tick_at = now + TICK_S
        for note in self.leases.notes.read(now) if self.leases is not None else ():
            self.deps.say(note)
        if self.snapshots.due(self._journal_is_long(_LONGER if now < self._read_until else 1.0), now):
            self.snapshot(wait=False)
        return True

    def _may_tick(self, now: float) -> bool:
        """Whether silent workers may be removed: after a long pause of this machine, heartbeats must first have the time to arrive."""
        interval_s = self.coordinator.members.heartbeat_interval_s
        if self._listens_until is None and now - self._tick_at > interval_s:
            self._listens_until = now + interval_s
        if self._listens_until is not None and now < self._listens_until:
            return False
        self._listens_until = None
        return True

    def handle(self, event: Event) -> None:
        """Let the coordinator handle an event, and carry out its effects, with those of the results that were taken before it."""
        effects = self.coordinator.handle(event, self.deps.clock())
        if self.leases is not None and self.leases.has_taken and any(isinstance(effect, (Persist, Published, Issue)) for effect in effects):
            self.leases.commit(self._carry_out, effects)
        else:
            self._carry_out(effects)

    def serve(self, requests: list[Request]) -> None:
        if self.journal_writer is not None:
            self.journal_writer.resume()
        questions, results = self.leases.split(requests) if self.leases is not None else (requests, [])
        for request in sorted(questions, key=_oldest_first):
            self._serve(request)
        for request in results:
            assert self.leases is not None
            if self.leases.take(request, request is not results[-1], self.deps.clock()):
                self.leases.commit(self._carry_out)

    def _serve(self, request: Request) -> None:
        try:
            asked = parse(request.message.header)
        except BadMessage as error:
            self.server.traffic.refuse("malformed")
            return self.server.reply(request, Message({"kind": "refused", "reason": "malformed", "detail": str(error)}))
        caller = request._replace(message=Message(request.message.header))  # a reply that is held back does not keep the frames in memory
        return self.handle(RequestReceived(caller, asked, request.message.frames, self.deps.new_session(), request.guest, request.address))

    # --- effects -----------------------------------------------------------------------------------

    def _carry_out(self, effects: list[Effect], also: Callable[[], None] | None = None) -> None:
        """Carry out effects: first all that must survive or that others see, as one transaction where the store has them; then reports."""
        if self.journal_writer is not None:
            self.journal_writer.take([effect for effect in effects if not isinstance(effect, (Published, Note, StopRun))])
        elif len(effects) == 1 and isinstance(effects[0], Reply) and also is None and not self.store.transactional:
            return self._reply(effects[0])  # most messages change nothing
        elif effects or also is not None:
            self.store.carry_out(lambda: self._carry_out_all(effects, also))
        for effect in effects:
            if isinstance(effect, Published):
                self._read_until = self.deps.clock() + _READ_S if self.leases is not None else 0.0
                self.deps.published(effect, self._replaying)
            elif isinstance(effect, (Note, StopRun)):
                self.deps.say(effect.text if isinstance(effect, Note) else f"warning: {effect.reason}")
        return None

    def _carry_out_all(self, effects: list[Effect], also: Callable[[], None] | None) -> None:
        if self.leases is not None and len(effects) > 1:
            effects = sorted(effects, key=lambda effect: not isinstance(effect, Published))  # weights take the longest, so they go first
        for effect in effects:
            self._carry_out_one(effect)
        if also is not None:
            also()
        for effect in effects:
            if isinstance(effect, Issue) and self.leases is not None and not self._replaying:
                self.leases.issue(effect)

    def _carry_out_one(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            self._reply(effect)
        elif isinstance(effect, Persist):
            self._write([effect])
        elif isinstance(effect, LedgerEntry):
            self.store.ledger.append(effect.line)
        elif isinstance(effect, Measured):
            self.deps.measured(effect)
        elif isinstance(effect, Dismiss) and self.leases is not None:
            self.leases.database.keep_out(effect.worker, effect.out)
        elif isinstance(effect, Published) and self.leases is not None and not self._replaying:
            self.leases.publish()

    def _write(self, records: Sequence[Persist]) -> None:
        self.store.journal.append_all(records)

    def _reply(self, effect: Reply) -> None:
        header, frames = effect.header, tuple(effect.frames)
        if header["kind"] == "welcome":
            header, frames = header | self.deps.welcome.header, self.deps.welcome.frames
        elif header["kind"] == "status":
            frames = (self.deps.status(),)
        self.server.reply(effect.caller, Message(header, frames))

    # --- the end -----------------------------------------------------------------------------------

    def say_goodbye(self, until: float, interrupted: bool, also: Callable[[], None]) -> None:
        """Tell all workers that the run is over, until this time at most. Workers of a lease database read it with the weights; if the run
        was interrupted, they stay for a while, since it may be resumed."""
        leases = self.leases
        if leases is not None:
            self.store.carry_out(leases.announce_end)
        if leases is not None and not interrupted and not leases.published_end:
            self.store.carry_out(leases.publish_last)
        while (leases.has_workers(interrupted) if leases is not None else self.coordinator.members.by_name) and self.deps.clock() < until:
            self.serve(self.server.poll(TICK_S))
            self.handle(Tick())
            also()

    def close(self) -> None:
        if self.journal_writer is not None:
            self.journal_writer.close()
        self.snapshots.close()
        self.store.journal.close()
        self.store.ledger.close()

    # --- durability -----------------------------------------------------------------------------

    def _journal_is_long(self, longer: float) -> bool:
        """Whether a snapshot is due. A journal of this length is replayed in a second or two; it may be `longer` times as long."""
        journal = self.store.journal
        return journal.bytes_since_snapshot > longer * self._long_journal or journal.records_since_snapshot > longer * _MOST_RECORDS

    def snapshot(self, wait: bool = True) -> None:
        """Write a snapshot and begin a new journal, which is created first, so that there is always one."""
        if self.leases is not None:
            self.leases.commit(self._carry_out)
        self.drain()
        captured = self.deps.capture()
        self.snapshots.write(self.coordinator.replayed.pending(), captured.weights, captured.state)
        if wait:
            self.snapshots.finish()

    def drain(self) -> None:
        """Wait until every record is written, so that a checkpoint holds nothing that a crash could undo."""
        if self.journal_writer is not None:
            self.journal_writer.drain()

    def recover(self, snapshot: Checkpoint) -> None:
        """Restore the coordinator from a snapshot and the journal after it. The learner has the snapshot's weights already."""
        self.coordinator.load_state_dict(snapshot.state["coordinator"])
        self.store.ledger.cut(snapshot.state["ledger"])
        self._replaying = True
        for record, frames in self.store.journal.recover(snapshot.step):
            self._carry_out(self.coordinator.replayed.apply(record, frames))
        self._replaying = False
        for remark in self.store.settle():
            self.deps.say(f"warning: {remark}")


def _oldest_first(request: Request) -> int:
    """Sort key: of several requests, contributions with the oldest base go first, as they lose weight with every version."""
    base = request.message.header.get("base")
    return base if isinstance(base, int) else -1
