"""Engine of one process on one device: batches → gradients → a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.config import Run, environment
from shoal.engines.base import Engine, add_figures, tensors_of
from shoal.engines.batch_weights import BatchWeights, length
from shoal.engines.compile_choice import reason_to_compile
from shoal.engines.cuda_graph import PassRecorder
from shoal.engines.health import read_later
from shoal.engines.optim import named_state, optimizers
from shoal.engines.optim.adam_state import GradientClip
from shoal.engines.optim.flat_adam import FlatAdam
from shoal.engines.optim.user_optimizer import UserOptimizer, UserSteps
from shoal.engines.precision import fp8
from shoal.engines.world import World
from shoal.errors import ShoalError
from shoal.models.compile_rules import exclude_from_compilation
from shoal.models.step_state import step_states
from shoal.tasks import Batch, Loss, StepResult, Task
from shoal.updates.layout import flatten_networks


class SingleEngine(Engine):
    """Whole networks in this process: their weights are one vector, their gradients another."""

    in_sequence = True
    """Whether a batch's backward pass comes before the next batch's forward pass."""

    def __init__(
        self, run: Run, task: Task, device: torch.device, total_steps: int, world: World | None = None, *, learns: bool = False
    ) -> None:
        """`learns`: its networks are used through this engine alone until `finish`, so they may read rounded weights."""
        super().__init__(run, task, device, total_steps, world or World())
        for name, player in task.players.items():
            task.players[name] = player.to(device).train()
        self._vector, self._gradient, self.networks = flatten_networks(task.players)
        self._lent: Tensor | None = None
        """The gradient of this step, where it is not in `_gradient`: it must not be written to."""
        self.layouts = {name: network.layout for name, network in self.networks.items()}
        if learns and reads_rounded(run, device):
            for network in self.networks.values():
                if names := set(rounded_names(network.network)):
                    network.cast_shadow(names)  # renewed with every step, in place of rounding in every pass
        if device.type == "cpu" and self.in_sequence:
            for network in self.networks.values():
                network.offer_room()
        self.statistics = [buffer for player in task.players.values() for buffer in statistics(player)]
        gain = reason_to_compile(run, task, device, total_steps) if learns and run.training.compile == "auto" else ""
        if gain:
            self.notes.append(gain)
        if run.training.compile is True or gain:
            exclude_from_compilation()
            task.compile()
        self.optimizers = {name: optimizers.build(self.chosen[name], network) for name, network in self.networks.items()}
        self.scaler = torch.amp.GradScaler(device.type, enabled=run.training.precision.kind == "fp16")
        self.own: dict[str, UserSteps] = {}
        """By network: an optimizer or a scheduler that is not of the settings alone."""
        self._moves: dict[str, Tensor] = {}
        self._records = run.training.cuda_graph and learns
        self._recorder: PassRecorder | None = None
        """Made with the first step: a coordinator takes none."""

    def take_optimizer(self, own: UserOptimizer) -> None:
        for name, network in self.networks.items():
            if own.optimizer is not None:
                network.drop_shadow()  # the optimizer is given the parameters themselves
            made = self.own[name] = own.make(network.network, self.optimizers[name])
            self.optimizers[name] = made.optimizer
            if own.optimizer is not None:
                self.chosen[name] = self.chosen[name].replace(name=type(made.optimizer).__name__, learning_rate=made.peaks[0])

    @property
    def vector(self) -> Tensor:
        return self._vector

    @property
    def gradient(self) -> Tensor:
        for network in self.networks.values():
            network.gather_gradients()
        return self._gradient

    def finish(self) -> None:
        for network in self.networks.values():
            network.drop_shadow()

    def changed(self) -> None:
        """Called after `vector` was written to: the networks read it directly, or read a bf16 copy that has to be refreshed."""
        for network in self.networks.values():
            network.renew_shadow()

    def wholes(self) -> Iterator[Tensor]:
        return self._own()

    def _own(self) -> Iterator[Tensor]:
        for network in self.networks.values():
            for _, value in network.layout.views(network.vector):
                yield value

    def load_wholes(self, wholes: Iterable[Tensor]) -> None:
        for own, value in zip(self._own(), wholes, strict=True):
            own.copy_(value)
        self.changed()

    # --- gradients ---------------------------------------------------------------------------------

    def gradients_by_sample(self, batches: list[Batch], limit: float) -> StepResult:
        """The mean of gradients taken sample by sample, none of them longer than `limit`: no sample can move it further than any other."""
        total, metrics = torch.zeros_like(self.gradient), dict[str, Tensor]()
        ones = [{name: value[i : i + 1] for name, value in batch.items()} for batch in batches for i in range(length(batch))]
        for one in ones:
            result = self.gradients([one])
            self.unscale()
            norm = torch.linalg.vector_norm(self.gradient)
            total.add_(self.gradient * (limit / (norm + 1e-12)).clamp(max=1.0))
            for name, value in result.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value / len(ones)
        torch.div(total, len(ones), out=self.gradient)
        return StepResult(metrics, len(ones), len(ones))

    def expect(self, moved: Tensor) -> None:
        """Set the expected change of the weights by the next version. `gradients` then computes each network's gradient at the expected
        weights of the networks before it, which trains GANs best."""
        parts = torch.split(moved.to(self.vector), [network.vector.numel() for network in self.networks.values()])
        self._moves = dict(zip(self.networks, parts, strict=True))

    def gradients(self, batches: list[Batch]) -> StepResult:
        before = self.vector.clone() if self._moves else None
        try:
            return super().gradients(batches)
        finally:  # also where memory was too small for the next network
            if before is not None:
                self.vector.copy_(before)
                self.changed()

    def _in_turn(self, batches: list[Batch], weighing: BatchWeights, metrics: dict[str, Tensor]) -> Iterator[str]:
        if not self._records:
            yield from super()._in_turn(batches, weighing, metrics)
            return
        self._recorder = self._recorder or self._record()
        ((player, network),) = self.networks.items()
        self._begin_step()
        for number, batch in enumerate(batches):
            figures = dict(self._recorder.replay(batch, weighing.share(number)))
            if "loss" in figures:
                self.loss_check.note(figures["loss"])
            add_figures(metrics, figures.items(), 1.0)
            if number < len(batches) - 1:
                network.add_up_gradients()
        self._gather(player)
        yield player

    def _record(self) -> PassRecorder:
        """Let batches be recorded. Figures and gradients are those of the passes as they are taken otherwise."""
        if len(self.networks) > 1:
            raise ShoalError("training.cuda_graph records the passes of one network, and this task has several: set it to false")
        ((player, network),) = self.networks.items()

        def passes(batch: Batch) -> Loss:
            with self.precision():
                return next(iter(self.task.losses(batch)))

        return PassRecorder(
            network.parameters,
            passes,
            lambda value: self._backward(self.scaler.scale(value), player, last=True),
            self._begin_step,
        )

    def _lead(self, player: str) -> None:
        if player in self._moves:
            self.networks[player].vector.add_(self._moves[player])
            self.networks[player].renew_shadow()

    def _forget(self) -> None:
        for network in self.networks.values():
            network.forget_gradients()

    def _backward(self, value: Tensor, player: str, last: bool) -> None:
        if len(self.networks) == 1:
            value.backward()  # type: ignore[no-untyped-call]
        else:
            torch.autograd.backward(value, inputs=self.networks[player].parameters)
        if not last:
            self.networks[player].sum_gradients()

    def _gather(self, player: str) -> None:
        """Not where the optimizer reads the gradients where they are, unless there is a sum of several passes."""
        network = self.networks[player]
        if network.summed or self.scaler.is_enabled() or not isinstance(self.optimizers[player], FlatAdam):
            network.gather_gradients()

    def _norm(self, player: str) -> Tensor:
        optimizer = self.optimizers[player]
        if isinstance(optimizer, FlatAdam):
            return optimizer.norm()
        return torch.linalg.vector_norm(self.networks[player].gradient if self._lent is None else self._lent)

    def _shrink(self, player: str, factor: Tensor) -> None:
        own = self.networks[player].gradient
        if self.device.type == "cpu" and float(factor) == 1.0:
            return
        if self._lent is None:
            own.mul_(factor)
        else:
            torch.mul(self._lent, factor, out=own)
            _whole(self.optimizers[player]).grad = own

    def _slopes(self, player: str) -> Iterator[tuple[str, Tensor]]:
        network = self.networks[player]
        network.gather_gradients()
        return network.layout.views(network.gradient)

    # --- steps -------------------------------------------------------------------------------------

    def apply(self, gradient: Tensor, step: float, share: float = 1.0) -> dict[str, Tensor]:
        if share == 1 and self._reads_where_it_lies(gradient):
            return self._apply_lent(gradient, step)
        if share != 1:
            torch.mul(gradient, share, out=self._gradient)
        elif gradient is not self._gradient:
            self._gradient.copy_(gradient)
        for network in self.networks.values():
            network.attach_gradients()
        return self.apply_own(step)

    def _reads_where_it_lies(self, gradient: Tensor) -> bool:
        """Whether the optimizer can step along a gradient without a copy of it: it has one vector on the CPU, and only reads."""
        if gradient is self._gradient or len(self.networks) > 1 or self.track_gradients or self.own:
            return False
        (optimizer,) = self.optimizers.values()
        groups = optimizer.param_groups
        fused = len(groups) == 1 and len(groups[0]["params"]) == 1 and bool(groups[0].get("fused")) and not isinstance(optimizer, FlatAdam)
        return fused and gradient.dtype == self._gradient.dtype and gradient.device == self._gradient.device == torch.device("cpu")

    def _apply_lent(self, gradient: Tensor, step: float) -> dict[str, Tensor]:
        """`apply` for a gradient that is read where it lies: a copy takes as long as the step."""
        (optimizer,) = self.optimizers.values()
        whole = _whole(optimizer)
        own, whole.grad, self._lent = whole.grad, gradient, gradient
        try:
            return self.apply_own(step)
        finally:
            whole.grad, self._lent = own, None

    def _set_rates(self, name: str, step: float) -> None:
        if name in self.own:
            scale = self.health.learning_rate_scale if self.health else 1.0
            self.own[name].set_rates(self.settings.schedule, step, self.total_steps, scale)
        else:
            super()._set_rates(name, step)

    def _step_network(self, name: str, step: float, metrics: dict[str, Tensor], scaled: bool) -> None:
        super()._step_network(name, step, metrics, scaled)
        if name in self.own:
            self.own[name].stepped()
        if not isinstance(self.optimizers[name], FlatAdam):
            self.networks[name].renew_shadow()

    def _clip_and_step(self, name: str, metrics: dict[str, Tensor], scaled: bool) -> None:
        """The optimizer's own pass clips, and decides by itself about gradients that are not finite: so the GPU has the next step to do
        while this process waits for the norm of the last one."""
        optimizer, limit = self.optimizers[name], self.clip_limit()
        if scaled or limit is None or not isinstance(optimizer, FlatAdam):
            super()._clip_and_step(name, metrics, scaled)
            return
        norm = self._norm(name)
        self._note_norm(name, norm, metrics)
        read = read_later(norm) if self.health is not None else None
        optimizer.clip = GradientClip(norm, limit, skip=self.health is not None)
        optimizers.step(optimizer)
        if read is not None and not self.healthy(read()):
            optimizer.uncount()

    def finite(self) -> bool:
        return all(math.isfinite(float(network.vector.sum())) for network in self.networks.values())

    # --- state -------------------------------------------------------------------------------------

    def _agree_on_statistics(self) -> None:
        """BatchNorm's running figures: the mean over the processes. Not before all backward passes are done, which still need them."""
        if not self.statistics:
            return
        flat = torch.cat([buffer.detach().float().flatten() for buffer in self.statistics])
        dist.all_reduce(flat)
        for buffer, value in zip(self.statistics, torch.split(flat, [one.numel() for one in self.statistics]), strict=True):
            buffer.copy_((value / self.worker_world.size).view_as(buffer))

    def weights(self) -> dict[str, Tensor]:
        trained = dict(self._named_views(self._vector))
        named = {f"{player}.{name}": value for player, module in self.task.players.items() for name, value in tensors_of(module)}
        return {name: trained.get(name, value) for name, value in named.items()}

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_weights(tensors)
        self.changed()

    def _stepped(self) -> list[Tensor]:
        return [self._vector]

    def _named_average(self, values: list[Tensor]) -> dict[str, Tensor]:
        return dict(self._named_views(values[0]))

    def _average_of(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        average = torch.empty_like(self._vector)
        for name, view in self._named_views(average):
            view.copy_(named[name])
        return [average]

    def _named_views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The trained parameters in a vector of this process, by their names in `weights`."""
        parts = torch.split(vector, [network.vector.numel() for network in self.networks.values()])
        for (player, network), part in zip(self.networks.items(), parts, strict=True):
            yield from ((f"{player}.{name}", view) for name, view in network.layout.views(part))

    def _load_weight(self, name: str, own: Tensor, value: Tensor) -> None:
        own.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        schedulers = {name: own.state_dict() for name, own in self.own.items()}
        return super().state_dict() | ({"schedulers": schedulers} if schedulers else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name, own in self.own.items():
            own.load_state_dict(state["schedulers"][name])

    def _moments(self, player: str) -> dict[str, Any]:
        return named_state.of_flat(self.optimizers[player], self.networks[player])

    def _load_moments(self, player: str, state: Mapping[str, Any]) -> None:
        named_state.load_flat(self.optimizers[player], self.networks[player], state)


def build(run: Run, task: Task, device: torch.device, total_steps: int, world: World) -> SingleEngine:
    """The engine of a worker that is one process."""
    return SingleEngine(run, task, device, total_steps, learns=not task.learns_from_answers)


def statistics(module: nn.Module) -> Iterator[Tensor]:
    """The buffers whose mean over processes and workers is taken."""
    persistent = set(module.state_dict())
    others = {id(value) for one in step_states(module) for value in (*one.state(), *one.buffers(False))}
    for name, buffer in module.named_buffers():
        if name in persistent and buffer.is_floating_point() and id(buffer) not in others:
            yield buffer


def reads_rounded(run: Run, device: torch.device) -> bool:
    kind = run.training.precision.kind
    return device.type == "cuda" and (kind == "bf16" or (kind == "fp8" and fp8.is_real(device)))


def rounded_names(network: nn.Module) -> Iterator[str]:
    """The parameters that mixed precision rounds whenever they are used: those of linear layers, embeddings and experts, but not of
    routers.

    Networks of other libraries are left unchanged, since they may depend on the types of their weights.
    """
    if not hasattr(network, "output_weight"):
        return
    for prefix, module in network.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not getattr(module, "full_precision", False):
            yield from (f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False))
        yield from (f"{prefix}.{name}" for name in getattr(module, "per_expert", ()))


def choose_device(wanted: str, local_rank: int = 0) -> torch.device:
    """The device that is asked for, or the best one that is available; of several GPUs each process has its own."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        wanted = next(name for name, found in available.items() if found)
    if not available[wanted]:
        raise ShoalError(
            f"training.device: there is no {wanted} here; there is {', '.join(name for name, found in available.items() if found)}"
        )
    if wanted != "cuda" or not local_rank:
        return torch.device(wanted)
    if local_rank >= torch.cuda.device_count():
        raise ShoalError(f"process {local_rank + 1} of this machine has no GPU: there are {torch.cuda.device_count()}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a device: of the GPU, or of this machine. None where the system does not report them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return environment.free_memory()


def _whole(optimizer: torch.optim.Optimizer) -> Tensor:
    """The one vector that an optimizer steps."""
    whole: Tensor = optimizer.param_groups[0]["params"][0]
    return whole
