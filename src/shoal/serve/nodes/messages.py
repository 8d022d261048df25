"""Commands to machines that hold layers: their message format and their execution. Hidden states are sent exactly, or rounded to int8.

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
_LONGEST_FIELD = 200


class Endpoint(NamedTuple):
    """Where a machine accepts messages, and the credentials that it expects."""

    address: str
    token: str
    key: str | None


class NextHop(NamedTuple):
    """A stage that the machine before it sends to directly."""

    name: str
    layers: LayerRange
    endpoint: Endpoint


class NodeCommand(NamedTuple):
    """What a machine is to do: `hold` (load) or `drop` layers, `read` tokens through them, `share` one request's cache with another,
    `release` requests, or `probe` whether it reaches another machine."""

    kind: str
    layers: LayerRange = LayerRange(0, 0)
    batch_number: int = -1
    token_batch: TokenBatch | None = None
    x_BLD: Tensor | None = None
    requests: tuple[int, ...] = ()
    length: int = 0
    """Tokens to share."""
    next_hops: tuple[NextHop, ...] = ()
    """The next stages, to which machines send directly; or the machine to probe."""


def pack_hidden_states(x_BLD: Tensor, int8: bool) -> tuple[dict[str, Any], Frame]:
    """Header fields and bytes. As int8 each token has its own scale; no number is off by more than a 254th of the token's largest one."""
    about = {"shape": list(x_BLD.shape), "type": type_name(x_BLD), "int8": int8}
    if not int8:
        return about, as_frame(x_BLD)
    scales_BL1 = x_BLD.float().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    small_BLD = (x_BLD.float() / scales_BL1).round().clamp(-127, 127).to(torch.int8)
    return about, bytes(as_frame(scales_BL1)) + bytes(as_frame(small_BLD))


def unpack_hidden_states(frame: Frame, about: Mapping[str, Any]) -> Tensor:
    """The hidden states in a frame. Raises ShoalError where its length does not match its header."""
    shape, name = about["shape"], about["type"]
    if not about.get("int8"):
        return from_frame(frame, shape, name)
    claimed_bytes(shape, name)
    scales_BL1 = from_frame(frame[: 4 * shape[0] * shape[1]], [*shape[:-1], 1], "float32")
    small_BLD = from_frame(frame[4 * shape[0] * shape[1] :], shape, "int8")
    return (small_BLD.float() * scales_BL1).to(getattr(torch, name))


def command_message(command: NodeCommand, int8: bool) -> tuple[dict[str, Any], tuple[Frame, ...]]:
    """The header and the frame of a command."""
    header: dict[str, Any] = {
        "kind": command.kind,
        "place": list(command.layers),
        "requests": list(command.requests),
        "length": command.length,
    }
    header["onward"] = [[one.name, list(one.layers), list(one.endpoint)] for one in command.next_hops]
    if command.token_batch is None or command.x_BLD is None:
        return header, ()
    about, frame = pack_hidden_states(command.x_BLD, int8)
    requests, positions, ids = command.token_batch
    token_batch = {"requests": list(requests), "positions": list(positions), "ids": [list(row) for row in ids]}
    return header | about | {"trip": command.batch_number, "reading": token_batch}, (frame,)


def command_from(header: Mapping[str, Any], frames: tuple[Frame, ...]) -> NodeCommand:
    """The command in a message. Raises ShoalError where there is none."""
    try:
        return _parse_command(header, frames)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise ShoalError("this is no command for a machine that holds layers") from None


def _parse_command(header: Mapping[str, Any], frames: tuple[Frame, ...]) -> NodeCommand:
    layers = _layer_range(header["place"])
    next_hops = tuple(NextHop(str(name), _layer_range(place), endpoint_from(endpoint)) for name, place, endpoint in header["onward"])
    if "reading" not in header:
        requests, length = _integers(header["requests"]), _integer(header["length"], most=_MOST_TOKENS)
        return NodeCommand(str(header["kind"]), layers, requests=requests, length=length, next_hops=next_hops)
    batch_number, value, x_BLD = _integer(header["trip"], least=-1), header["reading"], unpack_hidden_states(frames[0], header)
    ids = tuple(_integers(row, _MOST_TOKENS) for row in value["ids"])
    token_batch = TokenBatch(_integers(value["requests"]), _integers(value["positions"], _MOST_TOKENS), ids)
    if not _fits(token_batch, x_BLD):
        raise ShoalError(f"hidden states of the shape {tuple(x_BLD.shape)} are none of {len(token_batch.requests)} requests")
    return NodeCommand("read", layers, batch_number, token_batch, x_BLD, next_hops=next_hops)


def _integer(value: Any, least: int = 0, most: int = 2**53) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ShoalError(f"a whole number from {least} to {most} must stand in a command where {str(value)[:40]!r} does")
    return value


def _integers(value: Any, most: int = 2**53) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ShoalError(f"a list of whole numbers must stand in a command where {str(value)[:40]!r} does")
    return tuple(_integer(one, most=most) for one in value)


def _layer_range(value: Any) -> LayerRange:
    first, last = _integers(value, _MOST_LAYERS)
    return LayerRange(first, last)


def endpoint_from(value: Any) -> Endpoint:
    """The endpoint in a message. Raises ShoalError, or ValueError or TypeError where it is not a list of three."""
    address, token, key = value
    if not all(isinstance(one, str) and len(one) <= _LONGEST_FIELD for one in (address, token, "" if key is None else key)):
        raise ShoalError("a machine's endpoint is an address, a token and a key")
    return Endpoint(address, token, key)


def _fits(token_batch: TokenBatch, x_BLD: Tensor) -> bool:
    """Whether each request occurs once and has a row of hidden states, with one vector for each of its ids."""
    count = len(set(token_batch.requests))
    same = x_BLD.dim() == 3 and len(x_BLD) == count == len(token_batch.requests) == len(token_batch.positions) == len(token_batch.ids)
    return same and count <= _MOST_REQUESTS and x_BLD.is_floating_point() and all(len(row) == x_BLD.shape[1] for row in token_batch.ids)


def execute(host: LayerHost, command: NodeCommand) -> tuple[Tensor, float] | None:
    """Execute a command. Return the output of `read` and the seconds that it took; None for other commands."""
    if command.kind == "hold":
        host.load(command.layers)
    elif command.kind == "drop":
        host.drop(command.layers)
    elif command.kind == "share":
        request, other = command.requests
        host.copy_prefix(command.layers, request, other, command.length)
    elif command.kind == "release":
        host.release(command.requests)
    elif command.token_batch is not None and command.x_BLD is not None:
        start = time.perf_counter()
        y_BLD = host.read(command.layers, command.token_batch, command.x_BLD)
        return y_BLD, time.perf_counter() - start
    return None
