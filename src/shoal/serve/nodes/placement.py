"""The machines that hold layers of a served model: who is here, which layers each holds, and the route that new requests take.

There is no thread, lock or request here: the pipeline calls it, one thread at a time, and then moves the requests whose route is broken.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from shoal.errors import ShoalError
from shoal.scheduling.layer_split import MachineSpec, split
from shoal.serve.batching import MachineStatus
from shoal.serve.nodes.layer_host import LayerRange, TokenBatch
from shoal.serve.nodes.messages import NextHop, NodeCommand, PeerEndpoint

HERE = "server"
_WORTH, _WORTH_AGAIN = 0.95, 0.9
"""A new split is taken while the service runs if its slowest machine takes less than this share of the time; where no machine came and only
what is known of them has changed, it must gain more: figures waver, and requests on two routes are not computed together."""
_SHOWN_S = 60.0
"""How long a machine that was lost is shown."""
_MOST_S = 600.0
"""A machine that says that it took longer for one token is not believed."""


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
        self.sizes, self.bytes_of_one = list(sizes), bytes_of_one
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


class NodePlacement:
    """Machines come and go, and load and drop layers."""

    def __init__(self, planner: LayerPlanner, *, expected: int, probes: bool, tell: Callable[[str], None]) -> None:
        """`expected`: machines to wait for before the first route, this one counted; `probes`: whether machines may hand on directly."""
        self.planner, self.expected, self.probes, self.tell = planner, expected, probes, tell
        self.nodes: dict[str, NodeState] = {}
        self.current: Route | None = None
        self.coming: tuple[Route, set[tuple[str, LayerRange]]] | None = None
        """A route that new requests take as soon as its machines hold their layers, and who does not hold them yet."""
        self.direct: dict[tuple[int, int], bool] = {}
        """By the stays of two machines: whether the first reaches the second. False: it is not known yet, or it does not."""
        self.crowding = 0.0
        """How much longer a layer takes for each further request of a batch, as a share of the time for one."""
        self._numbers = itertools.count(1)

    def add(self, node: NodeState) -> None:
        """A machine is here. The first route is made when all that are expected are."""
        node.stay = next(self._numbers)
        self.nodes[node.name] = node
        if self.current is None and len(self.alive()) >= self.expected:
            self.take(self.planned())
        elif self.current is not None:
            self._consider()
            self._hold_reserves()

    def lose(self, name: str) -> bool:
        """A machine is gone. False: it was not here."""
        node = self.nodes.get(name)
        if node is None or not node.alive:
            return False
        node.alive, node.lost_at, node.holds = False, time.monotonic(), set()
        node.orders.clear()
        self.direct = {pair: reached for pair, reached in self.direct.items() if node.stay not in pair}
        if self.coming is not None and self.coming[0].goes_through(name):
            self.coming = None
        if self.current is not None and self.current.goes_through(name):
            self._take_without(name)
        return True

    def held(self, name: str, place: LayerRange) -> bool:
        """A machine has loaded layers. True: it was the last for which a new route waited."""
        if self.coming is None:
            return False
        self.coming[1].discard((name, place))
        if self.coming[1]:
            return False
        self._take_coming()
        return True

    def unheld(self, name: str, place: LayerRange, problem: str) -> None:
        """A machine could not load layers that it was told to hold: it is not believed to have room for so much any more, and whatever
        counted on it goes another way."""
        node = self.nodes.get(name)
        if node is None or place not in node.holds:
            return
        node.holds.discard(place)
        node.memory_bytes = min(node.memory_bytes, self.planner.bytes_of(place) - 1)
        self.tell(f"warning: {name} could not load the layers {place.first}–{place.last - 1}, and gets fewer from now on: {problem}")
        stop = node.stop(*place)
        if self.coming is not None and stop in self.coming[0].stops:
            self.coming = None
        if self.current is not None and stop in self.current.stops:
            self._take_without(name)
        elif self.current is not None:
            self._consider()
            self._hold_reserves()

    def probed(self, name: str, other: str, reached: bool) -> None:
        """A machine has tried to reach another one."""
        node, after = self.nodes[name], self.nodes.get(other)
        if after is not None and (node.stay, after.stay) in self.direct:
            self.direct[node.stay, after.stay] = reached
            self.tell(f"{name} hands on to {other} " + ("directly" if reached else "through the server: it cannot reach it"))

    def look_again(self) -> None:
        """What is known of the machines has changed."""
        if self.current is not None and self.coming is None:
            self._consider(_WORTH_AGAIN)

    # --- what the pipeline asks ----------------------------------------------------------------------

    def alive(self) -> list[NodeState]:
        return [node for node in self.nodes.values() if node.alive]

    def machines(self, ends_parameters: int) -> list[MachineStatus]:
        """The machines that are connected, and those that were lost a moment ago. `ends_parameters`: those that only the server has."""
        now = time.monotonic()
        return [self._status(node, ends_parameters) for node in self.nodes.values() if node.alive or now - node.lost_at < _SHOWN_S]

    def _status(self, node: NodeState, ends_parameters: int) -> MachineStatus:
        stops = self.current.stops if self.current is not None and node.alive else ()
        place, here = next((stop.place for stop in stops if stop.name == node.name), LayerRange(0, 0)), node.name == HERE
        count = sum(self.planner.sizes[place.first : place.last]) + (ends_parameters if here else 0)
        token_s = self.planner.seconds(node, place) if place.last or here else 0.0
        size, layers = count * self.planner.bytes_of_one, (place.first, place.last - 1)
        return MachineStatus(node.name, count, layers, node.alive, size, int(node.memory_bytes), token_s, node.tokens, here)

    def weight_of(self, batch: TokenBatch) -> float:
        """How many batches of one request take as long as this one."""
        return 1 + self.crowding * (len(batch.requests) - 1)

    def count(self, stop: RouteStage, batch: TokenBatch, seconds: float) -> None:
        """Add what a machine read. Its time for one token corrects what was measured when it joined."""
        node = self.nodes[stop.name]
        node.tokens += len(batch.requests) * len(batch.ids[0])
        if len(batch.ids[0]) == 1 and 0 < seconds < _MOST_S:
            taken = seconds / self.weight_of(batch) / self.planner.cost_of(stop.place)
            node.layer_s = 0.95 * node.layer_s + 0.05 * taken

    def send(self, name: str, order: NodeCommand) -> None:
        if self.nodes[name].alive:
            self.nodes[name].send(order)

    def is_whole(self, route: Route) -> bool:
        """Whether all machines of a route are here and hold its layers, as far as they were asked to and have not said otherwise."""
        nodes = [(stop, self.nodes[stop.name]) for stop in route.stops]
        return bool(nodes) and all(node.alive and node.stay == stop.stay and stop.place in node.holds for stop, node in nodes)

    def onward(self, stops: Sequence[RouteStage]) -> tuple[NextHop, ...]:
        """The stops after the first of these to which machines hand on directly."""
        found = []
        for before, after in pairwise(stops):
            door = self.nodes[after.name].door
            if door is None or not self.direct.get((before.stay, after.stay)):
                break
            found.append(NextHop(after.name, after.place, door))
        return tuple(found)

    def retire(self, routes: Iterable[Route | None]) -> list[RouteStage]:
        """Layers that none of these routes needs, nor that of new requests, are dropped. Return them."""
        needed = [*routes, self.current, self.coming[0] if self.coming else None]
        used = {(stop.name, stop.place) for route in needed if route is not None for stop in route.stops}
        used |= {(node.name, place) for node, place in self._reserves()}
        dropped = []
        for node in self.nodes.values():
            for place in [place for place in node.holds if (node.name, place) not in used]:
                node.holds.discard(place)
                node.send(NodeCommand("drop", place))
                dropped.append(node.stop(*place))
        return dropped

    # --- routes --------------------------------------------------------------------------------------

    def planned(self) -> tuple[RouteStage, ...] | None:
        return self.planner.quickest(self.alive())

    def take(self, stops: tuple[RouteStage, ...] | None) -> None:
        """Use a route from now on."""
        self.coming = None
        self.current = Route(next(self._numbers), stops) if stops is not None else None
        if self.current is None:
            self.tell("the machines that are here have no room for all layers: requests wait until more join")
            return
        self.expected = 1
        self._hold(self.current)
        self.tell(f"layers: {self._told()}")
        self._hold_reserves()

    def _take_without(self, name: str) -> None:
        assert self.current is not None
        self.take(self.planner.replaced(self.current.stops, name, self.alive()) or self.planned())

    def _slowest_s(self, stops: Sequence[RouteStage]) -> float:
        return max(self.planner.seconds(self.nodes[stop.name], stop.place) for stop in stops)

    def _consider(self, worth: float = _WORTH) -> None:
        """Prepare a better route for requests to come, where there is one."""
        assert self.current is not None
        stops = self.planned()
        if stops is None or not all(self.nodes[stop.name].alive for stop in self.current.stops):
            return
        if self._slowest_s(stops) < worth * self._slowest_s(self.current.stops):
            route = Route(next(self._numbers), stops)
            wanted = {(stop.name, stop.place) for stop in stops}
            missing = {(name, place) for name, place in wanted if place not in self.nodes[name].holds}
            self.coming = (route, missing)
            self._hold(route)
            if not missing:
                self._take_coming()

    def _take_coming(self) -> None:
        assert self.coming is not None
        self.current, self.coming = self.coming[0], None
        self.tell(f"new requests go another way: {self._told()}")
        self._hold_reserves()

    def _told(self) -> str:
        assert self.current is not None
        return ", ".join(f"{stop.name} {stop.first}–{stop.last - 1}" for stop in self.current.stops)

    def _hold(self, route: Route) -> None:
        for stop in route.stops:
            self._load(self.nodes[stop.name], stop.place)
        for before, after in pairwise(route.stops):
            self._probe(before, after)

    def _load(self, node: NodeState, place: LayerRange) -> None:
        if place not in node.holds:
            node.holds.add(place)
            node.send(NodeCommand("hold", place))

    def _reserves(self) -> list[tuple[NodeState, LayerRange]]:
        """Which layers machines without a stop hold beforehand, for the moment in which another one is lost."""
        stops = self.current.stops if self.current is not None else ()
        others = [stop for stop in stops if stop.name != HERE]
        return [(node, place) for node in spare_nodes(stops, self.alive()) for place in self.planner.reserve(others, node)]

    def _hold_reserves(self) -> None:
        for node, place in self._reserves():
            self._load(node, place)

    def _probe(self, before: RouteStage, after: RouteStage) -> None:
        """Let a machine try to reach the one after it."""
        pair, door = (before.stay, after.stay), self.nodes[after.name].door
        if self.probes and pair not in self.direct and door is not None and self.nodes[before.name].door is not None:
            self.direct[pair] = False
            self.send(before.name, NodeCommand("probe", onward=(NextHop(after.name, after.place, door),)))
