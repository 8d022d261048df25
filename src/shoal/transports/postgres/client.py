"""The client's side of requests: inserts a request as a row, and reads the row of its reply."""

from __future__ import annotations

import hashlib
import threading
import time
import uuid

from shoal.transports import wire
from shoal.transports.interface import Frame, Message, Traffic, Unreachable
from shoal.transports.postgres import frames
from shoal.transports.postgres.reconnecting import Connection, ReconnectingConnection

_FIRST_PAUSE_S = 0.05
"""The first pause between two queries for the reply, if no notification comes. Each pause is twice the one before, up to the poll
interval."""


class PostgresClient:
    """One caller. Its `peer` is a secret, since it is enough to read the replies."""

    def __init__(self, conninfo: str, *, max_frame_bytes: int, poll_interval_s: float = 5.0) -> None:
        self.traffic = Traffic()
        self._limits = wire.Limits(max_frame_bytes)
        self._poll_interval_s = poll_interval_s
        self._peer = uuid.uuid4()
        self._connection = ReconnectingConnection(conninfo, [channel_of(self._peer)])
        self._number = 0
        self._calling = threading.Lock()

    def call(self, message: Message, timeout_s: float) -> Message:
        with self._calling:
            deadline = time.monotonic() + timeout_s
            self._number += 1
            parts = wire.encode_request(message, self._number, self._limits)
            self._connection.run(lambda connection: self._ask(connection, parts), timeout_s)
            self.traffic.send(wire.size_of(parts))
            return self._answer(deadline)

    def _ask(self, connection: Connection, parts: list[Frame]) -> None:
        header, *content = parts
        with connection.transaction():
            ids = frames.upload(connection, content) if content and _is_within_limits(connection, content) else []
            connection.execute(
                "SELECT shoal.send_request(%b, %b::int8, %b, %b::uuid[], %b::int8[])",
                (self._peer, self._number, header, ids, frames.sizes(content)),
            )

    def _answer(self, deadline: float) -> Message:
        pause = _FIRST_PAUSE_S
        while True:
            answer = self._connection.run(self._read_reply, deadline - time.monotonic())
            if answer is None:
                raise Unreachable(f"{self._connection.name} has lost the request: the coordinator stopped, or the server crashed")
            if answer.row[0] == 0:
                return self._opened(answer)
            if (left := deadline - time.monotonic()) <= 0:
                raise Unreachable(f"no answer through {self._connection.name} in time: is the coordinator running?")
            self._connection.wait(min(pause, left))
            pause = min(2 * pause, self._poll_interval_s)

    def _read_reply(self, connection: Connection) -> frames.FramedRow | None:
        query = "SELECT frame, sizes, data, header FROM shoal.read_reply(%b, %b::int8) ORDER BY frame, n"
        return frames.read(connection, query, (self._peer, self._number))

    def _opened(self, answer: frames.FramedRow) -> Message:
        parts = [answer.row[3], *answer.frames]
        try:
            message = wire.decode(parts, self._limits)[1]
        except wire.Malformed as problem:
            raise Unreachable(f"{self._connection.name} holds something else than an answer: {problem}") from None
        self.traffic.receive(wire.size_of(parts))
        return message

    def close(self) -> None:
        self._connection.close_shared(self._calling, "SELECT shoal.forget_requests(%b)", (self._peer,))


def channel_of(peer: uuid.UUID) -> str:
    """Where a caller is notified. It does not give the secret away."""
    return "shoal_" + hashlib.md5(str(peer).encode(), usedforsecurity=False).hexdigest()


def _is_within_limits(connection: Connection, content: list[Frame]) -> bool:
    """Whether the frames are within the limits; else the request is sent without them, and is refused for their sizes."""
    if wire.size_of(content) < frames.LARGE_BYTES:
        return True
    row = connection.execute("SELECT max_frame_bytes FROM shoal.message_limits()").fetchone()
    return row is None or max(frames.sizes(content)) <= row[0]
