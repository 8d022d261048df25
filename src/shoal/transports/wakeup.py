"""A bell that any thread may ring, and that a thread waiting on sockets hears."""

from __future__ import annotations

import contextlib
import socket


class Bell:
    """A pair of connected sockets: pollers everywhere understand those, which is not so of events and conditions."""

    def __init__(self) -> None:
        self._ringer, self._listener = socket.socketpair()
        self._ringer.setblocking(False)
        self._listener.setblocking(False)

    def fileno(self) -> int:
        return self._listener.fileno()

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it rings already; closed: nobody listens any more
            self._ringer.send(b"!")

    def silence(self) -> None:
        with contextlib.suppress(OSError):
            while self._listener.recv(4096):
                pass

    def close(self) -> None:
        self._ringer.close()
        self._listener.close()
