"""XML-RPC over HTTP, for debugging: the same results, slower, and readable with any network tool.

One method, `shoal.call(header, frames)`, all of it base64. The join token travels in the Authorization header and is checked before a body
is read. Nothing is encrypted, so a server does not leave this machine unless told that this is meant.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import socket
import socketserver
import threading
import time
import xmlrpc.client
from typing import Any
from xml.parsers import expat

from shoal.errors import ShoalError
from shoal.transports import addresses, keys, wire
from shoal.transports.desk import Desk
from shoal.transports.interface import Frame, Message, Refused, Request, Traffic, Unreachable
from shoal.transports.rate import Rate

METHOD = "shoal.call"
MOST_CONNECTIONS = 256
IDLE_S = 30.0
"""How long a connection may dawdle over its request."""
LINGER_S = 2.0
_SLOWEST_BYTES_PER_S = 125_000
_HANGING_UP = (OSError, http.client.HTTPException)


def pack(parts: list[Frame], *, answer: bool) -> bytes:
    """A message's parts as a method call, or as its answer."""
    header, *frames = map(bytes, parts)
    value: Any = (header, frames)
    text = xmlrpc.client.dumps(([*value],) if answer else value, None if answer else METHOD, methodresponse=answer)
    return text.encode("ascii")


def unpack(body: bytes, *, answer: bool) -> list[Frame]:
    """The parts in a body, or Malformed. Document types and entities, which blow a few bytes up to gigabytes, never reach the parser."""
    if b"<!" in body or not body.isascii():
        raise wire.Malformed("XML with declarations or foreign letters")
    target = xmlrpc.client.Unmarshaller(use_builtin_types=True)
    try:
        _parse(body, target)
        values: Any = target.close()
        header, frames = values[0] if answer else values
    except Exception as problem:  # the parser raises whatever its insides raise
        raise wire.Malformed(f"not a call of {METHOD}: {problem!r:.100}") from None
    if (not answer and target.getmethodname() != METHOD) or not isinstance(frames, list):
        raise wire.Malformed(f"not a call of {METHOD}")
    parts = [header, *frames]
    if not all(type(part) is bytes for part in parts):
        raise wire.Malformed("parts that are not bytes")
    return parts


def _parse(body: bytes, target: xmlrpc.client.Unmarshaller) -> None:
    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler = target.start
    parser.EndElementHandler = target.end
    parser.CharacterDataHandler = target.data
    parser.buffer_text = True
    target.xml("", None)  # expat has decoded the text already
    parser.Parse(body, True)


def most_body_bytes(limits: wire.Limits) -> int:
    """What the largest message takes in base64, with its line ends and tags."""
    return (limits.header_bytes + limits.frames * limits.frame_bytes) * 7 // 5 + 65536


# --- the server ---------------------------------------------------------------------------------------


class XmlRpcServer:
    """Each connection has a thread that waits until its answer is given."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str,
        max_frame_bytes: int,
        max_header_bytes: int = wire.HEADER_BYTES,
        rate: Rate = Rate(),  # noqa: B008 - a tuple
        insecure: bool = False,
    ) -> None:
        host = addresses.resolve(host)
        _only_here(host, insecure)
        self.traffic = Traffic()
        self._desk = Desk(wire.Limits(max_frame_bytes, max_header_bytes), self.traffic, rate)
        try:
            self._http = _HttpServer(host, port, self._desk, token)
        except OSError as problem:
            raise ShoalError(f"cannot listen on {host} port {port}: {problem.strerror}. Is another coordinator running?") from None
        self.address = str(addresses.Address("http", addresses.to_tell(host), self._http.server_address[1]))
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="shoal-http", daemon=True)
        self._thread.start()

    def poll(self, timeout_s: float) -> list[Request]:
        return self._desk.poll(timeout_s)

    def reply(self, request: Request, message: Message) -> None:
        self._desk.reply(request, message)

    def wake(self) -> None:
        self._desk.wake()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._desk.close()
        self._http.hang_up()
        self._http.server_close()


def _only_here(host: str, insecure: bool) -> None:
    if not insecure and not addresses.is_loopback(host):
        raise ShoalError(f"XML-RPC is not encrypted and {host} is beyond this machine: use the zmq transport, or say that this is meant")


class _HttpServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Knows its connections, so that it can limit them, and end them when it closes."""

    allow_reuse_address = os.name == "posix"
    request_queue_size = 64

    def __init__(self, host: str, port: int, desk: Desk, token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.desk = desk
        self.expected = f"Bearer {token}".encode()
        self.connections: set[socket.socket] = set()
        self.closing = threading.Event()
        super().__init__((host, port), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return len(self.connections) < MOST_CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is no news."""

    def hang_up(self) -> None:
        """Ask for nothing more, let answers leave that were given, then end what is left."""
        self.closing.set()
        for how, patience_s in ((socket.SHUT_RD, LINGER_S), (socket.SHUT_RDWR, 0.0)):
            for connection in list(self.connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(how)
            deadline = time.monotonic() + patience_s
            while self.connections and time.monotonic() < deadline:
                time.sleep(0.005)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Reads calls, queues them at the desk, and writes the answers."""

    server: _HttpServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Whether the token is right, which a client asks before it sends much."""
        if self._authorised():
            self._respond(200, b"")

    def do_POST(self) -> None:
        if not self._authorised() or not self._measured():
            return
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            waiting = self.server.desk.ask(self._peer(), unpack(body, answer=False))
        except wire.Malformed as problem:
            self._turn_away(400, problem.reason)
            return
        while not self._gone():
            with contextlib.suppress(TimeoutError):
                if parts := waiting.answer(1.0):
                    self._respond(200, pack(parts, answer=True))
                break
        self.server.desk.forget(waiting)

    def _authorised(self) -> bool:
        if keys.same(self.headers.get("Authorization", "").encode(), self.server.expected):
            return True
        self._turn_away(401, "unauthorised")
        return False

    def _measured(self) -> bool:
        """Whether the body says how long it is, and may be."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 16):
            self._turn_away(411, "malformed")
            return False
        if int(length) > most_body_bytes(self.server.desk.limits):
            self._turn_away(413, "oversized")
            return False
        return True

    def _turn_away(self, status: int, reason: str) -> None:
        self.server.desk.traffic.refuse(reason)
        self.close_connection = True
        self._respond(status, reason.encode())

    def _respond(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.connection.settimeout(IDLE_S + len(body) / _SLOWEST_BYTES_PER_S)
        self.wfile.write(body)
        self.connection.settimeout(IDLE_S)

    def _gone(self) -> bool:
        """Whether the client hung up: nothing else can make its connection readable while it waits for us."""
        self.connection.settimeout(0.0)
        try:
            self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self.server.closing.is_set()
        finally:
            self.connection.settimeout(IDLE_S)
        return True

    def _peer(self) -> bytes:
        return f"{self.client_address[0]}:{self.client_address[1]}".encode()

    def log_message(self, format: str, *args: Any) -> None:
        """Only the command line prints."""


# --- the client ---------------------------------------------------------------------------------------


class XmlRpcClient:
    """Keeps one connection, and makes a new one after any trouble."""

    def __init__(
        self, address: str, *, token: str, max_frame_bytes: int, max_header_bytes: int = wire.HEADER_BYTES, insecure: bool = False
    ) -> None:
        self._target = addresses.parse(address)
        _only_here(self._target.host, insecure)
        self.address = address
        self.traffic = Traffic()
        self._limits = wire.Limits(max_frame_bytes, max_header_bytes)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "text/xml"}
        self._connection: http.client.HTTPConnection | None = None
        self._number = 0
        self._calling = threading.Lock()
        self._closed = threading.Event()

    def call(self, message: Message, timeout_s: float) -> Message:
        with self._calling:
            self._number += 1
            deadline = time.monotonic() + timeout_s
            parts = self._encoded(message)
            try:
                connection = self._connection or self._connect(deadline)
                self.traffic.send(wire.size_of(parts))
                return self._opened(self._exchange(connection, "POST", pack(parts, answer=False), deadline))
            except ShoalError:
                self._hang_up()
                raise
            except _HANGING_UP as problem:
                self._hang_up()
                raise Unreachable(f"no answer from {self.address}: {problem or 'the connection was lost'}") from None

    def _encoded(self, message: Message) -> list[Frame]:
        try:
            return wire.encode(message, self._number, self._limits)
        except wire.Oversized as problem:
            raise Refused(str(problem), problem.reason) from None

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
        self._be_patient_until(connection, deadline)
        connection.request(method, "/RPC2", body, self._headers)
        self._be_patient_until(connection, deadline)
        response = connection.getresponse()
        content = self._read(connection, response, deadline)
        if response.status == 401:
            raise Refused(f"the coordinator at {self.address} does not accept this join token", "unauthorised")
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
                raise http.client.HTTPException("an answer without end")
            self._be_patient_until(connection, deadline)
        if response.length:
            raise http.client.IncompleteRead(bytes(content))
        return bytes(content)

    def _be_patient_until(self, connection: http.client.HTTPConnection, deadline: float) -> None:
        if connection.sock:
            connection.sock.settimeout(_left(deadline))

    def _opened(self, body: bytes) -> Message:
        try:
            parts = unpack(body, answer=True)
            number, message = wire.decode(parts, self._limits)
        except wire.Malformed as problem:
            raise Unreachable(f"{self.address} answers with something else: {problem}") from None
        if number != self._number:
            raise Unreachable(f"{self.address} answered another question")
        self.traffic.receive(wire.size_of(parts))
        return message

    def _hang_up(self) -> None:
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
            self._hang_up()
            self._calling.release()


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
