"""The client's side: one connection, which is kept, and made again after any error."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time

from shoal.errors import ShoalError
from shoal.transports import addresses, wire
from shoal.transports.interface import Message, Refused, Traffic, Unreachable, wrong_token
from shoal.transports.xmlrpc.encoding import most_body_bytes, pack, require_loopback, unpack

_LOST = (OSError, http.client.HTTPException)


class XmlRpcClient:
    """Keeps one connection, and makes a new one after any error."""

    def __init__(self, address: str, *, token: str, max_frame_bytes: int, insecure: bool = False) -> None:
        self._target = addresses.parse(address)
        require_loopback(self._target.host, insecure)
        self.address = address
        self.traffic = Traffic()
        self._limits = wire.Limits(max_frame_bytes)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "text/xml"}
        self._connection: http.client.HTTPConnection | None = None
        self._number = 0
        self._calling = threading.Lock()
        self._closed = threading.Event()

    def call(self, message: Message, timeout_s: float) -> Message:
        with self._calling:
            self._number += 1
            deadline = time.monotonic() + timeout_s
            parts = wire.encode_request(message, self._number, self._limits)
            try:
                connection = self._connection or self._connect(deadline)
                self.traffic.send(wire.size_of(parts))
                return self._opened(self._exchange(connection, "POST", pack(parts, answer=False), deadline))
            except ShoalError:
                self._disconnect()
                raise
            except _LOST as problem:
                self._disconnect()
                raise Unreachable(f"no answer from {self.address}: {problem or 'the connection was lost'}") from None

    def _connect(self, deadline: float) -> http.client.HTTPConnection:
        """A connection whose token was accepted. A coordinator that is not there yet is waited for."""
        while True:
            self._connection = connection = http.client.HTTPConnection(self._target.host, self._target.port, timeout=_left(deadline))
            try:
                connection.connect()
                self._exchange(connection, "GET", b"", deadline)
                return connection
            except ConnectionError:
                connection.close()
                if self._closed.wait(0.05) or time.monotonic() >= deadline:
                    raise

    def _exchange(self, connection: http.client.HTTPConnection, method: str, body: bytes, deadline: float) -> bytes:
        if self._closed.is_set():
            raise ConnectionError("closed")
        self._set_timeout(connection, deadline)
        connection.request(method, "/RPC2", body, self._headers)
        self._set_timeout(connection, deadline)
        response = connection.getresponse()
        content = self._read(connection, response, deadline)
        if response.status == 401:
            raise wrong_token(self.address)
        if response.status == 413:
            raise Refused(f"the coordinator at {self.address} takes no message this large", "oversized")
        if response.status != 200:
            raise Refused(f"{self.address} answers {response.status} {content[:40]!r}: is that a coordinator's port?", "protocol")
        return content

    def _read(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: float) -> bytes:
        most = most_body_bytes(self._limits)
        content = bytearray()
        while piece := response.read(1 << 16):
            content += piece
            if len(content) > most:
                raise http.client.HTTPException("a reply that is too long")
            self._set_timeout(connection, deadline)
        if response.length:
            raise http.client.IncompleteRead(bytes(content))
        return bytes(content)

    def _set_timeout(self, connection: http.client.HTTPConnection, deadline: float) -> None:
        if connection.sock:
            connection.sock.settimeout(_left(deadline))

    def _opened(self, body: bytes) -> Message:
        try:
            parts = unpack(body, answer=True)
            number, message = wire.decode(parts, self._limits)
        except wire.Malformed as problem:
            raise Unreachable(f"{self.address} answers with something else: {problem}") from None
        if number != self._number:
            raise Unreachable(f"{self.address} answered another request")
        self.traffic.receive(wire.size_of(parts))
        return message

    def _disconnect(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection = None

    def close(self) -> None:
        self._closed.set()
        line = self._connection.sock if self._connection else None
        if line:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        if self._calling.acquire(timeout=1.0):  # a call that still tries to connect hangs up by itself
            self._disconnect()
            self._calling.release()


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
