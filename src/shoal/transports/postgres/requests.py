"""The coordinator's side of requests: polls the tables for requests and results of units, and writes replies."""

from __future__ import annotations

import time
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from shoal.errors import ShoalError
from shoal.protocol.checksums import crc32
from shoal.transports import wire
from shoal.transports.interface import Frame, Message, Request, Traffic
from shoal.transports.postgres import frames
from shoal.transports.postgres.bulk_writer import BulkWriter
from shoal.transports.postgres.client import channel_of
from shoal.transports.postgres.coordinator_connection import CoordinatorDatabaseConnection
from shoal.transports.request_rate import Rate, RateLimit

BATCH, BATCH_BYTES = 64, 256 << 20
"""The most that one poll returns."""
_SETTLED_S = 30.0
"""Rows get their number right before they are committed, and an idle transaction is ended after ten seconds. So no row can appear with a
smaller number than one that was seen this long ago."""
_ABANDONED_S = 600.0
"""Replies that were not read for this long are deleted."""
_TIDY_EVERY_S = 5.0
_WRITTEN_BYTES = 16 << 20
"""After publishing this much, unused frames are deleted earlier than usual."""
_READ_S = 0.3
"""Right after frames were published, many workers read them: deleting old rows waits for this long."""
_FRAMES_KEPT = 8


class LostFramesError(ShoalError):
    """Frames that a row refers to are not in the database."""


class _Known(NamedTuple):
    frame: weakref.ref[memoryview]
    blob: uuid.UUID
    checksum: int


class KnownFrames:
    """Remembers which blob a frame came from, so that it need not be stored again, and its CRC-32. It does not keep frames alive."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def add(self, frame: memoryview, blob: uuid.UUID, checksum: int) -> None:
        key = id(frame)
        self._known[key] = _Known(weakref.ref(frame, lambda _: self._known.pop(key, None)), blob, checksum)

    def _find(self, frame: Frame) -> _Known | None:
        found = self._known.get(id(frame))
        return found if found and found.frame() is frame else None

    def blob_of(self, frame: Frame) -> uuid.UUID | None:
        found = self._find(frame)
        return found.blob if found else None

    def checksum_of(self, frame: Frame) -> int:
        """The CRC-32 of any frame; of one that came out of the database it was computed when the frame was read."""
        found = self._find(frame)
        return found.checksum if found else crc32(frame)


class DeliveredRows:
    """Numbers of rows that `poll` has returned, and the number after which to look for others."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.floor = 0
        self._history: deque[tuple[float, int]] = deque()

    def add(self, number: int) -> None:
        self.numbers.add(number)
        self._history.append((time.monotonic(), max(number, self._history[-1][1] if self._history else 0)))

    def settle(self) -> None:
        while self._history and self._history[0][0] < time.monotonic() - _SETTLED_S:
            self.floor = self._history.popleft()[1]
        self.numbers = {number for number in self.numbers if number > self.floor}


class _Row(NamedTuple):
    number: int
    request: Request
    blobs: list[uuid.UUID]
    size: int
    too_large: str | None


class RequestTables(CoordinatorDatabaseConnection):
    """`poll`, `reply` and `close` belong to one thread; `wake` to any."""

    def __init__(
        self,
        conninfo: str,
        *,
        max_frame_bytes: int,
        rate: Rate = Rate(),  # noqa: B008 - a tuple
        poll_interval_s: float = 5.0,
    ) -> None:
        self.limits = wire.Limits(max_frame_bytes)
        super().__init__(conninfo, self.limits)
        self.address = self.connection.name
        self.traffic = Traffic()
        self.known = KnownFrames()
        self._poll_interval_s = poll_interval_s
        self._rates = RateLimit(rate)
        self._requests, self._contributions = DeliveredRows(), DeliveredRows()
        self._waiting: dict[tuple[bytes, int], int] = {}
        """Requests that `poll` returned and that have no reply yet, and their rows."""
        self._published_frames: OrderedDict[int, tuple[Frame, uuid.UUID]] = OrderedDict()
        self._published_over = 0
        """Which connection (`connect_count`) the published frames were written over."""
        self._writer = BulkWriter(conninfo)
        self._tidied_at = time.monotonic()
        self._written_at = 0.0
        self._written_bytes = 0
        """Bytes published since unused frames were last deleted."""

    # --- requests and results -----------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> list[Request]:
        """Requests, results of units (`delivered`) and units that failed for good, as soon as there are some."""
        self.raise_if_replaced()
        found = self._new_rows()
        self._tidy(idle=not found)
        if not found and timeout_s > 0:
            self.connection.wait(min(timeout_s, self._poll_interval_s))
            found = self._new_rows()
        return found

    def wake(self) -> None:
        self.connection.wake()

    def _new_rows(self) -> list[Request]:
        rows = [*self._new_requests(), *self._new_results()]
        opened: list[Request] = []
        size = 0
        for row in rows[:BATCH]:
            if opened and size + row.size > BATCH_BYTES:
                break
            size += row.size
            opened += self._open_row(row)
        if len(rows) > BATCH:
            self.connection.wake()
        return opened

    def _new_requests(self) -> list[_Row]:
        self._requests.settle()
        rows = self.fetch(
            "SELECT r.id, r.peer, r.number, r.header, r.frames, r.too_large, (SELECT coalesce(sum(b.bytes), 0)::int8 FROM shoal.blobs b"
            " WHERE b.id = ANY (r.frames)) FROM shoal.requests r WHERE r.id > %s AND r.id <> ALL (%s) ORDER BY r.id LIMIT %s",
            (self._requests.floor, list(self._requests.numbers), BATCH + 1),
        )
        return [_Row(row[0], Request(row[1].bytes, row[2], Message({}, (row[3],))), row[4], len(row[3]) + row[6], row[5]) for row in rows]

    def _open_row(self, row: _Row) -> list[Request]:
        if row.request.peer == b"":
            return self._open_result(row)
        self._requests.add(row.number)
        request = row.request
        self.traffic.receive(row.size)
        if row.too_large is not None:
            return self._refuse(request, "oversized", row.too_large)
        try:
            content = [request.message.frames[0], *self.read(row.blobs)]
            message = wire.decode(content, self.limits)[1]
        except LostFramesError as problem:  # a server that was killed forgets requests: their workers ask again
            return self._refuse(request, "malformed", str(problem))
        except wire.Malformed as problem:
            return self._refuse(request, problem.reason, str(problem))
        if not self._rates.admits(request.peer, time.monotonic()):
            return self._refuse(request, "too-fast", self._rates.why)
        self._waiting[request.peer, request.number] = row.number
        return [request._replace(message=message)]

    def _refuse(self, request: Request, reason: str, why: str) -> list[Request]:
        self.traffic.refuse(reason)
        header = wire.encode(wire.refusal(reason, why), request.number, self.limits)[0]
        self.carry_out(lambda: self._answer(request, header, ()))
        return []

    def read(self, blobs: Sequence[uuid.UUID]) -> tuple[memoryview, ...]:
        """Read blobs as frames, and remember which frame is which blob."""
        if not blobs:
            return ()
        found = self.run(
            lambda connection: frames.read(
                connection,
                "WITH f AS (SELECT * FROM unnest(%b::uuid[]) WITH ORDINALITY f (id, position))"
                " SELECT 0, ARRAY(SELECT b.bytes FROM f JOIN shoal.blobs b USING (id) ORDER BY position), NULL::bytea, 0"
                " UNION ALL SELECT f.position::int4, NULL, p.data, p.n FROM f JOIN shoal.parts p ON p.blob = f.id ORDER BY 1, 4",
                (list(blobs),),
                checksums=True,
            )
        )
        if found is None or len(found.frames) != len(blobs):
            raise LostFramesError(f"{self.connection.name} has lost frames that it refers to: restore it from a backup")
        for frame, blob, checksum in zip(found.frames, blobs, found.checksums, strict=True):
            self.known.add(frame, blob, checksum)
        return found.frames

    # --- replies -----------------------------------------------------------------------------

    def reply(self, request: Request, message: Message) -> None:
        """Reply to a request. No caller waits for a reply to a unit's result: replying to one does nothing."""
        parts = wire.encode(message, request.number, self.limits)
        if request.peer == b"":
            return
        if self.carry_out(lambda: self._answer(request, parts[0], message.frames)):
            self.traffic.send(wire.size_of(parts))
        else:
            self.traffic.refuse("gone")

    def _answer(self, request: Request, header: Frame, content: Sequence[Frame]) -> bool:
        peer = uuid.UUID(bytes=request.peer)
        taken = self.fetch("DELETE FROM shoal.requests WHERE peer = %s AND number = %s RETURNING frames", (peer, request.number))
        waited = self._waiting.pop((request.peer, request.number), None)
        if not taken:
            return False
        if waited is not None:
            self.on_rollback(lambda: self._waiting.update({(request.peer, request.number): waited}))
        self.release(taken[0][0])
        ids = self.publish_frames(content)
        self.fetch(
            "WITH put AS (INSERT INTO shoal.replies VALUES (%b, %b::int8, %b, %b::uuid[])) SELECT pg_notify(%t, '')",
            (peer, request.number, header, ids, channel_of(peer)),
        )
        return True

    def publish_frames(self, content: Sequence[Frame]) -> list[uuid.UUID]:
        """The ids of frames that are published. One that was published a moment ago is not written again."""
        if not content:
            return []
        if self._published_over != self.connection.connect_count:  # a server that crashed has emptied what is not logged
            self._published_frames.clear()
            self._published_over = self.connection.connect_count
        new = [frame for frame in {id(frame): frame for frame in content}.values() if id(frame) not in self._published_frames]
        if new:
            with self.transaction():
                self._write_frames(new)
        chosen = [self._published_frames[id(frame)][1] for frame in content]
        for frame in content:
            self._published_frames.move_to_end(id(frame))
        while len(self._published_frames) > _FRAMES_KEPT + len(content):
            self._published_frames.popitem(last=False)
        return chosen

    def _write_frames(self, new: Sequence[Frame]) -> None:
        ids = [uuid.uuid4() for _ in new]
        self.before_commit(self._writer.write(ids, new))
        self._written_at, self._written_bytes = time.monotonic(), self._written_bytes + sum(frames.sizes(new))
        for frame, blob in zip(new, ids, strict=True):
            self._published_frames[id(frame)] = frame, blob
        self.on_rollback(self._published_frames.clear)

    def release(self, blobs: Sequence[uuid.UUID]) -> None:
        self.freed_bytes += self.run(lambda connection: frames.release(connection, blobs))

    def _tidy(self, idle: bool) -> None:
        """Delete replies that were never read and frames that no row refers to, when there is nothing else to do or much has gathered."""
        now = time.monotonic()
        late, idle = now - self._tidied_at > _TIDY_EVERY_S, idle and now - self._written_at > _READ_S
        if not late and self._written_bytes < (_WRITTEN_BYTES if idle else 16 * _WRITTEN_BYTES):
            return
        self._tidied_at, self._written_bytes = time.monotonic(), 0
        self.carry_out(self._drop_abandoned)

    def _drop_abandoned(self) -> None:
        self.fetch("DELETE FROM shoal.replies WHERE at < now() - make_interval(secs => %s) RETURNING 1", (_ABANDONED_S,))
        self.drop_unused_frames()

    def drop_unused_frames(self) -> None:
        kept = [blob for _, blob in self._published_frames.values()]
        gone = self.fetch(
            "DELETE FROM shoal.published_frames f WHERE f.id <> ALL (%s::uuid[])"
            " AND NOT EXISTS (SELECT FROM shoal.replies r WHERE f.id = ANY (r.frames))"
            " AND NOT EXISTS (SELECT FROM shoal.weights w WHERE f.id = ANY (w.frames)) RETURNING bytes",
            (kept,),
        )
        self.freed_bytes += sum(row[0] for row in gone)

    def close_connection(self) -> None:
        self._writer.close()
        super().close_connection()

    # --- results of units -----------------------------------------------------------

    def _new_results(self) -> list[_Row]:
        self._contributions.settle()
        rows = self.fetch(
            "SELECT c.seq, c.kind, c.worker, c.unit, c.iteration, c.epoch, c.start, c.batches, c.reason, c.header, c.frames,"
            " (SELECT coalesce(sum(b.bytes), 0)::int8 FROM shoal.blobs b WHERE b.id = ANY (c.frames))"
            " FROM shoal.contributions c WHERE c.seq > %s AND c.seq <> ALL (%s) ORDER BY c.seq LIMIT %s",
            (self._contributions.floor, list(self._contributions.numbers), BATCH + 1),
        )
        return [_Row(row[0], Request(b"", row[0], Message(_headed(row), (row[9] or b"",))), row[10], row[11], None) for row in rows]

    def _open_result(self, row: _Row) -> list[Request]:
        self._contributions.add(row.number)
        header, sent = row.request.message.header, row.request.message.frames[0]
        if header["kind"] == "delivered":
            self.traffic.receive(len(sent) + row.size)
            try:
                header = wire.decode([sent], self.limits)[1].header | header
            except wire.Malformed as problem:
                self.traffic.refuse(problem.reason)
                header |= {"kind": "failed", "reason": f"{header['worker']} sent something that is not a result"}
        return [row.request._replace(message=Message(header, self.read(row.blobs)))]


def _headed(row: tuple[Any, ...]) -> dict[str, Any]:
    header = dict(zip(("kind", "worker", "unit", "base", "epoch", "start", "batches", "reason"), row[1:9], strict=True))
    del header["reason" if row[1] == "delivered" else "worker"]
    return header | {"seq": row[0]}
