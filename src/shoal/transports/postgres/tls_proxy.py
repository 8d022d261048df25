"""A small process that speaks TLS in front of a class's PostgreSQL, whose own build cannot.

It answers libpq's SSLRequest with the class's certificate and passes on what it decrypts to the server, which listens on this machine only.
Nobody is passed on unencrypted, nor as the run's own role, which may do anything. Until the server has let somebody in, there is a bound
on everything they cost: connections in all and from one address, seconds, and bytes. Where the places for such strangers are taken, the one
who has been silent for longest gives its place up to a new one: a student, who speaks at once, is never that one for long. Who comes with
the class's token stays a stranger, since to enrol takes a moment; of the places for those who are let in, one address has three quarters.

The server, which bounds what one address may do, sees every address as another one of its own machine's.

It is started by its path, and knows nothing of Shoal. The first line of its standard input says what to do; it ends when that is closed.
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
GREETING_S = 10.0
LOGIN_S = 30.0
STARTUP_BYTES, LOGIN_BYTES = 10_000, 65_536
"""What the first message, and all up to the server's consent, may have at most. PostgreSQL takes no larger first message either."""
MOST_STRANGERS, MOST_STRANGERS_AT_ONE = 64, 32
"""Connections that are not let in yet, in all and from one address. A school may be behind one address."""
PATIENCE_S = 1.0
"""Between two steps of a student's greeting less time passes. Who is silent for longer gives its place up before anybody else does."""
HEARING_S = 0.25
"""So long the first word of a client may be on its way, or wait here to be read."""
GOODBYE_S = 1.0
"""How long a client may take to end its side. It has no place any more, and a descriptor still."""
_CHUNK = 1 << 18
_SHARE_OF_AN_ADDRESS = 3 / 4
"""Of the connections that are let in. However many somebody opens, others find a place."""
_NAME_BYTES = 63
"""PostgreSQL cuts longer names of roles off there."""


class ProxyRefusal(Exception):
    """What is told to a client that is not passed on."""


class TlsProxy:
    """Connections of all clients."""

    def __init__(self, order: dict[str, Any], context: ssl.SSLContext) -> None:
        self._server: tuple[str, int] = ("127.0.0.1", order["server_port"])
        self._forbidden = {name.encode()[:_NAME_BYTES] for name in order["forbidden_roles"]}
        self._passing = {name.encode()[:_NAME_BYTES] for name in order["passing_roles"]}
        self._most: int = order["most"]
        self._secret = os.urandom(16)
        self._context = context
        self._connections = 0
        self._strangers = UnauthenticatedClients(int(_SHARE_OF_AN_ADDRESS * self._most))
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(listener)
            except OSError:  # too many files are open: the next moment is better
                await asyncio.sleep(0.1)
                continue
            house = household(address[0])
            if not self._strangers.make_room(house, full=self._connections >= self._most):
                client.close()
                continue
            self._admit(client, house)
            await asyncio.sleep(0)  # it may have spoken already, and is heard before the next one wants its place

    def _admit(self, client: socket.socket, address: str) -> None:
        self._connections += 1
        visit = ClientConnection(self._strangers, address)
        task = visit.task = asyncio.get_running_loop().create_task(self._serve(client, visit))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: socket.socket, visit: ClientConnection) -> None:
        handed_over = False
        try:
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(GREETING_S):
                if not await _asks_for_tls(client):
                    return
                visit.heard()
                handed_over = True
                reader, writer = await _encrypted(client, self._context)
                visit.heard()
            await self._pass_on(reader, writer, visit)
        except (OSError, EOFError, TimeoutError, ssl.SSLError, asyncio.IncompleteReadError):
            pass  # clients come and go
        finally:
            visit.leave()
            self._connections -= 1
            if not handed_over:  # else its transport closes it, and must do so first: the next client may get the same number
                client.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, visit: ClientConnection) -> None:
        server: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(GREETING_S):
                startup = await _startup(reader)
                visit.heard()
                if (problem := _problem(startup, self._forbidden)) is not None:
                    raise ProxyRefusal(problem)
                visit.is_passing = _role(startup) in self._passing
                answers, server = await self._to_server(visit.address)
                server.write(startup)
            await _talk(reader, writer, answers, server, visit)
        except ProxyRefusal as refusal:
            writer.write(_error(str(refusal)))
            await writer.drain()
        except asyncio.CancelledError:  # put out: a new client has its place already
            writer.transport.abort()
            raise
        finally:
            for end in (writer, server):
                if end is not None:
                    end.close()

    async def _to_server(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the server that tells it one address from another. Not every system has so many addresses of its own."""
        with contextlib.suppress(OSError):
            own = own_address_for(address, self._secret)
            return await asyncio.open_connection(*self._server, limit=_CHUNK, local_addr=(own, 0))
        return await asyncio.open_connection(*self._server, limit=_CHUNK)


def household(address: str) -> str:
    """What is counted as one address. With IPv6 anybody has as many addresses as they like, of one network."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))


def own_address_for(address: str, secret: bytes) -> str:
    """One of this machine's own addresses, the same each time, and not to be guessed."""
    digest = hashlib.blake2b(address.encode(), key=secret, digest_size=3).digest()
    return f"127.{1 + digest[0] % 254}.{digest[1]}.{1 + digest[2] % 254}"


class UnauthenticatedClients:
    """The clients that are not let in yet. Their number is bounded, in all and at one address; so is that of one address's who are in."""

    def __init__(self, most_let_in_at_one: int) -> None:
        self.visits: list[ClientConnection] = []
        self.let_in: Counter[str] = Counter()
        self.most_let_in_at_one = most_let_in_at_one

    def make_room(self, address: str, *, full: bool) -> bool:
        """Put a stranger out where a new one from `address` needs its place. False: all places are taken by clients that were let in.

        `full`: there is no place for any further connection."""
        own = [visit for visit in self.visits if visit.address == address]
        if len(own) >= MOST_STRANGERS_AT_ONE:
            self._longest_silent(own).put_out()
        elif full or len(self.visits) >= MOST_STRANGERS:
            if not self.visits:
                return False
            self._longest_silent(self._silent() or self._of_the_most_crowded_address()).put_out()
        return True

    def _longest_silent(self, among: list[ClientConnection]) -> ClientConnection:
        """Of those who had the time to speak and did not, who came first. Who came a moment ago is spared, unless most have."""
        lately = time.monotonic() - HEARING_S
        mute = [visit for visit in among if not visit.has_spoken]
        new = [visit for visit in mute if visit.heard_at >= lately]
        if len(mute) > len(new):
            among = [visit for visit in mute if visit not in new]
        elif 2 * len(new) > len(among):
            among = new
        else:
            among = [visit for visit in among if visit not in new]
        return min(among, key=lambda visit: visit.heard_at)

    def _silent(self) -> list[ClientConnection]:
        lately = time.monotonic() - PATIENCE_S
        return [visit for visit in self.visits if visit.heard_at < lately]

    def _of_the_most_crowded_address(self) -> list[ClientConnection]:
        counts = Counter(visit.address for visit in self.visits)
        return [visit for visit in self.visits if counts[visit.address] == max(counts.values())]


class ClientConnection:
    """One client, who is a stranger until the server lets it in."""

    task: asyncio.Task[None]

    def __init__(self, strangers: UnauthenticatedClients, address: str) -> None:
        self._strangers, self.address = strangers, address
        self.is_stranger = True
        self.is_passing = False
        """Whether it only enrols: then it stays a stranger."""
        self._is_let_in = False
        self.heard_at = time.monotonic()
        """When it came, or last took a step of its greeting."""
        self.has_spoken = False
        strangers.visits.append(self)

    def heard(self) -> None:
        """A further step of its greeting is done. Single bytes are no step: a stranger has a few steps only, however slowly it speaks."""
        self.heard_at, self.has_spoken = time.monotonic(), True

    def let_in(self) -> None:
        """The server has. Raises Refusal where too many of its address are in already."""
        if self.is_passing:
            return
        if self._strangers.let_in[self.address] >= self._strangers.most_let_in_at_one:
            raise ProxyRefusal("there are as many connections from your address as one address may have: end some of them")
        self._end()
        self._is_let_in = True
        self._strangers.let_in[self.address] += 1

    def leave(self) -> None:
        self._end()
        if self._is_let_in:
            self._is_let_in = False
            self._strangers.let_in[self.address] -= 1
            self._strangers.let_in += Counter()  # forgets addresses of which nobody is in

    def _end(self) -> None:
        """It is no stranger any more."""
        if self.is_stranger:
            self.is_stranger = False
            self._strangers.visits.remove(self)

    def put_out(self) -> None:
        self._end()
        self.task.cancel()


async def _asks_for_tls(client: socket.socket) -> bool:
    """Read exactly the request, so that nothing sent unencrypted can pass for encrypted. Others are told what is wrong."""
    loop = asyncio.get_running_loop()
    for _ in range(2):
        length, code = struct.unpack("!ii", await _exactly(client, 8))
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


async def _exactly(client: socket.socket, count: int) -> bytes:
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
        lambda: protocol, client, ssl=context, ssl_handshake_timeout=GREETING_S, ssl_shutdown_timeout=GOODBYE_S
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _startup(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    (length,) = struct.unpack("!i", head)
    if not 8 <= length <= STARTUP_BYTES:
        raise ProxyRefusal("a first message of an impossible length")
    return head + await reader.readexactly(length - 4)


def _problem(startup: bytes, forbidden: set[bytes]) -> str | None:
    """Why a first message is not passed on; None: it is."""
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
    """Who a first message says it comes from; None: it names nobody, or several."""
    words = startup[8:].split(b"\0")
    users = [value for name, value in zip(words[::2], words[1::2], strict=False) if name == b"user"]
    return users[0][:_NAME_BYTES] if len(users) == 1 else None


async def _talk(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    answers: asyncio.StreamReader,
    server: asyncio.StreamWriter,
    visit: ClientConnection,
) -> None:
    """Pass on both ways until either side ends."""
    ways = {asyncio.create_task(_questions(reader, server, visit)), asyncio.create_task(_answers(answers, writer, visit))}
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        ended = await asyncio.gather(*ways, return_exceptions=True)
    for problem in ended:
        if isinstance(problem, ProxyRefusal):
            raise problem


async def _questions(reader: asyncio.StreamReader, server: asyncio.StreamWriter, visit: ClientConnection) -> None:
    sent = 0
    while data := await reader.read(_CHUNK):
        sent += len(data)
        if visit.is_stranger and sent > LOGIN_BYTES:
            return
        server.write(data)
        await server.drain()


async def _answers(answers: asyncio.StreamReader, writer: asyncio.StreamWriter, visit: ClientConnection) -> None:
    async with asyncio.timeout(LOGIN_S):
        while visit.is_stranger:
            head = await answers.readexactly(5)
            (length,) = struct.unpack("!i", head[1:])
            body = await answers.readexactly(length - 4)
            visit.heard()  # the server asks for the next word: it has understood the last one
            if head[:1] == b"R" and body[:4] == bytes(4):
                visit.let_in()
            writer.write(head + body)
    while data := await answers.read(_CHUNK):
        writer.write(data)
        await writer.drain()


def _error(text: str) -> bytes:
    """A refusal as PostgreSQL words it."""
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


def _become(user: list[int] | None) -> None:
    """Go on as the server's user: nothing here needs to be root after the port and the certificate are there."""
    if user:
        os.setgroups([])
        os.setgid(user[1])
        os.setuid(user[0])


def main() -> None:
    order = json.loads(sys.stdin.readline() or "null")
    if not order:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(order["certificate"], order["key"])
    listener = _listener(order["host"], order["port"])
    _become(order["user"])
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(TlsProxy(order, context).listen(listener))


if __name__ == "__main__":
    main()
