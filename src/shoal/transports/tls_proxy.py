"""TLS proxy: a small process in front of a class's PostgreSQL, whose own build has no TLS.

It answers libpq's SSLRequest with the class's certificate and forwards what it decrypts to the server, which listens on this machine only.
It forwards nothing unencrypted, and no login as the run's own role, which may do anything. Until the server has accepted a client's login,
the proxy bounds what the client costs: connections in all and per address, seconds, and bytes. When the places for such clients are taken,
a new one replaces the one that has been silent for longest; a student's client, which sends at once, is rarely that one. A client with the
class's token stays in this group, since it only enrolls. Of the places for clients that are logged in, one address gets three quarters.

The proxy connects to the server from another loopback address for each client address, so that the server can apply limits per address.

It is started by its path and imports nothing of Shoal. The first line of its standard input holds its options as JSON; it ends when that
input is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import json
import os
import socket
import ssl
import struct
import sys
import threading
import time
from collections import Counter
from typing import Any

SSL_REQUEST, GSS_REQUEST, CANCEL_REQUEST = 80877103, 80877104, 80877102
HANDSHAKE_S = 10.0
LOGIN_S = 30.0
STARTUP_BYTES, LOGIN_BYTES = 10_000, 65_536
"""The most bytes of the first message, and of all messages until the login is accepted. PostgreSQL has the same limit for the first."""
MOST_UNAUTHENTICATED, MOST_UNAUTHENTICATED_PER_ADDRESS = 64, 32
"""Connections that are not logged in yet, in all and from one address. A school may be behind one address."""
PATIENCE_S = 1.0
"""More than the time between two steps of a student's login. Clients that are silent for longer are evicted first."""
FIRST_BYTES_S = 0.25
"""Grace period for a client's first bytes."""
SHUTDOWN_S = 1.0
"""How long a client may take to close its side. It no longer counts, and still has a descriptor."""
_CHUNK = 1 << 18
_SHARE_OF_AN_ADDRESS = 3 / 4
"""One address's share of the connections that are logged in."""
_NAME_BYTES = 63
"""PostgreSQL truncates longer names of roles to this length."""


class ProxyRefusal(Exception):
    """The message to a client that is refused."""


class TlsProxy:
    """Accepts clients and forwards their connections to the server."""

    def __init__(self, options: dict[str, Any], context: ssl.SSLContext) -> None:
        self._server: tuple[str, int] = ("127.0.0.1", options["server_port"])
        self._forbidden = {name.encode()[:_NAME_BYTES] for name in options["forbidden_roles"]}
        self._enrolling = {name.encode()[:_NAME_BYTES] for name in options["passing_roles"]}
        self._most: int = options["most"]
        self._secret = os.urandom(16)
        self._context = context
        self._connections = 0
        self._unauthenticated = UnauthenticatedClients(int(_SHARE_OF_AN_ADDRESS * self._most))
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(listener)
            except OSError:  # too many files are open: try again soon
                await asyncio.sleep(0.1)
                continue
            group = address_group(address[0])
            if not self._unauthenticated.admit_one_more(group, full=self._connections >= self._most):
                client.close()
                continue
            self._admit(client, group)
            await asyncio.sleep(0)  # its first bytes may be here already: read them before the next client may evict it

    def _admit(self, client: socket.socket, address: str) -> None:
        self._connections += 1
        client_state = ClientConnection(self._unauthenticated, address)
        task = client_state.task = asyncio.get_running_loop().create_task(self._serve(client, client_state))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: socket.socket, client_state: ClientConnection) -> None:
        handed_over = False
        try:
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(HANDSHAKE_S):
                if not await _asks_for_tls(client):
                    return
                client_state.on_step()
                handed_over = True
                reader, writer = await _encrypted(client, self._context)
                client_state.on_step()
            await self._forward_client(reader, writer, client_state)
        except (OSError, EOFError, TimeoutError, ssl.SSLError, asyncio.IncompleteReadError):
            pass  # clients come and go
        finally:
            client_state.close()
            self._connections -= 1
            if not handed_over:  # else its transport closes it, and must do so first: the next client may get the same number
                client.close()

    async def _forward_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client_state: ClientConnection) -> None:
        server: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                startup = await _startup(reader)
                client_state.on_step()
                if (problem := _problem(startup, self._forbidden)) is not None:
                    raise ProxyRefusal(problem)
                client_state.only_enrolls = _role(startup) in self._enrolling
                answers, server = await self._to_server(client_state.address)
                server.write(startup)
            await _forward(reader, writer, answers, server, client_state)
        except ProxyRefusal as refusal:
            writer.write(_error(str(refusal)))
            await writer.drain()
        except asyncio.CancelledError:  # evicted: a new client has its place already
            writer.transport.abort()
            raise
        finally:
            for end in (writer, server):
                if end is not None:
                    end.close()

    async def _to_server(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the server from the loopback address that stands for the client's. Not every system has several of those."""
        with contextlib.suppress(OSError):
            own = own_address_for(address, self._secret)
            return await asyncio.open_connection(*self._server, limit=_CHUNK, local_addr=(own, 0))
        return await asyncio.open_connection(*self._server, limit=_CHUNK)


def address_group(address: str) -> str:
    """The group of addresses that limits apply to. IPv6 clients own a whole /64. The same as protocol/address_groups.py."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))


def own_address_for(address: str, secret: bytes) -> str:
    """The loopback address that stands for a client's address: always the same, and not predictable."""
    digest = hashlib.blake2b(address.encode(), key=secret, digest_size=3).digest()
    return f"127.{1 + digest[0] % 254}.{digest[1]}.{1 + digest[2] % 254}"


class UnauthenticatedClients:
    """The clients that are not logged in yet. Bounds their number, in all and per address, and the logged-in clients per address."""

    def __init__(self, most_logged_in_per_address: int) -> None:
        self.clients: list[ClientConnection] = []
        self.logged_in: Counter[str] = Counter()
        self.most_logged_in_per_address = most_logged_in_per_address

    def admit_one_more(self, address: str, *, full: bool) -> bool:
        """Evict a client if a new one from `address` needs its place. Returns False if all places are taken by clients that are logged in.

        `full`: there is no place for another connection."""
        own = [one for one in self.clients if one.address == address]
        if len(own) >= MOST_UNAUTHENTICATED_PER_ADDRESS:
            self._longest_silent(own).evict()
        elif full or len(self.clients) >= MOST_UNAUTHENTICATED:
            if not self.clients:
                return False
            lately = time.monotonic() - PATIENCE_S
            silent = [one for one in self.clients if one.step_at < lately]
            self._longest_silent(silent or self._from_the_address_with_most()).evict()
        return True

    def _longest_silent(self, among: list[ClientConnection]) -> ClientConnection:
        """The oldest of those that had the time to send something and did not. Clients that came a moment ago are kept, unless they are
        the majority."""
        lately = time.monotonic() - FIRST_BYTES_S
        silent = [one for one in among if not one.has_sent]
        new = [one for one in silent if one.step_at >= lately]
        if len(silent) > len(new):
            among = [one for one in silent if one not in new]
        elif 2 * len(new) > len(among):
            among = new
        else:
            among = [one for one in among if one not in new]
        return min(among, key=lambda one: one.step_at)

    def _from_the_address_with_most(self) -> list[ClientConnection]:
        counts = Counter(one.address for one in self.clients)
        return [one for one in self.clients if counts[one.address] == max(counts.values())]


class ClientConnection:
    """One client, which is unauthenticated until the server accepts its login."""

    task: asyncio.Task[None]

    def __init__(self, clients: UnauthenticatedClients, address: str) -> None:
        self._unauthenticated, self.address = clients, address
        self.is_unauthenticated = True
        self.only_enrolls = False
        """Whether its role only enrolls: then it never counts as logged in."""
        self._is_logged_in = False
        self.step_at = time.monotonic()
        """When it connected, or last finished a step of its login."""
        self.has_sent = False
        clients.clients.append(self)

    def on_step(self) -> None:
        """A step of its login is done. Single bytes are no step: a login has only a few steps, however slowly a client sends."""
        self.step_at, self.has_sent = time.monotonic(), True

    def on_login(self) -> None:
        """The server accepted its login. Raises ProxyRefusal if too many clients of its address are logged in."""
        if self.only_enrolls:
            return
        if self._unauthenticated.logged_in[self.address] >= self._unauthenticated.most_logged_in_per_address:
            raise ProxyRefusal("there are as many connections from your address as one address may have: end some of them")
        self._end()
        self._is_logged_in = True
        self._unauthenticated.logged_in[self.address] += 1

    def close(self) -> None:
        self._end()
        if self._is_logged_in:
            self._is_logged_in = False
            self._unauthenticated.logged_in[self.address] -= 1
            self._unauthenticated.logged_in += Counter()  # forgets addresses without a client

    def _end(self) -> None:
        """It no longer counts as unauthenticated."""
        if self.is_unauthenticated:
            self.is_unauthenticated = False
            self._unauthenticated.clients.remove(self)

    def evict(self) -> None:
        self._end()
        self.task.cancel()


async def _asks_for_tls(client: socket.socket) -> bool:
    """Read exactly the request, so that nothing sent unencrypted can pass for encrypted. Other clients get an error message."""
    loop = asyncio.get_running_loop()
    for _ in range(2):
        length, code = struct.unpack("!ii", await _read_exactly(client, 8))
        if length == 8 and code == GSS_REQUEST:
            await loop.sock_sendall(client, b"N")
        elif length == 8 and code == SSL_REQUEST:
            await loop.sock_sendall(client, b"S")
            return True
        else:
            await loop.sock_sendall(
                client, _error("this server is reached with TLS only: join with the whole line that `shoal coordinate` prints")
            )
            return False
    return False


async def _read_exactly(client: socket.socket, count: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        more = await loop.sock_recv(client, count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


async def _encrypted(client: socket.socket, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_CHUNK)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, client, ssl=context, ssl_handshake_timeout=HANDSHAKE_S, ssl_shutdown_timeout=SHUTDOWN_S
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _startup(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    (length,) = struct.unpack("!i", head)
    if not 8 <= length <= STARTUP_BYTES:
        raise ProxyRefusal("a first message of an impossible length")
    return head + await reader.readexactly(length - 4)


def _problem(startup: bytes, forbidden: set[bytes]) -> str | None:
    """Why a first message is refused; None if it is forwarded."""
    (code,) = struct.unpack("!i", startup[4:8])
    if code == CANCEL_REQUEST:
        return None
    if code >> 16 != 3:
        return "a protocol that is not PostgreSQL's"
    role = _role(startup)
    if role is None:
        return "a first message names one role"
    if role in forbidden:
        return "this role is let in from the coordinator's own machine only"
    return None


def _role(startup: bytes) -> bytes | None:
    """The role that a first message names; None if it names none, or several."""
    words = startup[8:].split(b"\0")
    users = [value for name, value in zip(words[::2], words[1::2], strict=False) if name == b"user"]
    return users[0][:_NAME_BYTES] if len(users) == 1 else None


async def _forward(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    answers: asyncio.StreamReader,
    server: asyncio.StreamWriter,
    client_state: ClientConnection,
) -> None:
    """Forward both directions until either side ends."""
    directions = {
        asyncio.create_task(_forward_requests(reader, server, client_state)),
        asyncio.create_task(_forward_replies(answers, writer, client_state)),
    }
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        ended = await asyncio.gather(*directions, return_exceptions=True)
    for problem in ended:
        if isinstance(problem, ProxyRefusal):
            raise problem


async def _forward_requests(reader: asyncio.StreamReader, server: asyncio.StreamWriter, client_state: ClientConnection) -> None:
    sent = 0
    while data := await reader.read(_CHUNK):
        sent += len(data)
        if client_state.is_unauthenticated and sent > LOGIN_BYTES:
            return
        server.write(data)
        await server.drain()


async def _forward_replies(answers: asyncio.StreamReader, writer: asyncio.StreamWriter, client_state: ClientConnection) -> None:
    async with asyncio.timeout(LOGIN_S):
        while client_state.is_unauthenticated:
            head = await answers.readexactly(5)
            (length,) = struct.unpack("!i", head[1:])
            body = await answers.readexactly(length - 4)
            client_state.on_step()  # the server has processed the client's last message
            if head[:1] == b"R" and body[:4] == bytes(4):
                client_state.on_login()
            writer.write(head + body)
    while data := await answers.read(_CHUNK):
        writer.write(data)
        await writer.drain()


def _error(text: str) -> bytes:
    """An error message of PostgreSQL's protocol."""
    fields = b"".join(kind + value.encode() + b"\0" for kind, value in ((b"S", "FATAL"), (b"V", "FATAL"), (b"C", "28000"), (b"M", text)))
    return b"E" + struct.pack("!i", len(fields) + 5) + fields + b"\0"


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(128)
    listener.setblocking(False)
    return listener


def _drop_privileges(user: list[int] | None) -> None:
    """Continue as the server's user: root is not needed after the port is bound and the certificate is read."""
    if user:
        os.setgroups([])
        os.setgid(user[1])
        os.setuid(user[0])


def main() -> None:
    options = json.loads(sys.stdin.readline() or "null")
    if not options:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(options["certificate"], options["key"])
    listener = _listener(options["host"], options["port"])
    _drop_privileges(options["user"])
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(TlsProxy(options, context).listen(listener))


if __name__ == "__main__":
    main()
