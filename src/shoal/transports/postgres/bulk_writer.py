"""Writes the frames that the coordinator publishes, over several connections at once, beside the main one."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent import futures

from psycopg import OperationalError, errors

from shoal.transports.interface import Frame
from shoal.transports.postgres import frames
from shoal.transports.postgres.reconnecting import Connection, ReconnectingConnection

_CONNECTIONS = 2
_SMALL_BYTES = 1 << 20
"""Less than this is written over one connection."""


class BulkWriter:
    """Frames are committed before any row refers to them; frames that no row refers to are deleted later."""

    def __init__(self, conninfo: str) -> None:
        self._connections = [ReconnectingConnection(conninfo) for _ in range(_CONNECTIONS)]
        self._pool = futures.ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="shoal-bulk-writer")

    def write(self, ids: Sequence[uuid.UUID], content: Sequence[Frame]) -> Callable[[], None]:
        """Begin to write frames; the returned function waits for the end. Raises Unreachable if a connection was lost: then none count."""
        sizes = frames.sizes(content)
        rows = list(zip(ids, sizes, strict=True))
        self._connections[0].run_once(
            lambda connection: connection.cursor().executemany("INSERT INTO shoal.published_frames VALUES (%s, %s)", rows)
        )
        used = self._connections if sum(sizes) > _SMALL_BYTES else self._connections[:1]

        def write_share(turn: int) -> None:
            def copy(connection: Connection) -> None:
                try:
                    frames.copy_in(connection, "published_parts", ids, content, turn, len(used))
                except errors.ForeignKeyViolation:
                    raise OperationalError("the server crashed, which emptied the table of published frames") from None

            used[turn].run_once(copy)

        writes = [self._pool.submit(write_share, turn) for turn in range(len(used))]

        def wait() -> None:
            futures.wait(writes)
            for write in writes:
                write.result()

        return wait

    def close(self) -> None:
        for connection in self._connections:
            connection.stop()
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()
