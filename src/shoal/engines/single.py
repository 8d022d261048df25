"""One process, one device: batches → gradients → a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.config import Run
from shoal.config.schema.training import Training
from shoal.engines import optimizers
from shoal.engines.health import MOST_SKIPPED, HealthMonitor
from shoal.engines.schedule import learning_rate
from shoal.errors import ShoalError
from shoal.tasks import Batch, Loss, Task
from shoal.updates.layout import FlatNetwork, lay_out


class StepResult(NamedTuple):
    """Figures of a step. Tensors stay on the device until somebody reads them."""

    metrics: dict[str, Tensor]
    weight: int
    """Samples or tokens that counted."""
    samples: int


class SingleEngine:
    """Takes gradients of a task's losses and steps its networks."""

    def __init__(self, run: Run, task: Task, device: torch.device, total_steps: int) -> None:
        self.settings: Training = run.training
        self.task = task
        self.device = device
        self.total_steps = total_steps
        self.step_count = 0
        _prepare(run, task)
        for name, player in task.players.items():
            task.players[name] = player.to(device).train()
        self.vector, self.gradient, self.networks = lay_out(task.players)
        """All networks' weights, and their gradients, end to end."""
        self.statistics = [buffer for player in task.players.values() for buffer in _statistics(player)]
        if run.training.compile:
            task.compile()
        chosen = {name: optimizers.merged(run.training.optimizer, run.training.players.get(name)) for name in task.players}
        unknown = set(run.training.players) - set(task.players)
        if unknown:
            raise ShoalError(f"training.players: there is no network `{unknown.pop()}`; there are {', '.join(task.players)}")
        self.peaks = {name: settings.learning_rate for name, settings in chosen.items()}
        self.optimizers = {name: optimizers.build(chosen[name], network) for name, network in self.networks.items()}
        self.scaler = torch.amp.GradScaler(device.type, enabled=run.training.precision.kind == "fp16")
        self.health = HealthMonitor(run.training.gradient_health) if run.training.gradient_health.enabled else None
        self.track_gradients = run.logging.track_gradients

    # --- gradients ---------------------------------------------------------------------------------

    def gradients(self, batches: list[Batch]) -> StepResult:
        """The mean gradient over batches, weighted by what counts in each; it is left in each network's `gradient`."""
        result, shares = self._weigh(batches)
        for _ in self._in_turn(batches, shares, result.metrics):
            pass
        return result

    def gradients_by_sample(self, batches: list[Batch], limit: float) -> StepResult:
        """The mean of gradients taken sample by sample, none of them longer than `limit`: no sample can move it further than any other."""
        total, metrics = torch.zeros_like(self.gradient), dict[str, Tensor]()
        ones = [{name: value[i : i + 1] for name, value in batch.items()} for batch in batches for i in range(_length(batch))]
        for one in ones:
            result = self.gradients([one])
            self.unscale()
            norm = torch.linalg.vector_norm(self.gradient)
            total.add_(self.gradient * (limit / (norm + 1e-12)).clamp(max=1.0))
            for name, value in result.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value / len(ones)
        torch.div(total, len(ones), out=self.gradient)
        return StepResult(metrics, len(ones), len(ones))

    def _weigh(self, batches: list[Batch]) -> tuple[StepResult, list[float]]:
        counts = [self.task.count(batch) for batch in batches]
        total = max(1, sum(counts))
        return StepResult({}, total, sum(map(_length, batches))), [count / total for count in counts]

    def _in_turn(self, batches: list[Batch], shares: list[float], metrics: dict[str, Tensor]) -> Iterator[str]:
        """Network after network, each when its gradient over all batches is there.

        Whoever steps a network before asking for the next lets the next see the new weights, as GANs are trained best.
        """
        for network in self.networks.values():
            network.forget_gradients()
        losses = [self.task.losses(self.on_device(batch)) for batch in batches]
        while player := self._backward_next(losses, shares, metrics):
            self.networks[player].gather_gradients()
            yield player

    def _backward_next(self, losses: list[Iterator[Loss]], shares: list[float], metrics: dict[str, Tensor]) -> str:
        """Add up the gradients of every batch's next loss; the name of the network they are for, or nothing at the end."""
        player = ""
        for batch_losses, share in zip(losses, shares, strict=True):
            with self.precision():
                loss = next(batch_losses, None)
            if loss is None:
                return ""
            player = loss.player
            value = self.scaler.scale(loss.value if share == 1.0 else loss.value * share)
            if len(self.networks) == 1:
                value.backward()  # type: ignore[no-untyped-call]
            else:
                torch.autograd.backward(value, inputs=self.networks[player].parameters)
            for name, figure in loss.metrics.items():
                figure = figure.detach() * share
                metrics[name] = metrics[name] + figure if name in metrics else figure
        return player

    def precision(self) -> AbstractContextManager[Any]:
        kind = self.settings.precision.kind
        if kind == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16 if kind == "bf16" else torch.float16)

    def on_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    # --- steps -------------------------------------------------------------------------------------

    def step(self, batches: list[Batch]) -> StepResult:
        """One step of each network's optimizer, in the order of the task's losses."""
        result, shares = self._weigh(batches)
        for name in self._in_turn(batches, shares, result.metrics):
            self._step_network(name, self.step_count, result.metrics, self.scaler.is_enabled())
        self.scaler.update()
        self.step_count += 1
        return result

    def apply(self, gradient: Tensor, step: float) -> dict[str, Tensor]:
        """Step every network along a gradient that others took, as at this step of the schedule."""
        self.gradient.copy_(gradient)
        for network in self.networks.values():
            network.attach_gradients()
        return self.apply_own(step)

    def apply_own(self, step: float) -> dict[str, Tensor]:
        """Step every network along the gradient that is there."""
        metrics: dict[str, Tensor] = {}
        for name in self.networks:
            self._step_network(name, step, metrics, scaled=False)
        self.step_count += 1
        return metrics

    def forget_past(self) -> None:
        """Start the optimizers' memories over: a number in them that is not finite would stay for ever."""
        for optimizer in self.optimizers.values():
            optimizer.state.clear()

    def unscale(self) -> None:
        """Before a gradient is sent: undo the scaling that keeps half precision from losing small ones."""
        if self.scaler.is_enabled():
            for optimizer in self.optimizers.values():
                self.scaler.unscale_(optimizer)
            self.scaler.update()

    def _step_network(self, name: str, step: float, metrics: dict[str, Tensor], scaled: bool) -> None:
        network, optimizer = self.networks[name], self.optimizers[name]
        rate = learning_rate(self.settings.schedule, self.peaks[name], step, self.total_steps)
        rate *= self.health.learning_rate_scale if self.health else 1.0
        for group in optimizer.param_groups:
            group["lr"] = rate
        if scaled:
            self.scaler.unscale_(optimizer)
        if self._clip(name, network, metrics, scaled):
            self.scaler.step(optimizer) if scaled else optimizers.step(optimizer)

    def _clip(self, name: str, network: FlatNetwork, metrics: dict[str, Tensor], scaled: bool) -> bool:
        """Limit the norm of a gradient. False if the step must not be taken."""
        limit = self.settings.clipping.max_norm if self.settings.clipping.enabled else None
        if limit is None and self.health is None:
            return True
        norm = torch.linalg.vector_norm(network.gradient)
        metrics["gradient_norm" if len(self.networks) == 1 else f"{name}_gradient_norm"] = norm
        if self.health is not None:
            overflow = scaled and not math.isfinite(float(norm))
            if overflow:  # the loss scale was too high, not the gradient: the scaler skips the step and lowers it
                return True
            if not self.health.observe(float(norm)):
                if self.health.skipped_in_a_row > MOST_SKIPPED:
                    raise ShoalError(f"{MOST_SKIPPED} steps in a row had no finite gradient: lower the learning rate, or check the data")
                return False
            value = self.health.clip_value(self.step_count)
            limit = value if limit is None else min(limit, value)
        assert limit is not None
        network.gradient.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        return True

    def figures(self) -> dict[str, float]:
        """What to record besides the losses."""
        figures = self.learning_rates()
        if self.health:
            figures |= self.health.metrics()
        return figures | (self.layer_norms() if self.track_gradients else {})

    @property
    def skips_bad_steps(self) -> bool:
        return self.health is not None

    @property
    def size(self) -> int:
        return sum(network.layout.size for network in self.networks.values())

    def layer_norms(self) -> dict[str, float]:
        """The gradient norm of every parameter, by name."""
        several = len(self.networks) > 1
        return {
            f"gradients/{f'{player}.' if several else ''}{name}": float(torch.linalg.vector_norm(view))
            for player, network in self.networks.items()
            for name, view in network.layout.views(network.gradient)
        }

    def learning_rates(self) -> dict[str, float]:
        rates = {name: float(optimizer.param_groups[0]["lr"]) for name, optimizer in self.optimizers.items()}
        return (
            {"learning_rate": next(iter(rates.values()))}
            if len(rates) == 1
            else {f"{name}_learning_rate": rate for name, rate in rates.items()}
        )

    def evaluate(self, batches: Iterator[Batch]) -> dict[str, float]:
        """The task's judgement with dropout off and statistics fixed."""
        for player in self.task.players.values():
            player.eval()
        with self.precision():
            metrics = self.task.evaluate(self.on_device(batch) for batch in batches)
        for player in self.task.players.values():
            player.train()
        return metrics

    def finite(self) -> bool:
        return all(math.isfinite(float(network.vector.sum())) for network in self.networks.values())

    @property
    def buffers(self) -> Tensor:
        """Statistics that travel beside the weights, end to end: a copy."""
        there = [buffer.detach().float().flatten() for buffer in self.statistics]
        return torch.cat(there).cpu() if there else torch.empty(0)

    def load_buffers(self, values: Tensor) -> None:
        offset = 0
        for buffer in self.statistics:
            buffer.copy_(values[offset : offset + buffer.numel()].view_as(buffer))
            offset += buffer.numel()

    # --- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs besides the weights; tensors and plain values, nothing else."""
        return {
            "step": self.step_count,
            "kinds": self._kinds(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "scaler": self.scaler.state_dict(),
            "health": self.health.state_dict() if self.health else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step_count = state["step"]
        if state["kinds"] != self._kinds():
            raise ShoalError("the checkpoint was saved with another optimizer or precision; a run continues with the same ones")
        for name, optimizer in self.optimizers.items():
            wanted = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            optimizer.load_state_dict(state["optimizers"][name])
            for group, settings in zip(optimizer.param_groups, wanted, strict=True):
                group.update(settings)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        if self.health:
            self.health.load_state_dict(state["health"])

    def _kinds(self) -> dict[str, str]:
        return {name: type(optimizer).__name__ for name, optimizer in self.optimizers.items()} | {"scaler": str(self.scaler.is_enabled())}

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers of every network, named `player.parameter`."""
        return {f"{player}.{name}": value for player, module in self.task.players.items() for name, value in _tensors(module)}

    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        own = self.weights()
        wrong = sorted(set(own) ^ set(tensors)) or [name for name in own if own[name].shape != tensors[name].shape]
        if wrong:
            raise ShoalError(f"the checkpoint is of another model: `{wrong[0]}` does not fit")
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(tensors[name])


def _length(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    persistent = set(module.state_dict())
    yield from ((name, parameter) for name, parameter in module.named_parameters())
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def _statistics(module: nn.Module) -> Iterator[Tensor]:
    persistent = set(module.state_dict())
    yield from (buffer for name, buffer in module.named_buffers() if name in persistent and buffer.is_floating_point())


def _prepare(run: Run, task: Task) -> None:
    kind = run.training.precision.kind
    if kind in ("fp8", "nvfp4"):
        raise ShoalError(f"training.precision: {kind} is not built yet; bf16 and fp16 are")
    if not run.training.gradient_checkpointing:
        return
    for name, player in task.players.items():
        switch = getattr(player, "gradient_checkpointing", None)
        if not callable(switch):
            raise ShoalError(f"training.gradient_checkpointing: the {name} of kind {run.model.kind} has no blocks to recompute")
        switch(True)


def choose_device(wanted: str) -> torch.device:
    """The device that is asked for, or the best there is."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return torch.device(next(name for name, found in there.items() if found))
    if not there[wanted]:
        raise ShoalError(
            f"training.device: there is no {wanted} here; there is {', '.join(name for name, found in there.items() if found)}"
        )
    return torch.device(wanted)
