"""The interface of every transport: a client sends requests, a server replies.

ShoalError
├── Unreachable      no answer in time, or the connection was lost: the same client may try again
├── Refused          will never work as it stands: wrong key, too large; `reason` says which
│   └── WrongToken   the token or password is wrong or missing: with another one it works
└── wire.Malformed   bytes that are not a message of ours

**Who owns a frame.** Large frames are never copied on their way out. A caller of `call()` leaves its frames unchanged until the call is
answered, or the client is closed. A caller of `reply()` never changes its frames again: pass bytes, or a snapshot that is replaced and not
written to. The receiver of a frame may keep it for any time and must not write to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from shoal.errors import ShoalError
from shoal.protocol.messages import Frame, Message, Request
from shoal.protocol.server import Server, Traffic
from shoal.transports.keys import Keys

__all__ = ["Client", "Frame", "Message", "Poster", "Refused", "Request", "Server", "Traffic", "Unreachable"]


class Unreachable(ShoalError):
    """No answer in time, or the connection was lost; trying again may help."""


class Refused(ShoalError):
    """The other side will never agree to this; trying again does not help."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class WrongToken(Refused):
    """The other side does not know this token or password; with another one the same address may be tried again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "unauthorised")


def wrong_token(address: str) -> WrongToken:
    """The refusal for a client whose join token the server does not know."""
    return WrongToken(f"the token is wrong: the coordinator at {address} does not know it. Ask for the token that it has now")


class Guest(NamedTuple):
    """A person with an invitation of their own."""

    name: str
    token: str
    workers: int
    """How many workers may use it at a time."""


class ListenOptions(NamedTuple):
    """What a transport's `serve(settings, options)` makes a server from."""

    hosts: Sequence[str]
    """Addresses to listen on."""
    token: str
    """The join token, which authenticates a worker."""
    keys: Keys | None
    """The coordinator's keys, if messages must be encrypted."""
    max_frame_bytes: int
    further_ports: Sequence[int] = ()
    insecure: bool = False
    """Whether a transport that cannot encrypt may leave this machine."""
    guests: Callable[[], Sequence[Guest]] = tuple
    """Returns the personal invitations that are valid besides the run's token. Called for each client without that token."""


class ConnectOptions(NamedTuple):
    """What a transport's `connect(options)` makes a client from."""

    address: str
    token: str
    server_key: str | None
    """The coordinator's public key, if messages must be encrypted."""
    max_frame_bytes: int
    insecure: bool = False
    """Whether a transport that cannot encrypt may leave this machine."""


class Client(Protocol):
    """Sends requests, one call at a time."""

    traffic: Traffic

    def call(self, message: Message, timeout_s: float) -> Message:
        """Ask, and wait for the answer; Unreachable or Refused when none comes."""

    def close(self) -> None:
        """Close the connection. Any thread may call this; a call in progress then raises Unreachable."""


@runtime_checkable
class Poster(Client, Protocol):
    """A client that sends in the background."""

    def post(self, message: Message, timeout_s: float) -> None:
        """Send a request without waiting for the reply. Raises Unreachable if it cannot be queued within the time."""

    def answer(self, timeout_s: float) -> Message:
        """Wait for the answer to what was posted last."""
