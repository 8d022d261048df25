"""Orders to machines that hold layers: as messages, and carried out. Hidden states travel exactly, or as int8 where that is asked for.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.protocol.messages import Frame
from shoal.serve.nodes.layer_host import LayerHost, LayerRange, TokenBatch
from shoal.serve.nodes.weights import as_frame, claimed_bytes, from_frame, type_name

_MOST_REQUESTS = 4096
_MOST_LAYERS = 1 << 20
_MOST_TOKENS = 1 << 40
_DOOR_LENGTH = 200


class PeerEndpoint(NamedTuple):
    """Where a machine takes what others hand to it."""

    address: str
    token: str
    key: str | None


class NextHop(NamedTuple):
    """A stop that can be reached straight from the one before it."""

    name: str
    place: LayerRange
    door: PeerEndpoint


class NodeCommand(NamedTuple):
    """What a machine is to do: `hold` or `drop` layers, `read` tokens through them, let one of two requests `share` what the other's cache
    holds, `release` requests, or `probe` whether it reaches another machine."""

    kind: str
    place: LayerRange = LayerRange(0, 0)
    trip: int = -1
    reading: TokenBatch | None = None
    x_BLD: Tensor | None = None
    requests: tuple[int, ...] = ()
    length: int = 0
    """Tokens that are shared."""
    onward: tuple[NextHop, ...] = ()
    """The stops after this one to which what was read is handed on, without the server; or whom to probe."""


def pack_hidden_states(x_BLD: Tensor, int8: bool) -> tuple[dict[str, Any], Frame]:
    """What is said about hidden states, and their bytes. As int8 each token has a scale of its own, and no number is off by more than a
    254th of the token's largest one."""
    about = {"shape": list(x_BLD.shape), "type": type_name(x_BLD), "int8": int8}
    if not int8:
        return about, as_frame(x_BLD)
    scales_BL1 = x_BLD.float().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    small_BLD = (x_BLD.float() / scales_BL1).round().clamp(-127, 127).to(torch.int8)
    return about, bytes(as_frame(scales_BL1)) + bytes(as_frame(small_BLD))


def unpack_hidden_states(frame: Frame, about: Mapping[str, Any]) -> Tensor:
    """The hidden states that a frame claims to be. Raises ShoalError where its bytes do not fit."""
    shape, name = about["shape"], about["type"]
    if not about.get("int8"):
        return from_frame(frame, shape, name)
    claimed_bytes(shape, name)
    scales_BL1 = from_frame(frame[: 4 * shape[0] * shape[1]], [*shape[:-1], 1], "float32")
    small_BLD = from_frame(frame[4 * shape[0] * shape[1] :], shape, "int8")
    return (small_BLD.float() * scales_BL1).to(getattr(torch, name))


def command_message(order: NodeCommand, int8: bool) -> tuple[dict[str, Any], tuple[Frame, ...]]:
    """An order as a header, and the frame that belongs to it."""
    header: dict[str, Any] = {"kind": order.kind, "place": list(order.place), "requests": list(order.requests), "length": order.length}
    header["onward"] = [[one.name, list(one.place), list(one.door)] for one in order.onward]
    if order.reading is None or order.x_BLD is None:
        return header, ()
    about, frame = pack_hidden_states(order.x_BLD, int8)
    requests, positions, ids = order.reading
    reading = {"requests": list(requests), "positions": list(positions), "ids": [list(row) for row in ids]}
    return header | about | {"trip": order.trip, "reading": reading}, (frame,)


def command_from(header: Mapping[str, Any], frames: tuple[Frame, ...]) -> NodeCommand:
    """The order that a message is. Raises ShoalError where it is none."""
    try:
        return _order(header, frames)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise ShoalError("this is no order for a machine that holds layers") from None


def _order(header: Mapping[str, Any], frames: tuple[Frame, ...]) -> NodeCommand:
    place, onward = _place(header["place"]), tuple(_onward(*one) for one in header["onward"])
    if "reading" not in header:
        requests, length = _wholes(header["requests"]), _whole(header["length"], most=_MOST_TOKENS)
        return NodeCommand(str(header["kind"]), place, requests=requests, length=length, onward=onward)
    trip, told, x_BLD = _whole(header["trip"], least=-1), header["reading"], unpack_hidden_states(frames[0], header)
    ids = tuple(_wholes(row, _MOST_TOKENS) for row in told["ids"])
    reading = TokenBatch(_wholes(told["requests"]), _wholes(told["positions"], _MOST_TOKENS), ids)
    if not _fits(reading, x_BLD):
        raise ShoalError(f"hidden states of the shape {tuple(x_BLD.shape)} are none of {len(reading.requests)} requests")
    return NodeCommand("read", place, trip, reading, x_BLD, onward=onward)


def _whole(told: Any, least: int = 0, most: int = 2**53) -> int:
    if type(told) is not int or not least <= told <= most:
        raise ShoalError(f"a whole number from {least} to {most} must stand in an order where {str(told)[:40]!r} does")
    return told


def _wholes(told: Any, most: int = 2**53) -> tuple[int, ...]:
    if not isinstance(told, list):
        raise ShoalError(f"a list of whole numbers must stand in an order where {str(told)[:40]!r} does")
    return tuple(_whole(one, most=most) for one in told)


def _place(told: Any) -> LayerRange:
    first, last = _wholes(told, _MOST_LAYERS)
    return LayerRange(first, last)


def _onward(name: Any, place: Any, door: Any) -> NextHop:
    return NextHop(str(name), _place(place), endpoint_from(door))


def endpoint_from(told: Any) -> PeerEndpoint:
    """The door that a message tells of. Raises ShoalError, or what a list raises that is too short."""
    address, token, key = told
    if not all(isinstance(one, str) and len(one) <= _DOOR_LENGTH for one in (address, token, "" if key is None else key)):
        raise ShoalError("a machine's door is an address, a token and a key")
    return PeerEndpoint(address, token, key)


def _fits(reading: TokenBatch, x_BLD: Tensor) -> bool:
    """Whether there is a row of numbers for each request, each is there once, and there is a token for each of its ids."""
    count = len(set(reading.requests))
    same = x_BLD.dim() == 3 and len(x_BLD) == count == len(reading.requests) == len(reading.positions) == len(reading.ids)
    return same and count <= _MOST_REQUESTS and x_BLD.is_floating_point() and all(len(row) == x_BLD.shape[1] for row in reading.ids)


def execute(holder: LayerHost, order: NodeCommand) -> tuple[Tensor, float] | None:
    """Do what an order says; what came of reading, and the seconds that it took."""
    if order.kind == "hold":
        holder.hold(order.place)
    elif order.kind == "drop":
        holder.drop(order.place)
    elif order.kind == "share":
        request, other = order.requests
        holder.copy_prefix(order.place, request, other, order.length)
    elif order.kind == "release":
        holder.release(order.requests)
    elif order.reading is not None and order.x_BLD is not None:
        start = time.perf_counter()
        y_BLD = holder.read(order.place, order.reading, order.x_BLD)
        return y_BLD, time.perf_counter() - start
    return None
