"""Self-pipe: lets any thread wake a thread that is blocked in select()."""

from __future__ import annotations

import contextlib
import socket


class Wakeup:
    """A pair of connected sockets, which a selector or poller of any system can wait for."""

    def __init__(self) -> None:
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.setblocking(False)

    def fileno(self) -> int:
        return self._receiver.fileno()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: no thread waits any more
            self._sender.send(b"!")

    def clear(self) -> None:
        """Forget earlier calls of `wake`."""
        with contextlib.suppress(OSError):
            while self._receiver.recv(4096):
                pass

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()
