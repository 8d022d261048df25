"""Pipeline engine: the layers of one model are split into stages in several processes, and micro-batches keep all stages busy.

Every process reads the same batches, so only hidden states and their gradients are sent. Each process steps its own parameters with its own
optimizer. The vector, gradients and checkpoints have the names and the order of the whole model.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.config import Run
from shoal.config.schema.engine import Pipeline
from shoal.config.schema.training import EMULATED
from shoal.engines.base import Engine, add_figures, tensors_of
from shoal.engines.batch_weights import BatchWeights, SharedBatchWeights, length
from shoal.engines.optim import optimizers
from shoal.engines.pipeline.links import StageDirection, StageLinks
from shoal.engines.pipeline.schedule import PassSchedule
from shoal.engines.pipeline.split import bounds_for, layers_of
from shoal.engines.single import SingleEngine
from shoal.engines.world import World
from shoal.errors import ShoalError
from shoal.models.partial_model import PartialModel, partial_model
from shoal.models.split_model import layer_count
from shoal.models.step_state import step_states
from shoal.tasks import Batch, Task
from shoal.updates.layout import ParameterLayout, Slot

_PIECE = 1 << 22
"""Elements of one process that are broadcast at a time."""
_WORDS = 1 << 48


class PipelineEngine(SingleEngine):
    """Engine of one stage. Which stage is decided by the process's rank, or by the placement in `World.stage`."""

    in_sequence = False
    model: PartialModel

    def __init__(self, run: Run, task: Task, device: torch.device, total_steps: int, world: World) -> None:
        assert isinstance(run.engine, Pipeline)
        _check(run, task)
        self.pipeline = run.engine
        whole: Any = task.players["model"]
        self.stage, self._ranks, self.layers = world.stage, _ranks(world), layers_of(whole)
        self.bounds = bounds_for(run, self.layers, device, world)
        self.first_layer, last = self.bounds[self.stage : self.stage + 2]
        model = partial_model(whole, self.first_layer, last, layer_count(whole))
        model.tables = optimizers.tables_of(whole)  # type: ignore[assignment]
        task.players["model"] = model
        super().__init__(run, task, device, total_steps, world)
        self.model = model
        self._layers_kept = self.kept
        """What this stage's layers count; `step_states` is that of all layers, which every process has."""
        self.kept = [one.to(device) for one in step_states(whole)]
        for one in (*self.kept, *self._layers_kept):
            one.total, one.rank, one.ranks = (lambda values: values), 0, 1
        self._shapes = {f"model.{name}": value.shape for name, value in tensors_of(whole)}
        self.layouts = {"model": ParameterLayout((name, tuple(one.shape)) for name, one in whole.named_parameters() if one.requires_grad)}
        self._here = {slot.name: slot for slot in self.networks["model"].layout.slots}
        owners = {name: rank for rank, names in enumerate(world.texts("\n".join(self._here))) for name in names.split("\n")}
        self._pieces = list(_pieces(self.layouts["model"], owners))
        self._tied_name = next((name for name, one in whole.named_parameters() if one is model.tied), "")
        self.links = StageLinks(world, device, run.engine.timeout_s, self._ranks)
        self._figures: list[str] = []
        model.travel.receive = lambda: self.links.receive(StageDirection.ON)
        model.travel.send = self.links.send_ahead
        model.travel.share = self._of_last

    take_optimizer = Engine.take_optimizer  # refuses: a stage has some of the layers

    # --- gradients ---------------------------------------------------------------------------------

    def micro_batches(self, batches: list[Batch]) -> list[Batch]:
        """The batches of a step, each cut into parts of nearly the same size."""
        found = []
        for batch in batches:
            parts = min(self.pipeline.micro_batches, length(batch))
            cut = {name: torch.tensor_split(value, parts) for name, value in batch.items()}
            found += [{name: values[i] for name, values in cut.items()} for i in range(parts)]
        return found

    def _weigh(self, batches: list[Batch]) -> BatchWeights:
        counts = [self.task.count(batch) for batch in self.micro_batches(batches)]
        word = int(torch.randint(_WORDS, ())) if self.world.first else 0
        return SharedBatchWeights(counts, sum(map(length, batches)), self.world, word)

    def _in_turn(self, batches: list[Batch], weighing: BatchWeights, metrics: dict[str, Tensor]) -> Iterator[str]:
        assert isinstance(weighing, SharedBatchWeights)
        self._forget()
        for one in (*self.kept, *self._layers_kept):
            one.begin_step()
        on_gpu = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=on_gpu):  # each pass has random numbers of its own
            StagePasses(self, self.micro_batches(batches), weighing, metrics).run()
        self.loss_check.begin()
        for one, part in zip(self.kept, self._layers_kept, strict=True):
            one.merge_layers(part, self.add_up)
        self._name_alike(metrics)
        self._gather("model")
        yield "model"

    def _forget(self) -> None:
        super()._forget()
        if self.model.tied is not None:
            self.model.tied.grad = None

    def _name_alike(self, metrics: dict[str, Tensor]) -> None:
        """Give all processes the same metric names: metrics of other processes are 0 here, so that the sums are right."""
        if self.world.any(not set(metrics) <= set(self._figures)):
            own = self.world.texts("\n".join(metrics))
            self._figures = list(dict.fromkeys(name for names in reversed(own) for name in names.split("\n") if name))
        here = dict(metrics)
        metrics.clear()
        metrics |= {name: here[name].float() if name in here else torch.zeros((), device=self.device) for name in self._figures}

    def _gather(self, player: str) -> None:
        self._add_up_tied()
        self.networks[player].gather_gradients()
        if self.scaler.is_enabled() and self.world.any(not bool(self.networks[player].gradient.isfinite().all())):
            self.networks[player].gradient.fill_(torch.inf)  # a step is skipped by all or by none

    def _norm(self, player: str) -> Tensor:
        return self.add_up(torch.linalg.vector_norm(self.networks[player].gradient).double().square()).sqrt().float()

    def _step_network(self, name: str, step: float, metrics: dict[str, Tensor], scaled: bool) -> None:
        super()._step_network(name, step, metrics, scaled)
        self._hand_over_tied()

    def finite(self) -> bool:
        return not self.world.any(not super().finite())

    # --- a matrix that the first and the last stage use -----------------------------------------------

    def _add_up_tied(self) -> None:
        """Add the last stage's gradient of the output matrix to the gradient of the first stage's embedding."""
        tied = self.model.tied
        if tied is None:
            return
        here = torch.zeros_like(tied) if tied.grad is None else tied.grad
        if self.model.begins:
            tied.grad = here + self._from(self._ranks[-1], here)
        else:
            self._to(self._ranks[0], here)
            tied.grad = None

    def _hand_over_tied(self) -> None:
        """Send the tied matrix from the first stage, which stepped it, to the last stage."""
        tied = self.model.tied
        if tied is None:
            return
        with torch.no_grad():
            if self.model.begins:
                self._to(self._ranks[-1], tied.detach())
            else:
                tied.copy_(self._from(self._ranks[0], tied.detach()))

    # --- between processes -----------------------------------------------------------------------------

    def _out(self, values: Tensor) -> Tensor:
        """A tensor as it is sent between processes: unchanged on GPUs, otherwise in main memory."""
        return values.contiguous() if self.device.type == "cuda" else values.contiguous().cpu()

    def _to(self, rank: int, values: Tensor) -> None:
        dist.send(self._out(values), rank)

    def _from(self, rank: int, like: Tensor) -> Tensor:
        found = torch.empty_like(self._out(like))
        dist.recv(found, rank)
        return found.to(self.device)

    def _of_last(self, values: Tensor) -> Tensor:
        """The last stage's tensor, in all processes."""
        if self.world.size == 1:
            return values
        found = self._out(values)
        dist.broadcast(found, self._ranks[-1])
        return found.to(self.device)

    def add_up(self, values: Tensor) -> Tensor:
        return self.world.add_up(self._out(values)).to(self.device)

    # --- the flat view -----------------------------------------------------------------------------

    # Those of all stages, not those of this process alone
    vector = Engine.vector
    gradient = Engine.gradient

    def wholes(self) -> Iterator[Tensor]:
        for _, value in self._handed_round(self.networks["model"].vector):
            yield value

    def _slopes(self, player: str) -> Iterator[tuple[str, Tensor]]:
        return self._handed_round(self.networks[player].gradient)

    def _handed_round(self, own: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield every process's part of a vector, in the order of the whole model. All processes must iterate to the end."""
        for owner, slots in self._pieces:
            size = sum(slot.size for slot in slots)
            if owner == self.world.rank:
                at = self._here[slots[0].name].offset
                piece = self._out(own[at : at + size])
            else:
                piece = torch.empty(size, dtype=own.dtype, device=self.device if self.device.type == "cuda" else "cpu")
            if self.world.size > 1:
                dist.broadcast(piece, owner)
            for slot, value in zip(slots, torch.split(piece, [slot.size for slot in slots]), strict=True):
                yield slot.name, value.view(slot.shape)

    def load_wholes(self, wholes: Iterable[Tensor]) -> None:
        own = dict(self.networks["model"].layout.views(self.networks["model"].vector))
        if self.model.tied is not None:
            own.setdefault(self._tied_name, self.model.tied)
        with torch.no_grad():
            for slot, value in zip(self.layouts["model"].slots, wholes, strict=True):
                if slot.name in own:
                    own[slot.name].copy_(value)

    def apply(self, gradient: Tensor, step: float, share: float = 1.0) -> dict[str, Tensor]:
        network = self.networks["model"]
        own = dict(network.layout.views(network.gradient))
        for name, value in self.layouts["model"].views(gradient):
            if name in own:
                own[name].copy_(value * share)
        network.attach_gradients()
        return self.apply_own(step)

    # --- judging -----------------------------------------------------------------------------------

    def evaluate(self, batches: Iterator[Batch]) -> dict[str, float]:
        """The task's evaluation metrics, computed by the last stage. All stages go through all batches."""
        self.model.eval()
        self.model.travel.receive = lambda: self.links.receive(StageDirection.ON)
        with self.precision():
            metrics = self.task.evaluate(map(self.on_device, batches)) if self.model.ends else self._pass_on(batches)
        self.links.settle()
        self.model.train()
        return json.loads(self.world.texts(json.dumps(metrics))[self._ranks[-1]])

    @torch.no_grad()
    def _pass_on(self, batches: Iterator[Batch]) -> dict[str, float]:
        for batch in map(self.on_device, batches):
            self.links.send_ahead(self.stream(batch)[0])
        return {}

    def stream(self, batch: Batch) -> tuple[Tensor, Any]:
        """A batch's hidden states after this stage, and the auxiliary outputs of its layers."""
        task: Any = self.task
        keywords = task.beside_tokens(batch)
        return self.model.through(batch["input_ids"], **keywords), keywords.get("beside")

    # --- state -------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        return {f"model.{name}": value for name, value in self.model.saved()}

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        wrong = sorted(set(self._shapes) ^ set(tensors)) or [name for name in self.weights() if self._shapes[name] != tensors[name].shape]
        if wrong:
            raise ShoalError(f"the checkpoint is of another model: `{wrong[0]}` does not fit")
        with torch.no_grad():
            for name, value in self.weights().items():
                value.copy_(tensors[name])
            if self.model.tied is not None:
                self.model.tied.copy_(tensors[f"model.{self._tied_name}"])

    def changed(self) -> None:
        super().changed()
        self._hand_over_tied()

    def _named_average(self, values: list[Tensor]) -> dict[str, Tensor]:
        here = super()._named_average(values)
        others = {f"model.{slot.name}": slot.shape for slot in self.layouts["model"].slots}
        return {name: here[name] if name in here else torch.empty(shape, device="meta") for name, shape in others.items()}

    def _moments(self, player: str) -> dict[str, Any]:
        """The optimizer state of this process's parameters, with placeholders for those of other processes, which write them."""
        state = super()._moments(player)
        shapes = {name: {key: list(value.shape) for key, value in own.items()} for name, own in state["moments"].items()}
        every = {name: keys for text in self.world.texts(json.dumps(shapes)) for name, keys in json.loads(text).items()}
        moments = {name: {key: torch.empty(shape, device="meta") for key, shape in keys.items()} for name, keys in every.items()}
        moments |= state["moments"]
        state["moments"] = {slot.name: moments[slot.name] for slot in self.layouts[player].slots}
        return state


class MicroBatchInFlight(NamedTuple):
    """A micro-batch between its forward and its backward pass."""

    given: Tensor | None
    outputs: list[Tensor]
    """What the backward pass begins with: the stream that went on, and losses of this stage."""


class StagePasses:
    """All micro-batches of one step through one stage, forward and backward."""

    def __init__(self, engine: PipelineEngine, batches: list[Batch], weighing: SharedBatchWeights, metrics: dict[str, Tensor]) -> None:
        self.engine, self.model, self.links = engine, engine.model, engine.links
        self.batches, self.weighing, self.metrics = batches, weighing, metrics
        self.turns = PassSchedule(engine.stage, engine.world.size, len(batches), engine.pipeline.schedule)
        self.arrived: dict[StageDirection, deque[Tensor]] = {direction: deque() for direction in StageDirection}
        self.under_way: dict[int, MicroBatchInFlight] = {}

    def run(self) -> None:
        turns, count = self.turns, len(self.batches)
        expected = {StageDirection.ON: 0 if turns.first else count, StageDirection.BACK: 0 if turns.last else count}
        with self.links.listening(expected):
            while not turns.done:
                while self.links.waiting:
                    self._take()
                turn = turns.next()
                if turn is None:
                    self._take()
                    continue
                self._seed(turn.micro_batch)
                self._forward(turn.micro_batch) if turn.forward else self._backward(turn.micro_batch)

    def _take(self) -> None:
        direction, tensor = self.links.next()
        self.arrived[direction].append(tensor)
        if direction is StageDirection.ON:
            self.turns.inputs += 1
        else:
            self.turns.gradients += 1

    def _seed(self, number: int) -> None:
        """Seed the random numbers of a pass. They depend on the step, the micro-batch and the layer, but not on the process. A backward
        pass that recomputes activations draws the same numbers."""
        start = (self.weighing.word * len(self.batches) + number) * 8191

        def seed(layer: int) -> None:
            torch.manual_seed((start + layer + 1) % (1 << 63))

        self.model.before_layer = seed

    def _forward(self, number: int) -> None:
        engine, batch = self.engine, self.engine.on_device(self.batches[number])
        given = None if self.turns.first else self.arrived[StageDirection.ON].popleft().requires_grad_()
        if given is not None:
            self.model.travel.receive = lambda: given
        for one in engine._layers_kept:
            one.counting = self.weighing.counts(number)
        with engine.precision():
            outputs = [*self._judged(batch, number)] if self.turns.last else [*self._passed_on(batch, number)]
        self.under_way[number] = MicroBatchInFlight(given, outputs)

    def _judged(self, batch: Batch, number: int) -> Iterator[Tensor]:
        loss = next(self.engine.task.losses(batch))
        self.engine.loss_check.note(loss.value)
        yield self._weighed(loss.value, loss.metrics, number)

    def _passed_on(self, batch: Batch, number: int) -> Iterator[Tensor]:
        x_BLD, beside = self.engine.stream(batch)
        self.links.send(StageDirection.ON, x_BLD)
        yield x_BLD
        if beside is None:
            return
        total = sum((weight * value for _, weight, value in beside.losses), torch.zeros((), device=x_BLD.device))
        figures = {name: value for name, _, value in beside.losses} | beside.figures
        weighed = self._weighed(total, figures, number)
        if weighed.requires_grad:
            yield weighed

    def _weighed(self, value: Tensor, figures: dict[str, Tensor], number: int) -> Tensor:
        """A loss as it counts in the step; its figures are noted."""
        share = self.weighing.share(number)
        add_figures(self.metrics, figures.items(), share)
        return self.engine.scaler.scale(value * share)

    def _backward(self, number: int) -> None:
        given, outputs = self.under_way.pop(number)
        slopes: list[Tensor | None] = [None] * len(outputs)
        if not self.turns.last:
            slopes[0] = self.arrived[StageDirection.BACK].popleft()
        torch.autograd.backward(outputs, slopes)
        if given is not None:
            assert given.grad is not None
            self.links.send(StageDirection.BACK, given.grad)


def _ranks(world: World) -> list[int]:
    """Which process has which stage, in the order of the stages."""
    stages = [int(text) for text in world.texts(str(world.stage))]
    return sorted(range(world.size), key=lambda rank: stages[rank])


def _check(run: Run, task: Task) -> None:
    """Refuse what a pipeline cannot do. Raises ShoalError."""
    if list(task.players) != ["model"] or not hasattr(task, "beside_tokens"):
        raise ShoalError(f"engine.kind: pipeline learns language modelling, and the task is {run.chosen_task.kind}: take another engine")
    if run.training.compile is True:
        raise ShoalError("training.compile: the stages of a pipeline are not compiled: set it to false")
    if run.training.precision.kind in EMULATED:
        raise ShoalError(f"training.precision.kind: a pipeline does not emulate {run.training.precision.kind}: take bf16, fp16 or fp32")


def _pieces(layout: ParameterLayout, owners: Mapping[str, int]) -> Iterator[tuple[int, list[Slot]]]:
    """A process, and neighbouring parameters that it has, as many as make a piece."""
    slots: list[Slot] = []
    for slot in layout.slots:
        if slots and (owners[slot.name] != owners[slots[0].name] or sum(one.size for one in slots) >= _PIECE):
            yield owners[slots[0].name], slots
            slots = []
        slots.append(slot)
    if slots:
        yield owners[slots[0].name], slots
