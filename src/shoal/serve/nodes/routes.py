"""Machines that hold layers, what they are told to do, and the ways through them.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from shoal.errors import ShoalError
from shoal.scheduling.layer_split import MachineSpec, split
from shoal.serve.nodes.layer_host import Place, Reading

HERE = "server"


class Door(NamedTuple):
    """Where a machine takes what others hand to it."""

    address: str
    token: str
    key: str | None


class Onward(NamedTuple):
    """A stop that can be reached straight from the one before it."""

    name: str
    place: Place
    door: Door


class Order(NamedTuple):
    """What a machine is to do: `hold` or `drop` layers, `read` tokens through them, let one of two requests `share` what the other's cache
    holds, `release` requests, or `probe` whether it reaches another machine."""

    kind: str
    place: Place = Place(0, 0)
    trip: int = -1
    reading: Reading | None = None
    x_BLD: Tensor | None = None
    requests: tuple[int, ...] = ()
    length: int = 0
    """Tokens that are shared."""
    onward: tuple[Onward, ...] = ()
    """The stops after this one to which what was read is handed on, without the server; or whom to probe."""


@dataclass
class Node:
    """A machine that holds layers."""

    name: str
    layer_s: float
    """Time for one layer of mean size, as it was measured."""
    memory_bytes: float
    """For weights and caches."""
    fixed_s: float = 0.0
    """Time for what it does beside its layers: the server has the embedding and the head."""
    ring: Callable[[], None] = lambda: None
    """Tells that there are orders."""
    alive: bool = True
    orders: deque[Order] = field(default_factory=deque)
    holds: set[Place] = field(default_factory=set)
    lost_at: float = 0.0
    tokens: int = 0
    door: Door | None = None
    """Where other machines may try to reach it."""
    stay: int = 0
    """Tells a machine from one that was here before under its name."""

    def hands(self) -> MachineSpec:
        return MachineSpec(1 / self.layer_s, self.memory_bytes, self.fixed_s)

    def stop(self, first: int, last: int) -> Stop:
        return Stop(self.name, first, last, self.stay)

    def send(self, order: Order) -> None:
        self.orders.append(order)
        self.ring()


class Stop(NamedTuple):
    """The layers [first, last) at a machine."""

    name: str
    first: int
    last: int
    stay: int = 0
    """Of the machine: one that comes back under its name has none of the caches that it had."""

    @property
    def place(self) -> Place:
        return Place(self.first, self.last)


class Route(NamedTuple):
    """The stops in order; its number is the epoch of the requests that take it."""

    number: int
    stops: tuple[Stop, ...]

    def goes_through(self, name: str) -> bool:
        return any(stop.name == name for stop in self.stops)


def spares(stops: Sequence[Stop], nodes: Sequence[Node]) -> list[Node]:
    """Machines that have no stop."""
    busy = {stop.name for stop in stops}
    return [node for node in nodes if node.name not in busy]


class Planner:
    """Which machine gets which layers."""

    def __init__(self, sizes: Sequence[int], bytes_of_one: int, cache_numbers: int) -> None:
        """`sizes`: parameters of each layer; `bytes_of_one`: of a number; `cache_numbers`: how many numbers a layer's caches hold."""
        self.costs = [size * len(sizes) / sum(sizes) for size in sizes]
        self.layer_bytes = [(size + cache_numbers) * bytes_of_one for size in sizes]

    def quickest(self, nodes: Sequence[Node]) -> tuple[Stop, ...] | None:
        """The quickest split over these machines; null: they have no room for all layers."""
        try:
            bounds = split(self.costs, [node.hands() for node in nodes], sizes=self.layer_bytes, leave_out=True)
        except ShoalError:
            return None
        return tuple(node.stop(*place) for node, place in zip(nodes, pairwise(bounds), strict=True) if place[0] < place[1])

    def replaced(self, stops: Sequence[Stop], name: str, nodes: Sequence[Node]) -> tuple[Stop, ...] | None:
        """The same stops with a machine that has no layers in the place of one that is lost: all others keep their caches."""
        lost = next(stop for stop in stops if stop.name == name)
        fit = [node for node in spares(stops, nodes) if node.memory_bytes >= self.bytes_of(lost.place)]
        if not fit:
            return None
        spare = min(fit, key=lambda node: lost.place not in node.holds)
        return tuple(spare.stop(*stop.place) if stop is lost else stop for stop in stops)

    def reserve(self, stops: Sequence[Stop], node: Node) -> list[Place]:
        """Layers that a machine without any loads beforehand, as far as it has room, to take the place of whoever has them at once."""
        chosen: list[Place] = []
        for stop in stops:
            if sum(map(self.bytes_of, [*chosen, stop.place])) <= node.memory_bytes:
                chosen.append(stop.place)
        return chosen

    def bytes_of(self, place: Place) -> int:
        """What layers take, with their caches."""
        return sum(self.layer_bytes[place.first : place.last])

    def seconds(self, node: Node, place: Place) -> float:
        """What one token takes in some layers at a machine."""
        return node.hands().seconds(self.cost_of(place))

    def cost_of(self, place: Place) -> float:
        """A layer of mean size costs 1."""
        return sum(self.costs[place.first : place.last])
