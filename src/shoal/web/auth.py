"""The address a server listens on, its access tokens, and the security headers of its responses."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from shoal.errors import ShoalError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_REFUSED_BODY_BYTES, _REFUSED_BODY_S = 1 << 20, 1.0
_HEADERS = [
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or "invalid_request_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class AuthMiddleware:
    """Checks key and host before the app sees a request."""

    def __init__(self, app: App, key: str | None, guarded: tuple[str, ...] = ("/v1", "/metrics"), called: str = "key") -> None:
        """`guarded`: how the paths begin that need the key. The page itself tells nothing. `called`: what users call the key."""
        self.app, self.key, self.guarded, self.called = app, key, guarded, called

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        refused = self._refused(scope)
        if refused is None:
            await self.app(scope, receive, with_headers)
            return
        await _read_small_body(receive)
        body = json.dumps(refused.body()).encode()
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"www-authenticate", b"Bearer")]
        await with_headers({"type": "http.response.start", "status": refused.status, "headers": headers})
        await with_headers({"type": "http.response.body", "body": body})

    def _refused(self, scope: Scope) -> RefusedError | None:
        headers = dict(scope["headers"])
        if self.key is None:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host.rsplit(":", 1)[0] if host.rpartition(":")[2].isdigit() else host
            # Without a key only this machine may ask. A page of a stranger could give its own name the address of this machine.
            return None if name in _LOCAL else RefusedError(403, f"this server answers as localhost, not as {host[:100]!r}")
        if not scope["path"].startswith(self.guarded):
            return None
        given = headers.get(b"authorization", b"")
        if hmac.compare_digest(given, b"Bearer " + self.key.encode()):
            return None
        problem = f"the {self.called} is wrong" if given else f"a {self.called} is needed"
        return RefusedError(401, f"{problem}: Authorization: Bearer {self.called.upper()}", code="invalid_api_key")


async def _read_small_body(receive: Receive) -> None:
    """Read the request's body before it is refused. If unread bytes are left when the server closes the connection, the system sends a
    reset, and the client may lose the response. A body that is large or slow is not waited for."""
    size, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REFUSED_BODY_S):
            while more and size < _REFUSED_BODY_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                more = message["type"] == "http.request" and message.get("more_body", False)


def listening_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Clients that connect before the server runs wait until it is up. Raises ShoalError where another program
    listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen()
    except OSError as error:
        made.close()
        raise ShoalError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --port") from None
    return made
