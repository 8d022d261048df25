"""A bound on what a worker sends: its connections pass through this process, which forwards their bytes at a given rate.

ZeroMQ and libpq send from code of their own, so a limit inside each transport is not possible; a forwarder on 127.0.0.1 serves all. All
connections share one token bucket, and each takes its tokens for a small piece at a time, so that a heartbeat does not wait for
an upload. What is received is not limited.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from shoal.transports import addresses, database_address

_BURST_S = 0.1
"""Bytes of this much time may pass at once."""
_PIECE_S = 0.02
_SMALLEST_PIECE, _LARGEST_PIECE = 1500, 1 << 16
_WAITING_BYTES = 1 << 16
"""Buffer of the socket that a worker writes to. A larger one would take in whole updates, which the worker then took for sent."""
_CONNECT_S = 10.0


class UploadBucket:
    """Token bucket for bytes, shared by threads. Each reserves its turn, so turns are in the order of the calls."""

    def __init__(
        self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self.bytes_per_s, self.clock, self.sleep = bytes_per_s, clock, sleep
        self.piece = int(min(_LARGEST_PIECE, max(_SMALLEST_PIECE, bytes_per_s * _PIECE_S)))
        self._free_at = clock()
        self._reserving = threading.Lock()

    def take(self, count: int) -> None:
        """Wait until this many bytes may be sent."""
        with self._reserving:
            now = self.clock()
            self._free_at = max(self._free_at, now - _BURST_S) + count / self.bytes_per_s
            wait_s = self._free_at - now
        if wait_s > 0:
            self.sleep(wait_s)


class UploadLimit:
    """Forwards connections to coordinators and databases at the rate of one bucket."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bucket = UploadBucket(bytes_per_s)
        self._ports: dict[tuple[str, int], int] = {}
        self._sockets: set[socket.socket] = set()
        self._changing = threading.Lock()
        self._closed = False

    def route(self, address: str) -> str:
        """The address on this machine whose connections are forwarded to `address`."""
        if not database_address.is_address(address):
            target = addresses.parse(address)
            return str(target._replace(host="127.0.0.1", port=self._port_for(target.host, target.port)))
        access = database_address.parse(address)
        if access.host.startswith("/"):  # a socket in a folder of this machine: no network
            return address
        port = self._port_for(access.host, access.port)
        if "sslmode=verify-full" in access.options:  # libpq compares the name with the certificate
            return access._replace(port=port, options=f"{access.options}&hostaddr=127.0.0.1").address
        return access._replace(host="127.0.0.1", port=port).address

    def _port_for(self, host: str, port: int) -> int:
        with self._changing:
            if (host, port) not in self._ports:
                listener = socket.create_server(("127.0.0.1", 0))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WAITING_BYTES)
                self._sockets.add(listener)
                self._ports[host, port] = listener.getsockname()[1]
                threading.Thread(target=self._accept, args=(listener, (host, port)), name="upload limit", daemon=True).start()
            return self._ports[host, port]

    def _accept(self, listener: socket.socket, target: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = listener.accept()
                threading.Thread(target=self._forward, args=(near, target), name="upload limit", daemon=True).start()

    def _forward(self, near: socket.socket, target: tuple[str, int]) -> None:
        try:
            far = socket.create_connection(target, _CONNECT_S)
        except OSError:
            near.close()
            return
        with self._changing:
            self._sockets |= {near, far}
        if self._closed:
            self.close()
        for end in (near, far):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_pump, args=(far, near, None), name="upload limit", daemon=True)
        back.start()
        _pump(near, far, self._bucket)
        back.join()
        with self._changing:
            self._sockets -= {near, far}
        near.close()
        far.close()

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        with self._changing:
            sockets = list(self._sockets)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def _pump(source: socket.socket, sink: socket.socket, bucket: UploadBucket | None) -> None:
    """Forward until the source ends or either side breaks."""
    try:
        while data := source.recv(_LARGEST_PIECE if bucket is None else bucket.piece):
            if bucket is not None:
                bucket.take(len(data))
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
