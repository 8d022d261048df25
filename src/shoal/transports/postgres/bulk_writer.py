"""What the coordinator hands out is written over connections of its own: several at once, while the main one does the rest."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from psycopg import OperationalError, errors

from shoal.transports.interface import Frame
from shoal.transports.postgres import frames
from shoal.transports.postgres.reconnecting import Connection, ReconnectingConnection

_CONNECTIONS = 2
_SMALL_BYTES = 1 << 20
"""Less than this is written over one connection."""


class BulkWriter:
    """Writes flyers. They are there for all to see before anything refers to them, and what nothing refers to is thrown away later."""

    def __init__(self, conninfo: str) -> None:
        self._lines = [ReconnectingConnection(conninfo) for _ in range(_CONNECTIONS)]
        self._pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="shoal-press")

    def write(self, ids: Sequence[uuid.UUID], content: Sequence[Frame]) -> Callable[[], None]:
        """Begin to write frames; the function that is returned waits for the end. Unreachable: a connection was lost, and none counts."""
        sizes = frames.sizes(content)
        rows = list(zip(ids, sizes, strict=True))
        self._lines[0].run_once(
            lambda connection: connection.cursor().executemany("INSERT INTO shoal.published_frames VALUES (%s, %s)", rows)
        )
        lines = self._lines if sum(sizes) > _SMALL_BYTES else self._lines[:1]

        def write(turn: int) -> None:
            def copy(connection: Connection) -> None:
                try:
                    frames.copy_in(connection, "published_parts", ids, content, turn, len(lines))
                except errors.ForeignKeyViolation:
                    raise OperationalError("the server crashed, which emptied the table of flyers") from None

            lines[turn].run_once(copy)

        under_way = [self._pool.submit(write, turn) for turn in range(len(lines))]

        def wait() -> None:
            problems = [one.exception() for one in under_way]
            for problem in filter(None, problems):
                raise problem

        return wait

    def close(self) -> None:
        for line in self._lines:
            line.stop()
        self._pool.shutdown()
        for line in self._lines:
            line.close()
