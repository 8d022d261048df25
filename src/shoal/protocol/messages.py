"""What workers and coordinator say to each other: what is asked is checked field by field, whoever sent it.

A message is a header of plain values and raw frames. A worker asks, the coordinator answers; nothing else is ever sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Union

from shoal.errors import ShoalError

PROTOCOL = 5
_MOST = 2**53
_MOST_FIGURES = 1024
_MOST_EXPERTS = 4096
"""Of one contribution: a mixture of experts has eight for each layer."""
LONGEST_REASON = 500
EMPTY: Mapping[str, float] = MappingProxyType({})
LONGEST_NAME = 64
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")
_HEXADECIMAL = re.compile(r"[0-9a-f]*")


Frame = Union[bytes, memoryview]
"""Raw bytes, contiguous."""


class Message(NamedTuple):
    """A small header of plain values, and raw frames for everything that is large."""

    header: dict[str, Any]
    frames: tuple[Frame, ...] = ()


class Request(NamedTuple):
    """A message that waits for its answer."""

    peer: bytes
    """Whom to answer; only the transport knows what is in it."""
    number: int
    """Which call of that peer's this is: an answer carries it back, so that a late one is recognised."""
    message: Message
    guest: str = ""
    """Whose invitation let this peer in; empty: the run's own token."""
    address: str = ""
    """Where the peer is, for people; empty: the transport does not know."""


class BadMessage(ShoalError):
    """A message that no worker of ours would send."""


class Join(NamedTuple):
    """May I take part? Answered with a challenge, and once that is signed with the configuration, a seat at the data and a session."""

    name: str | None
    protocol: int
    about: Mapping[str, str]
    instance: str = ""
    """Tells this process from every other one, also from those of the same name."""
    key: str = ""
    """The public half of the worker's own key (`identities.py`): its name belongs to this key."""
    nonce: str = ""
    """What the coordinator asked to have signed; empty: it has not asked yet."""
    proof: str = ""


class Leave(NamedTuple):
    """I am going."""

    session: str
    number: int
    reason: str = ""
    """Why, where the worker cannot go on."""


class Gone(NamedTuple):
    """Said for a worker whose processes have ended, by whoever has its key: it does not take part until they are started again."""

    name: str
    key: str = ""
    nonce: str = ""
    proof: str = ""


class Order(NamedTuple):
    """Said by the run's owner, who has the run's own key: look at the run, hold it up, let it go on, end it, keep a worker out."""

    action: str
    name: str | None
    """The worker that is meant, where one is."""
    key: str = ""
    nonce: str = ""
    proof: str = ""


ACTIONS = ("status", "pause", "resume", "stop", "evict", "readmit")


class Heartbeat(NamedTuple):
    """I am still here, and this is what I do. It renews the leases that the worker holds."""

    session: str
    number: int
    state: str
    figures: Mapping[str, float] = EMPTY
    """What people want to see of a worker: samples so far, time it waited."""


class Hold(NamedTuple):
    """The model does not fit here: I hold these experts of it only. Said before the first pull; what travels from then on is of these."""

    session: str
    number: int
    experts: tuple[int, ...]
    """Their numbers, the same in every layer."""


class Pull(NamedTuple):
    """Weights newer than those I have, please."""

    session: str
    number: int
    have: int


class Contribute(NamedTuple):
    """What I learned from some batches. The answer also brings new weights, where they are wanted."""

    session: str
    number: int
    seq: int
    """The same number is never taken twice from a worker of this name."""
    base: int
    """The version the update was computed on."""
    round: int
    weight: float
    samples: int
    epoch: int
    position: int
    """Batches of the epoch consumed when it was made, its own included."""
    batches: int
    have: int
    """Version of the weights I have; -1: send none."""
    metrics: Mapping[str, float]
    unit: int = -1
    """The unit of the data that it was made of, where units are leased; -1: batches of the worker's own seat."""


class Claim(NamedTuple):
    """A unit of the data to learn from, please. The answer also brings the weights that the unit is for."""

    session: str
    number: int
    have: int


class GiveBack(NamedTuple):
    """Somebody else may do this unit. It does not count as an attempt."""

    session: str
    number: int
    unit: int


class Fail(NamedTuple):
    """I could not do this unit."""

    session: str
    number: int
    unit: int
    reason: str


class Delivered(NamedTuple):
    """What a worker learned from a unit it had leased. Whoever keeps the leases passes it on, and has checked that the lease was held."""

    worker: str
    seq: int
    """Counts up with every delivery of anybody."""
    base: int
    weight: float
    samples: int
    epoch: int
    start: int
    batches: int
    metrics: Mapping[str, float]


class Failed(NamedTuple):
    """A unit that was tried too often."""

    epoch: int
    start: int
    batches: int
    reason: str


Asked = Join | Leave | Gone | Order | Heartbeat | Hold | Pull | Contribute | Claim | GiveBack | Fail
FromLeases = Delivered | Failed
"""Not from workers: from who keeps the leases."""


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
    return value is None or (type(value) is str and _NAME.fullmatch(value) is not None)


def _is_hexadecimal(*lengths: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is str and len(value) in lengths and _HEXADECIMAL.fullmatch(value) is not None


_IDENTITY = {"key": _is_hexadecimal(64), "nonce": _text(64), "proof": _is_hexadecimal(0, 128)}
_SESSION = {"session": _text(64), "number": _integer(0)}
_CHECKS: dict[str, tuple[type[Any], dict[str, Callable[[Any], bool]]]] = {
    "join": (Join, {"name": _is_name, "protocol": _integer(0), "about": _mapping(_text(200), 16), "instance": _text(64)} | _IDENTITY),
    "leave": (Leave, _SESSION | {"reason": _text(LONGEST_REASON)}),
    "gone": (Gone, {"name": lambda value: value is not None and _is_name(value)} | _IDENTITY),
    "order": (Order, {"action": lambda value: type(value) is str and value in ACTIONS, "name": _is_name} | _IDENTITY),
    "heartbeat": (Heartbeat, _SESSION | {"state": _text(40), "figures": _mapping(lambda value: type(value) in (int, float), 16)}),
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
"""What a header's `kind` may be."""


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


def parse(header: Mapping[str, Any]) -> Asked:
    """The question in a worker's header. Raises BadMessage."""
    asked: Asked = _parse(header, _CHECKS)
    return asked


def parse_from_leases(header: Mapping[str, Any]) -> FromLeases:
    """What the keeper of the leases passes on. Raises BadMessage: the figures in it are a worker's."""
    passed: FromLeases = _parse(header, _LEASE_CHECKS)
    return passed


def _parse(header: Mapping[str, Any], kinds: Mapping[str, tuple[type[Any], dict[str, Callable[[Any], bool]]]]) -> Any:
    kind = header.get("kind")
    found = kinds.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise BadMessage("no such message")
    made, checks = found
    for name, good in checks.items():
        if name not in header or not good(header[name]):
            raise BadMessage(f"{kind}: `{name}` is missing or wrong")
    if len(header) != len(checks) + 1:
        raise BadMessage(f"{kind}: there are fields that do not belong")
    return made(**{name: header[name] for name in checks})


def header_of(asked: Asked) -> dict[str, Any]:
    """A question as a header."""
    fields = asked._asdict()
    if isinstance(asked, Heartbeat):
        fields["figures"] = dict(asked.figures)
    return {"kind": type(asked).__name__.lower(), **fields}
