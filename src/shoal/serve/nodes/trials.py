"""Machines that were removed for a fault, and return: each is tried before it gets layers again. Spare machines are measured again.

A trial gives the same hidden states to the machine and to the server, which computes them by itself. A machine whose output agrees may
hold layers. While a machine is suspected, machines with other names are tried as well: a name is only a claim.

Shapes: L tokens, D width.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from shoal.serve.nodes.layer_host import LayerRange, TokenBatch
from shoal.serve.nodes.messages import NodeCommand
from shoal.serve.nodes.node_timing import work_of
from shoal.serve.nodes.output_checks import agrees, output_problem
from shoal.serve.nodes.placement import SERVER_NODE, NodePlacement, NodeState, spare_nodes

_FIRST_TRIAL_S, _LONGEST_WAIT_S = 5.0, 600.0
"""Time until a suspected machine is tried. It doubles with each of its faults."""
_TRIAL_TOKENS = 16
_MEASURE_EVERY_S = 30.0
_MEASURED_READS = 4
_MOST_SUSPICIONS = 256
FIRST_TRIAL_REQUEST = 1 << 52
"""Numbers of requests from here on are not those of clients."""


@dataclass
class Suspicion:
    """Why a machine of this name was removed."""

    why: str
    layers: LayerRange
    faults: int
    retry_at: float
    cleared: bool = False
    """A trial went well since."""


@dataclass
class Trial:
    """Hidden states that a machine and the server compute."""

    node: NodeState
    layers: LayerRange
    started_at: float
    x_1LD: Tensor
    output_1LD: Tensor | None = None
    own_1LD: Tensor | None = None
    both: int = 0
    """How many of the two have answered."""


@dataclass
class Measurement:
    """Single tokens that a spare machine reads."""

    node: NodeState
    layers: LayerRange
    left: int
    seconds: float = float("inf")


class NodeTrials:
    """Suspected machines, their trials, and the measurements of spare machines."""

    def __init__(
        self,
        placement: NodePlacement,
        embed: Callable[[TokenBatch], Tensor],
        vocab_size: int,
        numbers: Iterator[int],
        clock: Callable[[], float],
    ) -> None:
        """`numbers`: numbers for batches."""
        self.placement, self._embed, self._vocab_size, self._numbers, self._clock = placement, embed, vocab_size, numbers, clock
        self.suspicions: dict[str, Suspicion] = {}
        """By name. A name keeps its number of faults after a trial that went well."""
        self._trials: dict[int, Trial] = {}
        self._measurements: dict[int, Measurement] = {}
        self._measured_at = clock()

    def needs_trial(self, name: str) -> bool:
        """Whether a machine that joins is tried first."""
        return name != SERVER_NODE and any(not one.cleared for one in self.suspicions.values())

    def suspect(self, name: str, layers: LayerRange, why: str) -> None:
        """A machine is removed for a fault in these layers."""
        before = self.suspicions.pop(name, None)
        faults = before.faults + 1 if before is not None else 1
        wait_s = min(_FIRST_TRIAL_S * 2 ** (faults - 1), _LONGEST_WAIT_S)
        self.suspicions[name] = Suspicion(why, layers, faults, self._clock() + wait_s)
        while len(self.suspicions) > _MOST_SUSPICIONS:
            del self.suspicions[next(iter(self.suspicions))]

    def tick(self) -> list[str]:
        """Start trials and measurements that are due. Return the machines that did not answer in time."""
        now = self._clock()
        for node in self.placement.on_trial():
            if not any(trial.node is node for trial in self._trials.values()) and now >= self._due(node):
                self._start_trial(node, now)
        if now - self._measured_at >= _MEASURE_EVERY_S:
            self._measured_at = now
            self._measure_spares()
        late = {trial.node.name for trial in self._trials.values() if trial.node.timing.is_late(trial.started_at, now)}
        return sorted(late)

    def _due(self, node: NodeState) -> float:
        suspicion = self.suspicions.get(node.name)
        return suspicion.retry_at if suspicion is not None else 0.0

    def _start_trial(self, node: NodeState, now: float) -> None:
        suspicion = self.suspicions.get(node.name) or next(reversed(self.suspicions.values()))
        layers, planner = suspicion.layers, self.placement.planner
        if planner.bytes_of(layers) > node.memory_bytes:
            layers = LayerRange(layers.first, layers.first + 1)
        number = next(self._numbers)
        ids = tuple(random.randrange(self._vocab_size) for _ in range(_TRIAL_TOKENS))
        batch = TokenBatch((FIRST_TRIAL_REQUEST + number,), (0,), (ids,))
        self._trials[number] = Trial(node, layers, now, self._embed(batch))
        self.placement.load(node, layers)
        node.timing.sent(number, work_of(batch, planner.cost_of(layers)))
        for name, kind in ((node.name, "read"), (SERVER_NODE, "recompute")):
            self.placement.send(name, NodeCommand(kind, layers, number, batch, self._trials[number].x_1LD))
        self.placement.send(node.name, NodeCommand("release", requests=tuple(batch.requests)))

    def _measure_spares(self) -> None:
        """Give spare machines single tokens to read: one that was busy when it was measured may be fast now."""
        stages = self.placement.current.stages if self.placement.current is not None else ()
        for node in spare_nodes(stages, self.placement.alive()):
            if node.name == SERVER_NODE or any(one.node is node for one in self._measurements.values()):
                continue
            layers = next(iter(sorted(node.assigned)), LayerRange(0, 1))
            self.placement.load(node, layers)
            measurement = Measurement(node, layers, _MEASURED_READS)
            for _ in range(_MEASURED_READS):
                number = next(self._numbers)
                batch = TokenBatch((FIRST_TRIAL_REQUEST + number,), (0,), ((0,),))
                self._measurements[number] = measurement
                node.timing.sent(number, work_of(batch, self.placement.planner.cost_of(layers)))
                self.placement.send(node.name, NodeCommand("read", layers, number, batch, self._embed(batch)))
                self.placement.send(node.name, NodeCommand("release", requests=tuple(batch.requests)))

    def on_read(self, name: str, number: int, y_BLD: Tensor, seconds: float) -> bool:
        """A machine's output. False: it belongs to no trial and no measurement."""
        if (trial := self._trials.get(number)) is not None and trial.node.name == name:
            trial.output_1LD = y_BLD if output_problem(y_BLD, tuple(trial.x_1LD.shape), trial.x_1LD.dtype) is None else None
            self._answered(number, trial)
            return True
        if (measurement := self._measurements.get(number)) is None or measurement.node.name != name:
            return False
        del self._measurements[number]
        measurement.left, measurement.seconds = measurement.left - 1, min(measurement.seconds, seconds if seconds > 0 else float("inf"))
        if not measurement.left:
            self.placement.on_measured(measurement.node, measurement.layers, measurement.seconds)
        return True

    def on_recomputed(self, number: int, own_1LD: Tensor | None) -> bool:
        """The server's own output; None: it cannot compute these layers. False: it belongs to no trial."""
        if (trial := self._trials.get(number)) is None:
            return False
        trial.own_1LD = own_1LD
        self._answered(number, trial)
        return True

    def on_failed(self, name: str, number: int | None = None) -> bool:
        """A machine failed on a batch, or (None) could not load layers. False: it belongs to no trial and no measurement."""
        own = {one: trial for one, trial in self._trials.items() if trial.node.name == name and number in (None, one)}
        for one in own:
            self._conclude(one, own[one].node, "it could not compute the layers")
        measured = [one for one, found in self._measurements.items() if found.node.name == name and number in (None, one)]
        for one in measured:
            del self._measurements[one]
        return bool(own or measured)

    def on_removed(self, name: str) -> None:
        self._trials = {number: trial for number, trial in self._trials.items() if trial.node.name != name}
        self._measurements = {number: found for number, found in self._measurements.items() if found.node.name != name}

    def _answered(self, number: int, trial: Trial) -> None:
        trial.both += 1
        if trial.both < 2:
            return
        shown = f"the layers {trial.layers.first}–{trial.layers.last - 1}"
        if trial.own_1LD is None:
            self._conclude(number, trial.node, f"no other machine can compute {shown} to compare")
        elif trial.output_1LD is None or not agrees(trial.own_1LD, trial.output_1LD):
            self._conclude(number, trial.node, f"its output of {shown} is not that of this machine")
        else:
            self._conclude(number, trial.node, None)

    def _conclude(self, number: int, node: NodeState, problem: str | None) -> None:
        trial = self._trials.pop(number)
        if problem is None:
            first, last = trial.layers
            self.placement.tell(f"{node.name} may hold layers again: its output of the layers {first}–{last - 1} is this machine's")
            self.placement.admit(node)
            if node.name in self.suspicions:
                self.suspicions[node.name].cleared = True
            return
        self.suspect(node.name, trial.layers, problem)
        wait_s = self.suspicions[node.name].retry_at - self._clock()
        self.placement.tell(f"{node.name} stays out: {problem}; it is tried again in {wait_s:.0f} s")
