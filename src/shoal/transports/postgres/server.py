"""The coordinator's side of the database: requests and replies, and units on lease."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.errors import ShoalError
from shoal.transports import wire
from shoal.transports.interface import Frame, Message, Request
from shoal.transports.postgres import frames as blobs
from shoal.transports.postgres import queries
from shoal.transports.postgres.requests import RequestTables


class PostgresServer(RequestTables):
    """A `Server` that also leases units. What it does within `transaction()` is committed together or not at all."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._published: dict[tuple[int, str], tuple[dict[str, Any], tuple[Frame, ...]]] = {}
        """Kept in memory, to publish again after a crash of the server, which empties unlogged tables."""
        self._connects = self.connection.connect_count

    # --- the run -----------------------------------------------------------------------------------

    def stored_run(self) -> Message | None:
        """The description of the run that the database holds."""
        rows = self.fetch("SELECT header, frames FROM shoal.run")
        if not rows:
            return None
        return Message(wire.decode([rows[0][0]], self.limits)[1].header, self.read(rows[0][1]))

    def open_run(self, welcome: Message, resume: bool, silence_s: float = 90.0) -> Message:
        """Begin a run, or resume the stored one; returns its description. A worker without a heartbeat for `silence_s` counts as gone."""
        with self.transaction():
            stored = self.stored_run()
            if resume and stored is None:
                raise ShoalError(f"{self.connection.name} holds no run to go on with: leave --resume out to start one")
            if resume and stored is not None:
                self.set_end(None)
                return stored
            if stored is not None:
                raise ShoalError(
                    f"{self.connection.name} holds another run: add --resume to go on with it, or delete it with `shoal db reset`"
                )
            header = wire.encode(welcome, 0, self.limits)[0]
            values = (header, self.keep(welcome.frames), silence_s)
            self.fetch("INSERT INTO shoal.run (header, frames, silence_s) VALUES (%b, %b::uuid[], %s) RETURNING 1", values)
            self.fetch("SELECT pg_notify('shoal_work', '')")
        return welcome

    def keep(self, content: Sequence[Frame]) -> list[uuid.UUID]:
        """Store frames as blobs. Frames that came out of the database get one more use, and are written again only if a server that crashed
        has forgotten them: it may lose what was not confirmed."""
        if not content:
            return []
        found = [self.known.blob_of(frame) for frame in content]
        with self.transaction() as connection:
            held = self.fetch(
                "UPDATE shoal.blobs b SET uses = b.uses + again.times"
                " FROM (SELECT id, count(*)::int4 AS times FROM unnest(%s::uuid[]) id GROUP BY id) again"
                " WHERE b.id = again.id RETURNING b.id",
                ([blob for blob in found if blob is not None],),
            )
            ids = {blob for (blob,) in held}
            fresh = iter(blobs.store(connection, [frame for frame, blob in zip(content, found, strict=True) if blob not in ids]))
        return [blob if blob is not None and blob in ids else next(fresh) for blob in found]

    def put_piece(self, number: int, piece: bytes) -> None:
        """Store a piece of the data set, for workers that lack it. Each is a transaction of its own: together they may be gigabytes."""
        with self.transaction() as connection:
            connection.execute(
                "INSERT INTO shoal.pieces (number, data) VALUES (%b, %b) ON CONFLICT (number) DO UPDATE SET data = excluded.data",
                (number, piece),
            )

    def set_fact(self, name: str, value: Any) -> None:
        """Store a fact about the run for status pages; it replaces an earlier one of this name."""
        with self.transaction() as connection:
            connection.execute(
                "INSERT INTO shoal.facts VALUES (%s, %s::jsonb) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                (name, json.dumps(value)),
            )

    def set_end(self, status: str | None) -> None:
        """Store how the run has ended or was stopped, and notify all workers; None: it goes on."""
        with self.transaction():
            self.set_fact("end", status)
            self.fetch("SELECT pg_notify('shoal_work', '')")

    # --- units -------------------------------------------------------------------------------------

    def issue(
        self,
        iteration: int,
        units: Sequence[tuple[int, int, int]],
        lease_timeout_s: float,
        max_retries: int,
        quorum: int | None = None,
        max_lag: int = 0,
    ) -> None:
        """Offer units (epoch, start, batches) for an iteration; `max_retries`: the attempts at each, in all; `max_lag`: how many iterations
        a leased unit may lag.

        `coordinator/units/lease_table.py` says what that means for units of older iterations and for those that are listed again. Here a
        result may also wait to be consumed; its unit counts as done while it waits, and for the round that is open. A unit listed again
        later had an unusable result.
        """
        columns = [list(column) for column in zip(*units, strict=True)] or [[], [], []]
        with self.transaction() as connection:
            again, tried = self.iteration() == iteration, self._tried_before(iteration)
            connection.execute(
                "INSERT INTO shoal.iterations VALUES (%s, nextval('shoal.unit_queue'), %s, %s, %s, %s,"
                " greatest(%s::int8 - %s::int8, (SELECT max(i.oldest) FROM shoal.iterations i))) ON CONFLICT (iteration) DO UPDATE"
                " SET lease_timeout_s = excluded.lease_timeout_s, max_retries = excluded.max_retries, quorum = excluded.quorum",
                (iteration, lease_timeout_s, max_retries, quorum, max_lag, iteration, max_lag),
            )
            if again:
                self._requeue_unusable(iteration, *columns[:2])
            else:
                self._cancel_older(iteration)
            self._insert_units(iteration, columns, tried)
            connection.execute("SELECT pg_notify('shoal_work', '')")

    def _insert_units(self, iteration: int, columns: list[list[int]], tried: list[list[int]]) -> None:
        """Insert the units that are neither open nor done. `columns`: their epochs, starts and batches; `tried`: see `_tried_before`."""
        issued = self.fetch(
            "WITH issued AS (INSERT INTO shoal.units (iteration, epoch, start, batches, attempts)"
            " SELECT %s, epoch, start, batches, coalesce(attempts, 0)"
            " FROM unnest(%s::int8[], %s::int8[], %s::int8[]) WITH ORDINALITY AS u (epoch, start, batches, n)"
            " LEFT JOIN unnest(%s::int8[], %s::int8[], %s::int4[]) AS tried (epoch, start, attempts) USING (epoch, start)"
            " WHERE NOT EXISTS (SELECT FROM shoal.contributions c WHERE c.epoch = u.epoch AND c.start = u.start)"
            " AND NOT EXISTS (SELECT FROM shoal.units o WHERE o.epoch = u.epoch AND o.start = u.start"
            " AND (o.iteration = %s OR o.state IN ('pending', 'claimed'))) ORDER BY n RETURNING 1) SELECT count(*) FROM issued",
            (iteration, *columns, *tried, iteration),
        )
        self._tally({"issued": issued[0][0]})

    def has_open_units(self) -> bool:
        """Whether there is a unit that a worker holds or may claim."""
        counts = self.table()
        return counts["pending"] + counts["claimed"] > 0

    def iteration(self) -> int | None:
        """The iteration whose units are on the board; None if there never were any."""
        return self.fetch("SELECT max(iteration) FROM shoal.iterations")[0][0]

    def is_from_leases(self, request: Request) -> bool:
        """Whether a request is a unit's result or failure: those have no peer that waits for an answer."""
        return request.peer == b""

    def _tried_before(self, iteration: int) -> list[list[int]]:
        """Epochs, starts and attempts of units of older iterations that did not work."""
        rows = self.fetch(
            "SELECT epoch, start, max(attempts) FROM shoal.units"
            " WHERE attempts > 0 AND iteration < %s AND state <> 'completed' GROUP BY 1, 2",
            (iteration,),
        )
        return [list(column) for column in zip(*rows, strict=True)] or [[], [], []]

    def _requeue_unusable(self, iteration: int, epochs: Sequence[int], starts: Sequence[int]) -> None:
        """Requeue units that are listed although their results were consumed: those could not be used, and count as failed attempts."""
        unusable = self.fetch(
            "UPDATE shoal.units u SET iteration = %s FROM unnest(%s::int8[], %s::int8[]) AS listed (epoch, start)"
            " WHERE u.state = 'completed' AND u.epoch = listed.epoch AND u.start = listed.start"
            " AND NOT EXISTS (SELECT FROM shoal.contributions c WHERE c.unit = u.id) RETURNING u.id",
            (iteration, epochs, starts),
        )
        for (unit,) in unusable:
            self.fetch("SELECT shoal.requeue_unit(%s, 'its result could not be used', true)", (unit,))

    def _cancel_older(self, iteration: int) -> None:
        """Cancel what is pending of older iterations, and leases that lag too much: these rows stay until the next iteration. Units whose
        results wait stay until it is known whether those can be used."""
        oldest = "(SELECT i.oldest FROM shoal.current_iteration i)"
        self.fetch(f"SELECT id FROM shoal.units WHERE state = 'claimed' AND iteration < {oldest} ORDER BY id FOR UPDATE")
        used = "SELECT array_agg(u.id) FROM shoal.units u WHERE iteration < %s AND state = 'completed'"
        self.fetch(
            f"SELECT shoal.count_completed(({used} AND NOT EXISTS (SELECT FROM shoal.contributions c WHERE c.unit = u.id)))", (iteration,)
        )
        gone = self.fetch(
            "DELETE FROM shoal.units u WHERE iteration < %s AND state <> 'claimed' AND NOT (state = 'completed'"
            " AND EXISTS (SELECT FROM shoal.contributions c WHERE c.unit = u.id)) RETURNING state = 'pending', state",
            (iteration,),
        )
        self.fetch(f"UPDATE shoal.units SET state = 'cancelled' WHERE iteration < {oldest} AND state = 'claimed' RETURNING 1")
        self.fetch("DELETE FROM shoal.iterations WHERE iteration < %s RETURNING 1", (iteration,))
        states = ["cancelled" if pending else state for pending, state in gone]
        self._tally({state: states.count(state) for state in set(states)})

    def _tally(self, counts: Mapping[str, int]) -> None:
        for state, units in counts.items():
            self.fetch(
                "INSERT INTO shoal.unit_totals AS t VALUES (%s, %s) ON CONFLICT (state)"
                " DO UPDATE SET units = t.units + excluded.units RETURNING 1",
                (state, units),
            )

    def consume(self, request: Request) -> None:
        """Delete a result or a failed unit, which is in the journal now."""
        with self.transaction():
            for (held,) in self.fetch("DELETE FROM shoal.contributions WHERE seq = %s RETURNING frames", (request.number,)):
                self.release(held)

    # --- weights -----------------------------------------------------------------------------------

    def publish(self, version: int, kind: str, header: dict[str, Any], frames: Sequence[Frame]) -> None:
        """New weights: `full`, or the `difference` from the version `base` of the header (the one before). The newest full ones and what
        follows are kept. A version may be published in both kinds."""
        packed = wire.encode(Message(header, tuple(frames)), 0, self.limits)[0]
        base = header.get("base", version - 1) if kind == "difference" else None

        def insert() -> None:
            self.fetch(
                "INSERT INTO shoal.weights VALUES (%b::int8, %t, %b::int8, %b, %b::uuid[]) ON CONFLICT (version, kind)"
                " DO UPDATE SET base = excluded.base, header = excluded.header, frames = excluded.frames RETURNING 1",
                (version, kind, base, packed, self.publish_frames(frames)),
            )
            if kind == "full":
                # Not `<`: after a resume the database may hold newer versions than the run.
                self.fetch("DELETE FROM shoal.weights WHERE version <> %s RETURNING 1", (version,))
            self.fetch("SELECT pg_notify('shoal_work', '')")

        self.carry_out(insert)
        self._remember(version, kind, header, tuple(frames))

    def _remember(self, version: int, kind: str, header: dict[str, Any], frames: tuple[Frame, ...]) -> None:
        published = {key: value for key, value in self._published.items() if kind != "full" or key[0] >= version}
        self._published = published | {(version, kind): (header, frames)}

    def poll(self, timeout_s: float) -> list[Request]:
        found = super().poll(timeout_s)
        if self.connection.connect_count != self._connects:
            self._connects = self.connection.connect_count
            self._publish_again()
        return found

    def _publish_again(self) -> None:
        """After a lost connection: a server that crashed has emptied its unlogged tables."""
        if self._published and not self.fetch("SELECT 1 FROM shoal.weights LIMIT 1"):
            for (version, kind), (header, frames) in sorted(self._published.items(), key=lambda item: (item[0][0], item[0][1] != "full")):
                self.publish(version, kind, header, frames)

    # --- for status pages ---------------------------------------------------------------------

    def workers_here(self) -> int:
        """Number of workers that are here."""
        return int(self.fetch("SELECT count(*) FROM shoal.worker_list WHERE alive")[0][0])

    def workers(self) -> list[dict[str, Any]]:
        """All workers that ever took part, with the numbers of their units by outcome."""
        return self.run(queries.workers)

    def table(self) -> dict[str, int]:
        """Units by state, and beside them: `issued` altogether, and results that were `dropped`."""
        counts: dict[str, int] = dict.fromkeys(("issued", "pending", "claimed", "completed", "failed", "cancelled", "dropped"), 0)
        return counts | dict(self.fetch("SELECT state, units FROM shoal.unit_counts"))

    def notes(self) -> list[str]:
        """Notes for the owner, each returned once: which students were paused, shut out, or are slow."""
        return [note for (note,) in self.fetch("DELETE FROM shoal.notes RETURNING note")]

    def keep_out(self, worker: str, out: bool) -> None:
        """Put the student whose worker has this name into quarantine, or out of it. The owner's own workers are not affected."""
        students = "FROM shoal.workers w JOIN shoal.roles r ON r.name = w.role AND r.kind = 'student' WHERE w.name = %s"
        why = "the teacher keeps you out" if out else None
        with self.transaction() as connection:
            connection.execute(f"INSERT INTO shoal.standings (role) SELECT DISTINCT w.role {students} ON CONFLICT DO NOTHING", (worker,))
            connection.execute(f"UPDATE shoal.standings SET quarantined = %s WHERE role IN (SELECT w.role {students})", (why, worker))

    def metrics(self, rows: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Append figures of steps."""
        with self.transaction() as connection:
            values = [(step, json.dumps({name: value for name, value in row.items() if math.isfinite(value)})) for step, row in rows]
            connection.cursor().executemany("INSERT INTO shoal.metrics (step, figures) VALUES (%s, %s::jsonb)", values)

    def picture(self, step: int, png: bytes) -> None:
        """The newest grid of samples; it takes the last one's place."""
        with self.transaction() as connection:
            connection.execute(
                "INSERT INTO shoal.picture (step, png) VALUES (%b::int8, %b) ON CONFLICT (only_one)"
                " DO UPDATE SET step = excluded.step, png = excluded.png, at = now()",
                (step, png),
            )

    # --- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop. Clients that still wait for an answer learn that none will come."""
        if self.connection.stopped.is_set():
            return
        if self._waiting:
            self.connection.execute_last("SELECT shoal.drop_requests(%s)", (list(self._waiting.values()),))
        self.close_connection()
