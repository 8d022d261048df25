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
from shoal.serve.nodes.layer_host import LayerRange, TokenBatch

HERE = "server"


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


@dataclass
class NodeState:
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
    orders: deque[NodeCommand] = field(default_factory=deque)
    holds: set[LayerRange] = field(default_factory=set)
    lost_at: float = 0.0
    tokens: int = 0
    door: PeerEndpoint | None = None
    """Where other machines may try to reach it."""
    stay: int = 0
    """Tells a machine from one that was here before under its name."""

    def hands(self) -> MachineSpec:
        return MachineSpec(1 / self.layer_s, self.memory_bytes, self.fixed_s)

    def stop(self, first: int, last: int) -> RouteStage:
        return RouteStage(self.name, first, last, self.stay)

    def send(self, order: NodeCommand) -> None:
        self.orders.append(order)
        self.ring()


class RouteStage(NamedTuple):
    """The layers [first, last) at a machine."""

    name: str
    first: int
    last: int
    stay: int = 0
    """Of the machine: one that comes back under its name has none of the caches that it had."""

    @property
    def place(self) -> LayerRange:
        return LayerRange(self.first, self.last)


class Route(NamedTuple):
    """The stops in order; its number is the epoch of the requests that take it."""

    number: int
    stops: tuple[RouteStage, ...]

    def goes_through(self, name: str) -> bool:
        return any(stop.name == name for stop in self.stops)


def spare_nodes(stops: Sequence[RouteStage], nodes: Sequence[NodeState]) -> list[NodeState]:
    """Machines that have no stop."""
    busy = {stop.name for stop in stops}
    return [node for node in nodes if node.name not in busy]


class LayerPlanner:
    """Which machine gets which layers."""

    def __init__(self, sizes: Sequence[int], bytes_of_one: int, cache_numbers: int) -> None:
        """`sizes`: parameters of each layer; `bytes_of_one`: of a number; `cache_numbers`: how many numbers a layer's caches hold."""
        self.costs = [size * len(sizes) / sum(sizes) for size in sizes]
        self.layer_bytes = [(size + cache_numbers) * bytes_of_one for size in sizes]

    def quickest(self, nodes: Sequence[NodeState]) -> tuple[RouteStage, ...] | None:
        """The quickest split over these machines; null: they have no room for all layers."""
        try:
            bounds = split(self.costs, [node.hands() for node in nodes], sizes=self.layer_bytes, leave_out=True)
        except ShoalError:
            return None
        return tuple(node.stop(*place) for node, place in zip(nodes, pairwise(bounds), strict=True) if place[0] < place[1])

    def replaced(self, stops: Sequence[RouteStage], name: str, nodes: Sequence[NodeState]) -> tuple[RouteStage, ...] | None:
        """The same stops with a machine that has no layers in the place of one that is lost: all others keep their caches."""
        lost = next(stop for stop in stops if stop.name == name)
        fit = [node for node in spare_nodes(stops, nodes) if node.memory_bytes >= self.bytes_of(lost.place)]
        if not fit:
            return None
        spare = min(fit, key=lambda node: lost.place not in node.holds)
        return tuple(spare.stop(*stop.place) if stop is lost else stop for stop in stops)

    def reserve(self, stops: Sequence[RouteStage], node: NodeState) -> list[LayerRange]:
        """Layers that a machine without any loads beforehand, as far as it has room, to take the place of whoever has them at once."""
        chosen: list[LayerRange] = []
        for stop in stops:
            if sum(map(self.bytes_of, [*chosen, stop.place])) <= node.memory_bytes:
                chosen.append(stop.place)
        return chosen

    def bytes_of(self, place: LayerRange) -> int:
        """What layers take, with their caches."""
        return sum(self.layer_bytes[place.first : place.last])

    def seconds(self, node: NodeState, place: LayerRange) -> float:
        """What one token takes in some layers at a machine."""
        return node.hands().seconds(self.cost_of(place))

    def cost_of(self, place: LayerRange) -> float:
        """A layer of mean size costs 1."""
        return sum(self.costs[place.first : place.last])
