"""Base class of engines: weights of batches, gradients of each network in turn, learning-rate schedule, clipping, health checks,
evaluation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoal.config import Run
from shoal.config.schema.training import Ema, Training
from shoal.engines.batch_weights import BatchWeights, length
from shoal.engines.health import MOST_SKIPPED, HealthMonitor, LossCheck
from shoal.engines.optim import optimizers
from shoal.engines.optim.learning_rate import learning_rate
from shoal.engines.optim.user_optimizer import UserOptimizer
from shoal.engines.phase_times import PhaseTimes
from shoal.engines.precision.emulation import lower
from shoal.engines.precision.fp8 import ScaleHistory
from shoal.engines.weight_average import WeightAverage
from shoal.engines.world import World
from shoal.errors import ShoalError
from shoal.models.step_state import step_states
from shoal.tasks import Batch, Loss, StepResult, Task
from shoal.updates.layout import ParameterLayout


class Engine(ABC):
    """Takes gradients of a task's losses and steps its networks."""

    def __init__(self, run: Run, task: Task, device: torch.device, total_steps: int, world: World) -> None:
        self.settings: Training = run.training
        self.task = task
        if world.size > 1:
            task.join_processes(world.add_up)
        self.device = device
        self.total_steps = total_steps
        self.world = world
        self.step_count = 0
        _prepare(run, task)
        self.scales: ScaleHistory | None = lower(task.players, run.training, device)
        unknown = set(run.training.players) - set(task.players)
        if unknown:
            raise ShoalError(f"training.players: there is no network `{unknown.pop()}`; there are {', '.join(task.players)}")
        self.chosen = {name: optimizers.merged(run.training.optimizer, run.training.players.get(name)) for name in task.players}
        self.health = HealthMonitor(run.training.gradient_health) if run.training.gradient_health.enabled else None
        self.loss_check = LossCheck(world, device)
        self.phases = PhaseTimes(device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=False)
        self.track_gradients = run.logging.track_gradients
        self.layouts: dict[str, ParameterLayout] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.average: WeightAverage | None = None
        """The moving average of the weights, of a run that keeps one."""
        self._spare: Batch | None = None
        networks = [getattr(player, "trunk", player) for player in task.players.values()]
        self.notes = list(dict.fromkeys(note for one in networks if (note := str(getattr(one, "kept_layers", "")))))
        """What the engine decided, for the user."""
        self.statistics: list[Tensor] = []
        """BatchNorm's running figures, of networks that are whole in this process."""
        self.kept = [one for player in task.players.values() for one in step_states(player)]
        for one in self.kept:
            one.total, one.rank, one.ranks = world.add_up, world.rank, world.size

    def take_optimizer(self, own: UserOptimizer) -> None:
        """Step with the optimizer of the user's program."""
        origin = own.scheduler_from if own.optimizer is None else own.optimizer_from
        raise ShoalError(f"{origin} is for a whole model, and {type(self).__name__} cuts it: take the engine single or ddp")

    # --- what a subclass must implement --------------------------------------------------------------

    @abstractmethod
    def _forget(self) -> None:
        """Clear the gradients before the batches of a step."""

    @abstractmethod
    def _backward(self, value: Tensor, player: str, last: bool) -> None:
        """Add up a network's gradients. `last`: with this batch they are complete."""

    def _gather(self, player: str) -> None:
        """Called when a network's gradients are complete."""
        return

    def _norm(self, player: str) -> Tensor:
        """The norm of a network's whole gradient. An engine whose library clips does not need this method and the next."""
        raise NotImplementedError

    def _shrink(self, player: str, factor: Tensor) -> None:
        """Multiply a network's gradient."""
        raise NotImplementedError

    @abstractmethod
    def _slopes(self, player: str) -> Iterator[tuple[str, Tensor]]:
        """The whole gradient of every parameter, by name."""

    @abstractmethod
    def wholes(self) -> Iterator[Tensor]:
        """Every trained parameter, whole, in the order of `vector`. Where they are sharded, every process must go through all of them."""

    @abstractmethod
    def load_wholes(self, wholes: Iterable[Tensor]) -> None:
        """Set every trained parameter to a tensor of `wholes`, in that order."""

    @abstractmethod
    def apply(self, gradient: Tensor, step: float) -> dict[str, Tensor]:
        """Step every network along a gradient that others took, as at this step of the schedule."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers of every network, named `player.parameter`; of sharded ones this process's part, as a DTensor."""

    @abstractmethod
    def _load_weight(self, name: str, own: Tensor, value: Tensor) -> None:
        """Set a parameter or buffer of this engine to a whole tensor."""

    @abstractmethod
    def _moments(self, player: str) -> dict[str, Any]:
        """The optimizer's state by the parameters' names: see `optim/named_state.py`."""

    @abstractmethod
    def _load_moments(self, player: str, state: Mapping[str, Any]) -> None: ...

    def hold(self, network: nn.Module) -> nn.Module:
        """Keep a network that does not learn where the others are. All processes must use it together."""
        return network.to(self.device)

    @property
    def worker_world(self) -> World:
        """The processes that make up a worker: those that step together, unless each steps by itself."""
        return self.world

    def finish(self) -> None:
        """Release the networks, so that they can be used without this engine."""
        return

    # --- the flat view -----------------------------------------------------------------------------

    @property
    def vector(self) -> Tensor:
        """All networks' weights end to end. Where they are sharded, every process must ask, and all get the whole."""
        return torch.cat([whole.flatten() for whole in self.wholes()])

    @property
    def gradient(self) -> Tensor:
        """All networks' gradients end to end, as `vector` has the weights."""
        return torch.cat([slope.flatten() for slope in self.slopes()])

    def slopes(self) -> Iterator[Tensor]:
        """The gradients, as `wholes` gives the weights."""
        for player in self.layouts:
            for _, slope in self._slopes(player):
                yield slope

    # --- gradients ---------------------------------------------------------------------------------

    def gradients(self, batches: list[Batch]) -> StepResult:
        """The mean gradient over the batches of all processes, weighted by what counts in each; it is left in `gradient`."""
        weighing, metrics = self._weigh(batches), dict[str, Tensor]()
        self.phases.mark("forward_backward")
        for player in self._in_turn(batches, weighing, metrics):
            self._lead(player)
        self._end_step(metrics)
        self.phases.mark("")
        return StepResult(metrics, weighing.total, weighing.samples)

    def _lead(self, player: str) -> None:
        """Called between the gradients of two networks. An engine may move the first network to where its next weights are expected."""
        return

    def _weigh(self, batches: list[Batch]) -> BatchWeights:
        return BatchWeights([self.task.count(batch) for batch in batches], sum(map(length, batches)), self.world)

    def _in_turn(self, batches: list[Batch], weighing: BatchWeights, metrics: dict[str, Tensor]) -> Iterator[str]:
        """Yield the name of each network when its gradient over all batches is complete.

        A caller that steps a network before it asks for the next one lets the next one see the new weights, which trains GANs best.
        """
        self._begin_step()
        losses = [self.task.losses(self.on_device(self._filled(batch))) for batch in batches]
        while player := self._backward_next(losses, weighing, metrics):
            self._gather(player)
            yield player

    def _begin_step(self) -> None:
        self._forget()
        if self.scales is not None:
            self.scales.begin_step(self.step_count)
        for one in self.kept:
            one.begin_step()

    def _filled(self, batch: Batch) -> Batch:
        """An empty share of a small batch becomes a sample of weight 0: the other processes' collectives need this process."""
        if length(batch):
            self._spare = batch
            return batch
        if self._spare is None:
            raise ShoalError(f"there are fewer samples than processes ({self.world.size}): take more data, or fewer devices")
        return {name: value[:1] for name, value in self._spare.items()}

    def _backward_next(self, losses: list[Iterator[Loss]], weighing: BatchWeights, metrics: dict[str, Tensor]) -> str:
        """Add up the gradients of every batch's next loss. Returns the name of their network; empty after the last loss."""
        player = ""
        for number, batch_losses in enumerate(losses):
            for one in self.kept:
                one.counting = weighing.counts(number)
            with self.precision():
                loss = next(batch_losses, None)
            if loss is None:
                return ""
            player = loss.player
            self.loss_check.note(loss.value)
            if number == len(losses) - 1:
                self.loss_check.begin()
            share = weighing.share(number)
            value = self.scaler.scale(loss.value if share == 1.0 else loss.value * share)
            self._backward(value, player, number == len(losses) - 1)
            add_figures(metrics, loss.metrics.items(), share)
        return player

    def precision(self) -> AbstractContextManager[Any]:
        kind = self.settings.precision.kind
        if kind == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.float16 if kind == "fp16" else torch.bfloat16)

    def on_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    # --- steps -------------------------------------------------------------------------------------

    def step(self, batches: list[Batch]) -> StepResult:
        """One step of each network's optimizer, in the order of the task's losses. Raises NonFiniteLossError if `loss_check` is enabled."""
        weighing, metrics = self._weigh(batches), dict[str, Tensor]()
        self.phases.mark("forward_backward")
        for name in self._in_turn(batches, weighing, metrics):
            self.loss_check.expect_finite()
            self.phases.mark("optimizer")
            self._step_network(name, self.step_count, metrics, self.scaler.is_enabled())
            self.phases.mark("forward_backward")
        self.scaler.update()
        self.count_step()
        self._end_step(metrics)
        self._move_state()
        self.phases.mark("")
        return StepResult(metrics, weighing.total, weighing.samples)

    def take_steps(self, feed: Iterator[Batch], accumulation: int, most: int) -> tuple[StepResult, int]:
        """Take at least one step and at most `most`: the figures of all of them together, and their number."""
        with self.phases.on_host("data"):
            batches = [next(feed) for _ in range(accumulation)]
        return self.step(batches), 1

    def apply_own(self, step: float) -> dict[str, Tensor]:
        """Step every network along its current gradient."""
        metrics: dict[str, Tensor] = {}
        self.phases.mark("optimizer")
        for name in self.layouts:
            self._step_network(name, step, metrics, scaled=False)
        self.phases.mark("")
        self.count_step()
        self._move_state()
        return metrics

    def count_step(self) -> None:
        """The weights have been stepped."""
        self.step_count += 1
        if self.average is not None:
            self.average.update()

    def _end_step(self, metrics: dict[str, Tensor]) -> None:
        """Divide figures that all processes know by the number of processes, since figures are summed over processes later."""
        for one in self.kept:
            one.end_step()
            metrics |= {name: value / self.world.size for name, value in one.figures().items()}

    def _move_state(self) -> None:
        """Update the step state (neither trained nor averaged) from the statistics of the last gradients' batches."""
        for one in self.kept:
            one.move()

    def forget_past(self) -> None:
        """Reset the optimizers' states: a value in them that is not finite would never go away."""
        for optimizer in self.optimizers.values():
            optimizer.state.clear()

    def unscale(self) -> None:
        """Undo the loss scaling of half precision. Call this before a gradient is sent."""
        if self.scaler.is_enabled():
            for optimizer in self.optimizers.values():
                self.scaler.unscale_(optimizer)
            self.scaler.update()

    def rate(self, name: str, step: float) -> float:
        rate = learning_rate(self.settings.schedule, self.chosen[name].learning_rate, step, self.total_steps)
        return rate * (self.health.learning_rate_scale if self.health else 1.0)

    def _step_network(self, name: str, step: float, metrics: dict[str, Tensor], scaled: bool) -> None:
        optimizer = self.optimizers[name]
        self._set_rates(name, step)
        if scaled:
            self.scaler.unscale_(optimizer)
        self._clip_and_step(name, metrics, scaled)

    def _set_rates(self, name: str, step: float) -> None:
        rate = self.rate(name, step)
        for group in self.optimizers[name].param_groups:
            group["lr"] = rate

    def _clip_and_step(self, name: str, metrics: dict[str, Tensor], scaled: bool) -> None:
        if self._clip(name, metrics, scaled):
            optimizer = self.optimizers[name]
            self.scaler.step(optimizer) if scaled else optimizers.step(optimizer)

    def _clip(self, name: str, metrics: dict[str, Tensor], scaled: bool) -> bool:
        """Limit the norm of a gradient. Returns False if the step must be skipped."""
        limit = self.clip_limit()
        if limit is None:
            return True
        norm = self._norm(name)
        self._note_norm(name, norm, metrics)
        if self.health is not None:
            if scaled and not math.isfinite(
                float(norm)
            ):  # the loss scale was too high, not the gradient: the scaler skips the step and lowers it
                return True
            if not self.healthy(float(norm)):
                return False
        self._shrink(name, (limit / (norm + 1e-6)).clamp(max=1.0))
        return True

    def clip_limit(self) -> float | None:
        """The largest gradient norm allowed at this step; None: no limit."""
        limit = self.settings.clipping.max_norm if self.settings.clipping.enabled else None
        if self.health is None:
            return limit
        return self.health.clip_limit(self.step_count, limit)

    def healthy(self, norm: float) -> bool:
        """Whether a step with this gradient norm may be taken. Raises ShoalError after too many steps in a row that may not."""
        assert self.health is not None
        well = self.health.observe(norm)
        if self.health.skipped_in_a_row > MOST_SKIPPED:
            raise ShoalError(f"{MOST_SKIPPED} steps in a row had no finite gradient: lower the learning rate, or check the data")
        return well

    def _note_norm(self, name: str, norm: Tensor, metrics: dict[str, Tensor]) -> None:
        """Record a norm. All processes know the whole norm and metrics are summed over processes, so each adds its share."""
        figure = "gradient_norm" if len(self.layouts) == 1 else f"{name}_gradient_norm"
        metrics[figure] = norm if self.world.size == 1 else norm / self.world.size

    # --- what to record ----------------------------------------------------------------------------

    def figures(self) -> dict[str, float]:
        """Metrics to record besides the losses."""
        figures = self.learning_rates()
        if self.health:
            figures |= self.health.metrics()
        figures |= {name: float(value) for one in self.kept for name, value in one.details().items()}
        return figures | (self.layer_norms() if self.track_gradients else {})

    @property
    def size(self) -> int:
        return sum(layout.size for layout in self.layouts.values())

    def layer_norms(self) -> dict[str, float]:
        """The gradient norm of every parameter, by name; of a stack of experts' matrices also that of each."""
        several, norms = len(self.layouts) > 1, dict[str, float]()
        for player in self.layouts:
            stacks = optimizers.stack_names(self.task.players[player])
            for name, slope in self._slopes(player):
                full = f"gradients/{f'{player}.' if several else ''}{name}"
                norms[full] = float(torch.linalg.vector_norm(slope))
                if slope.ndim == 3 and name.rsplit(".", 1)[-1] in stacks:
                    norms |= {f"{full}/{i}": norm for i, norm in enumerate(torch.linalg.vector_norm(slope, dim=(1, 2)).tolist())}
        return norms

    def learning_rates(self) -> dict[str, float]:
        several, rates = len(self.optimizers) > 1, {name: one.param_groups[0]["lr"] for name, one in self.optimizers.items()}
        return {f"{name}_learning_rate" if several else "learning_rate": float(rate) for name, rate in rates.items()}

    def evaluate(self, batches: Iterator[Batch]) -> dict[str, float]:
        """The task's evaluation metrics, with dropout off and statistics fixed. Every process evaluates all batches, since sharded
        weights need all processes; the first process's result is used."""
        for player in self.task.players.values():
            player.train(self.task.evaluates_in_training_mode)
        try:
            with self.precision():
                metrics = self.task.evaluate(self.on_device(batch) for batch in batches)
        finally:
            for player in self.task.players.values():
                player.train()
        return dict(zip(metrics, self.world.broadcast_numbers(list(metrics.values())), strict=True))

    @abstractmethod
    def finite(self) -> bool: ...

    # --- the average of the weights ------------------------------------------------------------------

    def keep_average(self, settings: Ema) -> None:
        """Keep a moving average of the weights from now on, if the settings say so."""
        if settings.decay is not None:
            self.average = WeightAverage(settings, self._stepped())

    def _stepped(self) -> list[Tensor]:
        """The tensors that the optimizer of this process steps in place."""
        raise ShoalError(f"training.ema.decay: the engine {type(self).__name__} keeps no average of the weights")

    def _named_average(self, values: list[Tensor]) -> dict[str, Tensor]:
        """Averages of `_stepped` by the names of `weights`; of other processes' parameters placeholders, as in `_moments`."""
        raise NotImplementedError

    def _average_of(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        """The inverse of `_named_average`, from whole tensors."""
        raise NotImplementedError

    def changed(self) -> None:
        """Called after the weights were written to."""
        return

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """For the time of the block the networks have the average of the weights, if one is kept."""
        if self.average is None or not self.average.steps:
            yield
            return
        try:
            with self.average.in_place():
                self.changed()
                yield
        finally:
            self.changed()

    def averaged_weights(self) -> dict[str, Tensor]:
        """The weights to use and to export: as `weights`, with the average of the trained ones if one is kept."""
        weights = self.weights()
        if self.average is None or not self.average.steps:
            return weights
        return weights | {name: value for name, value in self._named_average(self.average.values).items() if not value.is_meta}

    # --- state -------------------------------------------------------------------------------------

    @property
    def buffers(self) -> Tensor:
        """The vector that the coordinator sends beside the weights: statistics, and step state that is neither trained nor averaged."""
        return _end_to_end(self._beside_weights)

    @property
    def _beside_weights(self) -> list[Tensor]:
        return [*self.statistics, *(value for one in self.kept for value in one.state())]

    def load_buffers(self, values: Tensor) -> None:
        """Load the result of another engine's `buffers`."""
        for place, value in zip(self._beside_weights, _like(self._beside_weights, values), strict=True):
            place.copy_(value)
        for one in self.kept:
            one.on_state_loaded()

    def take_report(self) -> Tensor:
        """The vector that a worker sends beside its update, of the same length as `buffers`: statistics, and by how much its steps since
        the last report would change the step state."""
        return _end_to_end([*self.statistics, *(value for one in self.kept for value in one.take_movement())])

    def follow_report(self, values: Tensor) -> None:
        """Apply the combined reports of workers."""
        parts = _like(self._beside_weights, values)
        for place in self.statistics:
            place.copy_(next(parts))
        for one in self.kept:
            one.apply_movement([next(parts).nan_to_num() for _ in one.state()])

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs besides the weights; tensors and plain values, nothing else. The same for every engine."""
        average, kept = self.average, dict[str, Any]()
        if average is not None and average.steps:
            kept["average"] = {"steps": average.steps, "weights": self._named_average(average.values)}
        return (
            kept
            | {
                "step": self.step_count,
                "kinds": self._kinds(),
                "optimizers": {name: self._moments(name) for name in self.layouts},
                "scaler": self.scaler.state_dict(),
                "health": self.health.state_dict() if self.health else {},
            }
            | ({"scales": self.scales.state_dict()} if self.scales else {})
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step_count = state["step"]
        if state["kinds"] != self._kinds():
            raise ShoalError("the checkpoint was saved with another optimizer or precision; a run continues with the same ones")
        for name in self.layouts:
            self._load_moments(name, state["optimizers"][name])
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if self.health:
            self.health.load_state_dict(state["health"])
        if self.scales is not None and "scales" in state:
            self.scales.load_state_dict(state["scales"])
        if self.average is not None and "average" in state:
            self.average.restore(state["average"]["steps"], self._average_of(state["average"]["weights"]))

    def gathered(self) -> dict[str, Any]:
        """Statistics collected for the next report, which neither the weights nor `state_dict` hold: saved in the middle of a round."""
        return {"kept": [one.pending() for one in self.kept]}

    def load_gathered(self, state: dict[str, Any]) -> None:
        for one, values in zip(self.kept, state["kept"], strict=True):
            one.load_pending([value.to(self.device) for value in values])

    def _kinds(self) -> dict[str, str]:
        return {name: settings.name for name, settings in self.chosen.items()} | {"scaler": str(self.settings.precision.kind == "fp16")}

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        own = self.weights()
        if own.keys() != tensors.keys():  # perhaps other layers trained: an engine may keep those of transformers
            from shoal.models.huggingface.as_gpt import named_as_in

            tensors = named_as_in(self.task.players, tensors)
        wrong = sorted(set(own) ^ set(tensors)) or [name for name in own if own[name].shape != tensors[name].shape]
        if wrong:
            raise ShoalError(f"the checkpoint is of another model: `{wrong[0]}` does not fit")
        with torch.no_grad():
            for name, value in own.items():
                self._load_weight(name, value, tensors[name])


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters, and the buffers that are saved with them."""
    persistent = set(module.state_dict())
    yield from ((name, parameter) for name, parameter in module.named_parameters())
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def add_figures(sums: dict[str, Tensor], figures: Iterable[tuple[str, Tensor]], share: float) -> None:
    """Add a batch's figures, times its share, to those of the batches before."""
    for name, figure in figures:
        figure = figure.detach() if share == 1.0 else figure.detach() * share
        sums[name] = sums[name] + figure if name in sums else figure


def _end_to_end(values: list[Tensor]) -> Tensor:
    return torch.cat([value.detach().float().flatten() for value in values]).cpu() if values else torch.empty(0)


def _like(places: list[Tensor], values: Tensor) -> Iterator[Tensor]:
    """A vector cut into tensors of the shapes of `places`."""
    for place, value in zip(places, torch.split(values, [place.numel() for place in places]), strict=True):
        yield value.view_as(place)


def _prepare(run: Run, task: Task) -> None:
    if not run.training.gradient_checkpointing:
        return
    for name, player in task.players.items():
        switch = getattr(player, "gradient_checkpointing", None)
        if not callable(switch):
            raise ShoalError(f"training.gradient_checkpointing: the {name} of kind {run.model.kind} has no blocks to recompute")
        switch(True)
