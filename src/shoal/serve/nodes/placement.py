"""The machines that hold layers of a served model: which layers each holds, and the route of new requests.

There is no thread, lock or request here. The pipeline calls it, one thread at a time, and then reroutes requests whose route is broken.
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
from shoal.serve.batching.backend_interface import MachineEntry
from shoal.serve.nodes.layer_host import LayerRange, TokenBatch
from shoal.serve.nodes.messages import Endpoint, NextHop, NodeCommand
from shoal.serve.nodes.node_timing import NodeTiming

SERVER_NODE = "server"
_NEW_NODE_SHARE, _NEW_TIMING_SHARE = 0.95, 0.9
"""A new split is used if its slowest machine takes less than this share of the present time. Where no machine joined and only the measured
times changed, it must gain more: the times fluctuate, and requests on two routes are not computed together."""
_SHOWN_S = 60.0
"""How long a lost machine stays in the list of machines."""
_MOST_S = 600.0
"""Longer reported times for one token are ignored."""
_NETWORK_S = 1.0
"""A machine's own time for a batch counts as long as the server waited no longer than this beyond it."""


@dataclass
class NodeState:
    """A machine that holds layers."""

    name: str
    layer_s: float
    """Measured time of one token in a layer of mean size."""
    memory_bytes: float
    """Memory for weights and caches."""
    fixed_s: float = 0.0
    """Time for one token outside of its layers: the server has the embedding and the head."""
    wake: Callable[[], None] = lambda: None
    """Called when there are new commands."""
    alive: bool = True
    commands: deque[NodeCommand] = field(default_factory=deque)
    assigned: set[LayerRange] = field(default_factory=set)
    lost_at: float = 0.0
    tokens: int = 0
    endpoint: Endpoint | None = None
    """Where other machines may reach it."""
    join_number: int = 0
    """Number of its joining; it differs from that of an earlier machine of the same name."""
    is_on_trial: bool = False
    """It gets no layers of a route until a trial went well."""

    def __post_init__(self) -> None:
        self.timing = NodeTiming(self.layer_s)

    def spec(self) -> MachineSpec:
        return MachineSpec(1 / self.layer_s, self.memory_bytes, self.fixed_s)

    def stage(self, layers: LayerRange) -> RouteStage:
        return RouteStage(self.name, layers, self.join_number)

    def send(self, command: NodeCommand) -> None:
        self.commands.append(command)
        self.wake()


class RouteStage(NamedTuple):
    """Layers on a machine."""

    name: str
    layers: LayerRange
    join_number: int = 0
    """Of the machine: one that rejoins under its name has lost its caches."""


class Route(NamedTuple):
    """The stages that a request passes, in order."""

    number: int
    stages: tuple[RouteStage, ...]

    @property
    def join_numbers(self) -> set[int]:
        return {stage.join_number for stage in self.stages}

    def uses_node(self, name: str) -> bool:
        return any(stage.name == name for stage in self.stages)


def spare_nodes(stages: Sequence[RouteStage], nodes: Sequence[NodeState]) -> list[NodeState]:
    """Machines without a stage."""
    busy = {stage.name for stage in stages}
    return [node for node in nodes if node.name not in busy]


class LayerSize(NamedTuple):
    """What a layer takes."""

    numbers: int
    """Parameters."""
    weight_bytes: int
    token_bytes: int = 0
    """In the caches, of each token."""


class LayerPlanner:
    """Chooses which machine gets which layers."""

    def __init__(self, sizes: Sequence[LayerSize], cache_tokens: int = 0, *, even: bool = False) -> None:
        """`cache_tokens`: capacity of a layer's caches; `even`: every machine gets layers, whatever its speed."""
        self.even, self.sizes = even, list(sizes)
        whole = sum(size.numbers for size in sizes)
        self.costs = [size.numbers * len(sizes) / whole for size in sizes]
        self.layer_bytes = [size.weight_bytes + size.token_bytes * cache_tokens for size in sizes]

    def best_split(self, nodes: Sequence[NodeState]) -> tuple[RouteStage, ...] | None:
        """The fastest or the most even split over these machines; None: they have too little memory for all layers."""
        specs = [MachineSpec(1.0, node.memory_bytes) if self.even else node.spec() for node in nodes]
        try:
            bounds = split(self.costs, specs, sizes=self.layer_bytes, leave_out=True, even=self.even)
        except ShoalError:
            return None
        ranges = [LayerRange(*layers) for layers in pairwise(bounds)]
        return tuple(node.stage(layers) for node, layers in zip(nodes, ranges, strict=True) if layers.first < layers.last)

    def with_replacement(self, stages: Sequence[RouteStage], name: str, nodes: Sequence[NodeState]) -> tuple[RouteStage, ...] | None:
        """The same stages with a spare machine instead of a lost one, so that all others keep their caches; None: no spare fits."""
        lost = next(stage for stage in stages if stage.name == name)
        fit = [node for node in spare_nodes(stages, nodes) if node.memory_bytes >= self.bytes_of(lost.layers)]
        if not fit:
            return None
        spare = min(fit, key=lambda node: lost.layers not in node.assigned)
        return tuple(spare.stage(stage.layers) if stage is lost else stage for stage in stages)

    def reserve(self, stages: Sequence[RouteStage], node: NodeState) -> list[LayerRange]:
        """Stages whose layers a spare machine loads in advance, as far as its memory allows, to replace another one at once."""
        chosen: list[LayerRange] = []
        for stage in stages:
            if sum(map(self.bytes_of, [*chosen, stage.layers])) <= node.memory_bytes:
                chosen.append(stage.layers)
        return chosen

    def bytes_of(self, layers: LayerRange) -> int:
        """Bytes of layers and their caches."""
        return sum(self.layer_bytes[layers.first : layers.last])

    def seconds(self, node: NodeState, layers: LayerRange) -> float:
        """Time of one token in some layers on a machine."""
        return node.spec().seconds(self.cost_of(layers))

    def cost_of(self, layers: LayerRange) -> float:
        """Relative cost: a layer of mean size costs 1."""
        return sum(self.costs[layers.first : layers.last])


class NodePlacement:
    """The machines, their layers, and the route of new requests."""

    def __init__(
        self,
        planner: LayerPlanner,
        *,
        expected: int,
        probes: bool,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`expected`: machines to wait for before the first route, including this one; `probes`: whether machines may send directly."""
        self.planner, self.expected, self.probes, self.tell, self.clock = planner, expected, probes, tell, clock
        self.nodes: dict[str, NodeState] = {}
        self.current: Route | None = None
        self.upcoming: tuple[Route, set[tuple[str, LayerRange]]] | None = None
        """The next route, used as soon as its machines have loaded their layers, and the layers that are still missing."""
        self.reachable: dict[tuple[int, int], bool] = {}
        """By the join numbers of two machines: whether the first reaches the second. False: no, or not known yet."""
        self._probing: set[tuple[int, int]] = set()
        """Machines, by their join numbers, of which the first is asked whether it reaches the second. It answers once."""
        self._closed_paths: set[tuple[int, int]] = set()
        """Machines, by their join numbers, of which the first does not send directly to the second any more, whatever it reports."""
        self.batch_slowdown = 0.0
        """How much longer a layer takes for each further request of a batch, as a share of the time for one."""
        self._numbers = itertools.count(1)

    def add(self, node: NodeState, is_on_trial: bool = False) -> None:
        """Add a machine; it is used at once unless it is on trial."""
        node.join_number, node.is_on_trial = next(self._numbers), is_on_trial
        self.nodes[node.name] = node
        if not is_on_trial:
            self.admit(node)

    def admit(self, node: NodeState) -> None:
        """Use a machine. The first route is planned when all expected machines have joined."""
        node.is_on_trial = False
        if self.current is None and len(self.alive()) >= self.expected:
            self.use_route(self.plan())
        elif self.current is not None:
            self._consider()
            self._load_reserves()

    def remove(self, name: str) -> bool:
        """Remove a machine. False: there was no such machine."""
        node = self.nodes.get(name)
        if node is None or not node.alive:
            return False
        node.alive, node.lost_at, node.assigned = False, self.clock(), set()
        node.commands.clear()
        self.reachable = {pair: reached for pair, reached in self.reachable.items() if node.join_number not in pair}
        self._closed_paths = {pair for pair in self._closed_paths if node.join_number not in pair}
        self._probing = {pair for pair in self._probing if node.join_number not in pair}
        if self.upcoming is not None and self.upcoming[0].uses_node(name):
            self.upcoming = None
        if self.current is not None and self.current.uses_node(name):
            self._route_without(name)
        return True

    def on_loaded(self, name: str, layers: LayerRange) -> bool:
        """A machine has loaded layers. True: the next route is used now."""
        self.nodes[name].timing.loaded(layers, self.clock())
        if self.upcoming is None:
            return False
        missing = self.upcoming[1]
        missing.discard((name, layers))
        if not missing:
            self._use_upcoming()
        return not missing

    def on_load_failed(self, name: str, layers: LayerRange, problem: str) -> None:
        """A machine could not load layers: its memory counts as smaller from now on, and the routes through these layers are replaced."""
        node = self.nodes.get(name)
        if node is None or layers not in node.assigned:
            return
        node.timing.loaded(layers, self.clock())
        node.assigned.discard(layers)
        node.memory_bytes = min(node.memory_bytes, self.planner.bytes_of(layers) - 1)
        self.tell(f"warning: {name} could not load the layers {layers.first}–{layers.last - 1}, and gets fewer from now on: {problem}")
        stage = node.stage(layers)
        if self.upcoming is not None and stage in self.upcoming[0].stages:
            self.upcoming = None
        if self.current is not None and stage in self.current.stages:
            self._route_without(name)
        elif self.current is not None:
            self._consider()
            self._load_reserves()

    def on_measured(self, node: NodeState, layers: LayerRange, seconds: float) -> None:
        """A spare machine was measured again: it may be faster now."""
        if node.alive and 0 < seconds < _MOST_S:
            node.layer_s = seconds / self.planner.cost_of(layers)
            self.replan()

    def on_probed(self, name: str, other: str, reached: bool) -> None:
        node, after = self.nodes[name], self.nodes.get(other)
        pair = (node.join_number, after.join_number) if after is not None else (0, 0)
        if pair in self._probing:
            self._probing.discard(pair)
            self.reachable[pair] = reached
            self.tell(f"{name} sends to {other} " + ("directly" if reached else "through the server, since it cannot reach it"))

    def replan(self) -> None:
        """Plan again with the present times of the machines."""
        if self.current is not None and self.upcoming is None:
            self._consider(_NEW_TIMING_SHARE)

    # --- queries of the pipeline ---------------------------------------------------------------------

    def alive(self) -> list[NodeState]:
        """The connected machines that may hold layers of a route."""
        return [node for node in self.nodes.values() if node.alive and not node.is_on_trial]

    def on_trial(self) -> list[NodeState]:
        return [node for node in self.nodes.values() if node.alive and node.is_on_trial]

    def can_do_without(self, name: str) -> bool:
        """Whether the other machines have enough memory for all layers."""
        return self.planner.best_split([node for node in self.alive() if node.name != name]) is not None

    def machines(self, ends: LayerSize) -> list[MachineEntry]:
        """The machines that are connected, and those that were lost a moment ago. `ends`: what only the server has."""
        now = self.clock()
        return [self._status(node, ends) for node in self.nodes.values() if node.alive or now - node.lost_at < _SHOWN_S]

    def _status(self, node: NodeState, ends: LayerSize) -> MachineEntry:
        stages = self.current.stages if self.current is not None and node.alive else ()
        layers, here = next((stage.layers for stage in stages if stage.name == node.name), LayerRange(0, 0)), node.name == SERVER_NODE
        own = [*self.planner.sizes[layers.first : layers.last], *([ends] if here else [])]
        count, size = sum(one.numbers for one in own), sum(one.weight_bytes for one in own)
        token_s = self.planner.seconds(node, layers) if layers.last or here else 0.0
        shown = layers.first, layers.last - 1
        return MachineEntry(node.name, count, shown, node.alive, size, int(node.memory_bytes), token_s, node.tokens, here)

    def weight_of(self, batch: TokenBatch) -> float:
        """How many batches of one request take as long as this one."""
        return 1 + self.batch_slowdown * (len(batch.requests) - 1)

    def count(self, stage: RouteStage, batch: TokenBatch, claimed_s: float, seen_s: float) -> None:
        """Add what a machine read. Its time for one token corrects what was measured when it joined. `claimed_s`: what it reports;
        `seen_s`: how long the server waited."""
        node, seconds = self.nodes[stage.name], max(claimed_s, seen_s - _NETWORK_S)
        node.tokens += len(batch.requests) * len(batch.ids[0])
        if len(batch.ids[0]) == 1 and 0 < seconds < _MOST_S:
            taken = seconds / self.weight_of(batch) / self.planner.cost_of(stage.layers)
            node.layer_s = 0.95 * node.layer_s + 0.05 * taken

    def send(self, name: str, command: NodeCommand) -> None:
        if self.nodes[name].alive:
            self.nodes[name].send(command)

    def is_intact(self, route: Route) -> bool:
        """Whether all machines of a route are connected and were assigned its layers, without a failure to load them."""
        nodes = [(stage, self.nodes[stage.name]) for stage in route.stages]
        return bool(nodes) and all(
            node.alive and node.join_number == stage.join_number and stage.layers in node.assigned for stage, node in nodes
        )

    def next_hops(self, stages: Sequence[RouteStage]) -> tuple[NextHop, ...]:
        """The stages after the first of these that machines send to directly."""
        found = []
        for before, after in pairwise(stages):
            endpoint = self.nodes[after.name].endpoint
            if endpoint is None or not self.reachable.get(pair := (before.join_number, after.join_number)) or pair in self._closed_paths:
                break
            found.append(NextHop(after.name, after.layers, endpoint))
        return tuple(found)

    def close_direct_paths(self, stages: Sequence[RouteStage]) -> None:
        """From now on the server sends what these machines sent each other."""
        self._closed_paths |= {(before.join_number, after.join_number) for before, after in pairwise(stages)}

    def drop_unused(self, routes: Iterable[Route | None]) -> list[RouteStage]:
        """Drop layers that neither these routes nor those of new requests need. Return the dropped stages."""
        needed = [*routes, self.current, self.upcoming[0] if self.upcoming else None]
        used = {(stage.name, stage.layers) for route in needed if route is not None for stage in route.stages}
        used |= {(node.name, layers) for node, layers in self._reserves()}
        dropped = []
        for node in (one for one in self.nodes.values() if not one.is_on_trial):
            for layers in [layers for layers in node.assigned if (node.name, layers) not in used]:
                node.assigned.discard(layers)
                node.send(NodeCommand("drop", layers))
                dropped.append(node.stage(layers))
        return dropped

    # --- routes --------------------------------------------------------------------------------------

    def plan(self) -> tuple[RouteStage, ...] | None:
        return self.planner.best_split(self.alive())

    def use_route(self, stages: tuple[RouteStage, ...] | None) -> None:
        """Use a route for new requests from now on."""
        self.upcoming = None
        self.current = Route(next(self._numbers), stages) if stages is not None else None
        if self.current is None:
            self.tell("the connected machines have too little memory for all layers: requests wait until more machines join")
            return
        self.expected = 1
        self._load_route(self.current)
        self.tell(f"layers: {self._format_route()}")
        self._load_reserves()

    def _route_without(self, name: str) -> None:
        assert self.current is not None
        self.use_route(self.planner.with_replacement(self.current.stages, name, self.alive()) or self.plan())

    def _slowest_s(self, stages: Sequence[RouteStage]) -> float:
        return max(self.planner.seconds(self.nodes[stage.name], stage.layers) for stage in stages)

    def _consider(self, share: float = _NEW_NODE_SHARE) -> None:
        """Prepare a better route for new requests, where there is one: a faster one, or one over more machines if layers go evenly."""
        assert self.current is not None
        stages = self.plan()
        if stages is None or not all(self.nodes[stage.name].alive for stage in self.current.stages):
            return
        more = len(stages) > len(self.current.stages)
        if more if self.planner.even else self._slowest_s(stages) < share * self._slowest_s(self.current.stages):
            route = Route(next(self._numbers), stages)
            wanted = {(stage.name, stage.layers) for stage in stages}
            missing = {(name, layers) for name, layers in wanted if layers not in self.nodes[name].assigned}
            self.upcoming = (route, missing)
            self._load_route(route)
            if not missing:
                self._use_upcoming()

    def _use_upcoming(self) -> None:
        assert self.upcoming is not None
        self.current, self.upcoming = self.upcoming[0], None
        self.tell(f"new requests take another route: {self._format_route()}")
        self._load_reserves()

    def _format_route(self) -> str:
        assert self.current is not None
        stages = self.current.stages
        route = ", ".join(f"{stage.name} {stage.layers.first}–{stage.layers.last - 1}" for stage in stages)
        return "; spare: ".join([route, *filter(None, [", ".join(node.name for node in spare_nodes(stages, self.alive()))])])

    def _load_route(self, route: Route) -> None:
        for stage in route.stages:
            self.load(self.nodes[stage.name], stage.layers)
        for before, after in pairwise(route.stages):  # machines try to reach the next one
            pair, endpoint = (before.join_number, after.join_number), self.nodes[after.name].endpoint
            if self.probes and pair not in self.reachable and endpoint is not None and self.nodes[before.name].endpoint is not None:
                self.reachable[pair] = False
                self._probing.add(pair)
                self.send(before.name, NodeCommand("probe", next_hops=(NextHop(after.name, after.layers, endpoint),)))

    def load(self, node: NodeState, layers: LayerRange) -> None:
        if layers not in node.assigned:
            node.assigned.add(layers)
            node.timing.loads(layers, self.planner.bytes_of(layers), self.clock())
            node.send(NodeCommand("hold", layers))

    def _reserves(self) -> list[tuple[NodeState, LayerRange]]:
        """Layers that spare machines load in advance, in case another machine is lost."""
        stages = self.current.stages if self.current is not None else ()
        others = [stage for stage in stages if stage.name != SERVER_NODE]
        return [(node, layers) for node in spare_nodes(stages, self.alive()) for layers in self.planner.reserve(others, node)]

    def _load_reserves(self) -> None:
        for node, layers in self._reserves():
            self.load(node, layers)
