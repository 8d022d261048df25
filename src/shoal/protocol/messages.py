"""Messages between workers and coordinator. Every field of a request is checked, since its sender is not trusted.

A message is a header of plain values and raw frames. Workers send requests and the coordinator replies; it never sends first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from shoal.errors import ShoalError
from shoal.protocol.worker_names import NAME_RULE, is_worker_name

PROTOCOL = 6
_MOST = 2**53
_MOST_FIGURES = 1024
_MOST_OF_A_HEARTBEAT = 32
"""Figures of a worker that a heartbeat carries."""
_MOST_EXPERTS = 4096
"""Of one contribution: a mixture of experts has eight for each layer."""
LONGEST_REASON = 500
EMPTY: Mapping[str, float] = MappingProxyType({})
NO_TASK = "no-task"
"""Reason with which a worker is asked to ask again later: no part of the data is free for it yet."""
STOPPED = "stopped"
"""State that a worker reports while it waits for a run to be resumed."""
INTERRUPTED = "interrupted"
"""The outcome of a run that its owner stopped, and that may go on."""
PAUSED = "paused: "
"""Beginning of the reason of a worker that leaves for a while, since the user of its computer needs it."""
_HEXADECIMAL = re.compile(r"[0-9a-f]*")


Frame = bytes | memoryview
"""Raw bytes, contiguous."""
Frames = Sequence[Frame]
"""The frames of a message, sent or received. (Those that a codec makes have a narrower type: `protocol.frames.Frames`.)"""


class Message(NamedTuple):
    """A small header of plain values, and raw frames for everything that is large."""

    header: dict[str, Any]
    frames: tuple[Frame, ...] = ()


class Request(NamedTuple):
    """A received message that has not been answered yet."""

    peer: bytes
    """Address for the reply, opaque to all but the transport."""
    number: int
    """Number of the peer's call. The reply repeats it, so that the peer recognises a late reply."""
    message: Message
    guest: str = ""
    """Name of the invitation with which the peer was admitted; empty: the run's own token."""
    address: str = ""
    """The peer's network address, for display; empty: unknown to the transport."""


class BadMessage(ShoalError):
    """A malformed message, which no correct worker sends."""


class Join(NamedTuple):
    """Request to take part. The reply is a challenge, and after the challenge is signed the configuration, a seat and a session."""

    name: str | None
    protocol: int
    about: Mapping[str, str]
    instance: str = ""
    """Random identifier of the process; processes of the same name differ in it."""
    key: str = ""
    """The public half of the worker's own key (`identities.py`): its name belongs to this key."""
    nonce: str = ""
    """The coordinator's challenge; empty in the first request."""
    proof: str = ""
    workers: int = 1
    """Workers that compute behind this one: those of a relay."""


class Leave(NamedTuple):
    """The worker leaves the run."""

    session: str
    number: int
    reason: str = ""
    """Why the worker cannot continue; empty: it leaves by choice."""


class Gone(NamedTuple):
    """Reports that a worker's processes have ended, signed with the worker's key. It does not take part until they are started again."""

    name: str
    key: str = ""
    nonce: str = ""
    proof: str = ""


class OwnerCommand(NamedTuple):
    """A command of the run's owner, signed with the run's key: one of `ACTIONS`."""

    action: str
    name: str | None
    """The worker that the action is about, where there is one."""
    key: str = ""
    nonce: str = ""
    proof: str = ""


ACTIONS = ("status", "pause", "resume", "stop", "evict", "readmit")


class Heartbeat(NamedTuple):
    """Reports that the worker is alive and what it does, and renews the leases that it holds."""

    session: str
    number: int
    state: str
    figures: Mapping[str, float] = EMPTY
    """Figures for display: samples so far, seconds waited."""


class Hold(NamedTuple):
    """Reports that the worker holds only these experts of the model. Sent before the first pull; weights and updates cover only these."""

    session: str
    number: int
    experts: tuple[int, ...]
    """Their numbers, the same in every layer."""


class Pull(NamedTuple):
    """Request for weights newer than version `have`."""

    session: str
    number: int
    have: int


class Contribute(NamedTuple):
    """An update computed from some batches. The reply also contains new weights, if requested."""

    session: str
    number: int
    seq: int
    """Sequence number; the coordinator accepts each number of a worker name once."""
    base: int
    """The version that the update was computed on."""
    round: int
    weight: float
    samples: int
    epoch: int
    position: int
    """Batches of the epoch consumed so far, including those of this update."""
    batches: int
    have: int
    """The worker's version of the weights; -1: the reply contains none."""
    metrics: Mapping[str, float]
    unit: int = -1
    """The leased unit of the data that the update is made of; -1: batches of the worker's own seat."""


class SeatAssigned(NamedTuple):
    """The place in the data that the coordinator assigned. What was computed from another place cannot be used."""

    seat: int
    epoch: int
    position: int


class Claim(NamedTuple):
    """Request for a unit of the data. The reply also contains the weights that the unit is for."""

    session: str
    number: int
    have: int


class GiveBack(NamedTuple):
    """Returns a unit for another worker. It does not count as an attempt."""

    session: str
    number: int
    unit: int


class Fail(NamedTuple):
    """Reports that the worker could not complete a unit."""

    session: str
    number: int
    unit: int
    reason: str


class Delivered(NamedTuple):
    """The result of a leased unit, from the lease table, which has checked that the worker held the lease."""

    worker: str
    seq: int
    """Number of the delivery, over all workers."""
    base: int
    weight: float
    samples: int
    epoch: int
    start: int
    batches: int
    metrics: Mapping[str, float]


class Failed(NamedTuple):
    """A unit that used up its attempts."""

    epoch: int
    start: int
    batches: int
    reason: str


WorkerRequest = Join | Leave | Gone | OwnerCommand | Heartbeat | Hold | Pull | Contribute | Claim | GiveBack | Fail
LeaseMessage = Delivered | Failed
"""Messages of the lease table, not of workers."""


def _integer(least: int, most: int = _MOST) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _number(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and least <= value <= most


def _text(longest: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is str and len(value) <= longest


def _mapping(item: Callable[[Any], bool], most: int) -> Callable[[Any], bool]:
    return lambda value: (
        type(value) is dict and len(value) <= most and all(type(key) is str and len(key) <= 128 and item(one) for key, one in value.items())
    )


def _are_numbers(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) <= _MOST_EXPERTS and all(type(one) is int and 0 <= one < _MOST for one in value)


def _is_name(value: Any) -> bool:
    return value is None or is_worker_name(value)


def _is_hexadecimal(*lengths: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is str and len(value) in lengths and _HEXADECIMAL.fullmatch(value) is not None


_IDENTITY = {"key": _is_hexadecimal(64), "nonce": _text(64), "proof": _is_hexadecimal(0, 128)}
_SESSION = {"session": _text(64), "number": _integer(0)}
_CHECKS: dict[str, tuple[type[Any], dict[str, Callable[[Any], bool]]]] = {
    "join": (
        Join,
        {"name": _is_name, "protocol": _integer(0), "about": _mapping(_text(200), 16), "instance": _text(64), "workers": _integer(1)}
        | _IDENTITY,
    ),
    "leave": (Leave, _SESSION | {"reason": _text(LONGEST_REASON)}),
    "gone": (Gone, {"name": is_worker_name} | _IDENTITY),
    "order": (OwnerCommand, {"action": lambda value: type(value) is str and value in ACTIONS, "name": _is_name} | _IDENTITY),
    "heartbeat": (
        Heartbeat,
        _SESSION | {"state": _text(40), "figures": _mapping(lambda value: type(value) in (int, float), _MOST_OF_A_HEARTBEAT)},
    ),
    "hold": (Hold, _SESSION | {"experts": _are_numbers}),
    "pull": (Pull, _SESSION | {"have": _integer(-1)}),
    "contribute": (
        Contribute,
        _SESSION
        | {name: _integer(0) for name in ("seq", "base", "round", "epoch", "position")}
        | {"samples": _integer(1), "batches": _integer(1), "have": _integer(-1), "weight": _number(1e-9, 1e15)}
        | {"metrics": _mapping(lambda value: type(value) in (int, float), _MOST_FIGURES), "unit": _integer(-1)},
    ),
    "claim": (Claim, _SESSION | {"have": _integer(-1)}),
    "giveback": (GiveBack, _SESSION | {"unit": _integer(0)}),
    "fail": (Fail, _SESSION | {"unit": _integer(0), "reason": _text(LONGEST_REASON)}),
}
KINDS = tuple(_CHECKS)
"""The values of a header's `kind`."""
_KIND_OF: dict[type[Any], str] = {made: kind for kind, (made, _) in _CHECKS.items()}


_BATCHES = {"epoch": _integer(0), "start": _integer(0), "batches": _integer(1)}
_LEASE_CHECKS: dict[str, tuple[type[Any], dict[str, Callable[[Any], bool]]]] = {
    "delivered": (
        Delivered,
        {"worker": _is_name, "seq": _integer(0), "base": _integer(0), "weight": _number(1e-9, 1e15), "samples": _integer(1)}
        | _BATCHES
        | {"metrics": _mapping(lambda value: type(value) in (int, float), _MOST_FIGURES)},
    ),
    "failed": (Failed, _BATCHES | {"reason": _text(1000)}),
}


def parse(header: Mapping[str, Any]) -> WorkerRequest:
    """The request in a worker's header. Raises BadMessage."""
    return _parse(header, _CHECKS)


def parse_from_leases(header: Mapping[str, Any]) -> LeaseMessage:
    """The message of the lease table in a header. Raises BadMessage: its figures come from a worker."""
    return _parse(header, _LEASE_CHECKS)


def _parse(header: Mapping[str, Any], kinds: Mapping[str, tuple[type[Any], dict[str, Callable[[Any], bool]]]]) -> Any:
    kind = header.get("kind")
    found = kinds.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise BadMessage("no such message")
    message_type, checks = found
    for name, is_valid in checks.items():
        if name not in header or not is_valid(header[name]):
            rule = f": {NAME_RULE}" if is_valid in (_is_name, is_worker_name) else ""
            raise BadMessage(f"{kind}: `{name}` is missing or wrong{rule}")
    if len(header) != len(checks) + 1:
        raise BadMessage(f"{kind}: there are fields that do not belong")
    return message_type(**{name: header[name] for name in checks})


def header_of(request: WorkerRequest) -> dict[str, Any]:
    """The header of a request."""
    fields = request._asdict()
    if isinstance(request, Heartbeat):
        fields["figures"] = dict(request.figures)
    return {"kind": _KIND_OF[type(request)], **fields}
