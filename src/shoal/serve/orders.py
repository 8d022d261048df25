"""Orders to machines that hold layers: as messages, and carried out. Hidden states travel exactly, or as int8 where that is asked for.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.serve.holding import Holder, Place, Reading
from shoal.serve.routes import Door, Onward, Order
from shoal.serve.tensors import as_frame, claimed_bytes, from_frame, type_name
from shoal.updates.messages import Frame

_MOST_REQUESTS = 4096


def packed(x_BLD: Tensor, int8: bool) -> tuple[dict[str, Any], Frame]:
    """What is said about hidden states, and their bytes. As int8 each token has a scale of its own, and no number is off by more than a
    254th of the token's largest one."""
    about = {"shape": list(x_BLD.shape), "type": type_name(x_BLD), "int8": int8}
    if not int8:
        return about, as_frame(x_BLD)
    scales_BL1 = x_BLD.float().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    small_BLD = (x_BLD.float() / scales_BL1).round().clamp(-127, 127).to(torch.int8)
    return about, bytes(as_frame(scales_BL1)) + bytes(as_frame(small_BLD))


def unpacked(frame: Frame, about: Mapping[str, Any]) -> Tensor:
    """The hidden states that a frame claims to be. Raises ShoalError where its bytes do not fit."""
    shape, name = about["shape"], about["type"]
    if not about.get("int8"):
        return from_frame(frame, shape, name)
    claimed_bytes(shape, name)
    scales_BL1 = from_frame(frame[: 4 * shape[0] * shape[1]], [*shape[:-1], 1], "float32")
    small_BLD = from_frame(frame[4 * shape[0] * shape[1] :], shape, "int8")
    return (small_BLD.float() * scales_BL1).to(getattr(torch, name))


def order_message(order: Order, int8: bool) -> tuple[dict[str, Any], tuple[Frame, ...]]:
    """An order as a header, and the frame that belongs to it."""
    header: dict[str, Any] = {"kind": order.kind, "place": list(order.place), "requests": list(order.requests), "length": order.length}
    header["onward"] = [[one.name, list(one.place), list(one.door)] for one in order.onward]
    if order.reading is None or order.x_BLD is None:
        return header, ()
    about, frame = packed(order.x_BLD, int8)
    requests, positions, ids = order.reading
    reading = {"requests": list(requests), "positions": list(positions), "ids": [list(row) for row in ids]}
    return header | about | {"trip": order.trip, "reading": reading}, (frame,)


def order_from(header: Mapping[str, Any], frames: tuple[Frame, ...]) -> Order:
    """The order that a message is. Raises ShoalError, or what a dictionary raises that lacks something."""
    place, requests = Place(*map(int, header["place"])), tuple(header["requests"])
    onward = tuple(Onward(str(name), Place(*place), Door(*door)) for name, place, door in header["onward"])
    if "reading" not in header:
        return Order(str(header["kind"]), place, requests=requests, length=int(header["length"]), onward=onward)
    reading, x_BLD = Reading(**header["reading"]), unpacked(frames[0], header)
    if not _fits(reading, x_BLD):
        raise ShoalError(f"hidden states of the shape {tuple(x_BLD.shape)} are none of {len(reading.requests)} requests")
    return Order("read", place, int(header["trip"]), reading, x_BLD, onward=onward)


def _fits(reading: Reading, x_BLD: Tensor) -> bool:
    """Whether there is a row for each request, and a token for each of its ids."""
    count = len(reading.requests)
    same = x_BLD.dim() == 3 and len(x_BLD) == count == len(reading.positions) == len(reading.ids) <= _MOST_REQUESTS
    return same and all(len(row) == x_BLD.shape[1] for row in reading.ids)


def carry_out(holder: Holder, order: Order) -> tuple[Tensor, float] | None:
    """Do what an order says; what came of reading, and the seconds that it took."""
    if order.kind == "hold":
        holder.hold(order.place)
    elif order.kind == "drop":
        holder.drop(order.place)
    elif order.kind == "share":
        request, other = order.requests
        holder.share(order.place, request, other, order.length)
    elif order.kind == "release":
        holder.release(order.requests)
    elif order.reading is not None and order.x_BLD is not None:
        start = time.perf_counter()
        y_BLD = holder.read(order.place, order.reading, order.x_BLD)
        return y_BLD, time.perf_counter() - start
    return None
