"""One network under DeepSpeed's ZeRO, which keeps its shards, reduces gradients and clips them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shoal.config import Run
from shoal.config.schema.engine import DeepSpeed
from shoal.config.schema.training import TorchOptimizer
from shoal.engines.base import tensors_of
from shoal.engines.deepspeed.config import NvmeOffload, zero_config
from shoal.engines.deepspeed.disk import DiskWindow, ScratchFolder
from shoal.engines.optim import named_state as moments
from shoal.engines.optim import optimizers
from shoal.engines.shards import TensorCut
from shoal.engines.world import World
from shoal.errors import ShoalError
from shoal.updates.layout import ParameterLayout

_OPEN = ("vocab_size", "max_seq_len", "memory", "new_beside", "new_cache", "has_adapters", "without_adapters")
"""Attributes that may be read from a network whose parameters are sharded."""


class ZeroNetwork:
    """Reads and writes whole values by the parameters' names. Methods that every process must call together say so."""

    def __init__(
        self, library: Any, model: nn.Module, settings: TorchOptimizer, run: Run, limit: float | None, world: World, mesh: DeviceMesh
    ) -> None:
        assert isinstance(run.engine, DeepSpeed)
        self.library, self.model, self.world, self.mesh = library, model, world, mesh
        self.device = next(model.parameters()).device
        self.stage = run.engine.zero_stage
        self.scratch = ScratchFolder(run.engine.nvme_path) if run.engine.nvme_offload else None
        self.trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.layout = ParameterLayout((name, tuple(parameter.shape)) for name, parameter in self.trained.items())
        self.zero = self._initialise(settings, run, limit)
        self.optimizer: torch.optim.Optimizer = self.zero.optimizer.optimizer
        self.window = DiskWindow(self.zero.optimizer)

    def _initialise(self, settings: TorchOptimizer, run: Run, limit: float | None) -> Any:
        if settings.name in optimizers.SHAPED:
            raise ShoalError(
                f"training.optimizer.name: {settings.name} looks at whole matrices, and ZeRO cuts them: take AdamW, or the engine ddp"
            )
        optimizer = optimizers.make(settings, list(self.trained.values()))
        sizes = [parameter.numel() // self.world.size for parameter in self.model.parameters()]
        disk = NvmeOffload(self.scratch.path, max(sizes), sum(sizes)) if self.scratch is not None else None
        config = zero_config(run, self.world.size, limit, disk)
        zero, *_ = self.library.initialize(model=self.model, optimizer=optimizer, config=config, dist_init_required=False)
        return zero

    # --- gradients ---------------------------------------------------------------------------------

    def forget(self) -> None:
        """Clear the gradients, and DeepSpeed's accumulation, which otherwise ends only with its own step."""
        inner = self.zero.optimizer
        inner.zero_grad()
        inner.micro_step_id = 0 if self.stage == 3 else -1  # counts up to 0 when the gradients come

    def backward(self, value: Tensor, last: bool) -> None:
        """Backward pass. DeepSpeed averages over the processes; the loss is scaled so that the result is the sum."""
        self.window.close()
        self.zero.set_gradient_accumulation_boundary(last)
        self.zero.backward(value * self.world.size, scale_wrt_gas=False)
        if not last:
            self.zero.step()  # counts the batch

    def norm(self) -> Tensor:
        return torch.tensor(float(self.zero.get_global_grad_norm()), device=self.device)

    def whole_gradient(self, name: str) -> Tensor:
        """The whole gradient of a parameter. Every process must call this."""
        self.window.show(self.trained[name])
        gradient: Tensor | None = self.library.utils.safe_get_full_grad(self.trained[name])
        if gradient is None:
            raise ShoalError("logging.track_gradients: DeepSpeed gives gradients up with each step; the engines ddp and fsdp keep them")
        return gradient

    def set_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        utils = self.library.utils
        if self.stage < 3:
            utils.safe_set_full_grad(parameter, value)
            return
        self.window.show(parameter)
        utils.safe_set_local_grad(parameter, self._own_part(parameter, value))

    def step(self, rate: float, limit: float | None) -> None:
        """Take a step. DeepSpeed clips by the norm that it computes, and skips a step whose gradient is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.zero.optimizer.clip_grad = limit or 0.0
        self.window.close()
        self.zero.step()

    # --- weights -----------------------------------------------------------------------------------

    def master(self, parameter: nn.Parameter) -> Tensor:
        """The whole parameter, gathered from all processes. Every process must call this."""
        if parameter.requires_grad:
            return self._get(parameter, None)
        if self.stage < 3:
            return parameter.detach()
        with self.library.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def _part(self, whole: Tensor) -> Tensor:
        cut = TensorCut(self.mesh)
        return cut.as_shard(cut.part_of(whole).clone(), whole.shape) if whole.dim() else whole

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers; of parameters this process's part."""
        for name, value in tensors_of(self.model):
            yield name, self._part(self.master(value)) if isinstance(value, nn.Parameter) else value

    def replace(self, tensor: Tensor, value: Tensor) -> None:
        if self.stage < 3 or not isinstance(tensor, nn.Parameter):
            tensor.copy_(value)
        else:
            with self.library.zero.GatheredParameters([tensor], modifier_rank=0):
                tensor.copy_(value)
        if tensor.requires_grad:
            self._set(tensor, value, None)

    def _get(self, parameter: Any, key: str | None) -> Tensor:
        """A whole parameter (key None), or what the optimizer keeps for it. Parts of stage 3 are put together here, in full precision."""
        utils = self.library.utils
        if self.stage < 3:
            return utils.safe_get_full_optimizer_state(parameter, key) if key else utils.safe_get_full_fp32_param(parameter)
        self.window.show(parameter)
        part = utils.safe_get_local_optimizer_state(parameter, key) if key else utils.safe_get_local_fp32_param(parameter)
        part = part.to(self.device).contiguous()
        parts = [torch.empty_like(part) for _ in range(self.world.size)]
        dist.all_gather(parts, part)
        return torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)

    def _set(self, parameter: Tensor, value: Tensor, key: str | None) -> None:
        """Take over this process's part of a whole parameter (key None), or of what the optimizer keeps for it."""
        utils = self.library.utils
        if self.stage < 3:
            whole = value.to(self.device)
            utils.safe_set_full_optimizer_state(parameter, whole, key) if key else utils.safe_set_full_fp32_param(parameter, whole)
            return
        part = self._own_part(parameter, value)
        self.window.show(parameter)
        utils.safe_set_local_optimizer_state(parameter, part, key) if key else utils.safe_set_local_fp32_param(parameter, part)

    def _own_part(self, parameter: Any, whole: Tensor) -> Tensor:
        """What this process holds of a parameter's values at stage 3: the last one's part is filled up."""
        length = parameter.ds_tensor.numel()
        padded = nn.functional.pad(whole.flatten(), (0, length * self.world.size - whole.numel()))
        return padded[self.world.rank * length : (self.world.rank + 1) * length].to(self.device)

    # --- the optimizer's state ---------------------------------------------------------------------

    def forget_past(self) -> None:
        self.window.close()
        self.optimizer.state.clear()
        if self.scratch is not None:
            self.zero.optimizer.optimizer_swapper.purge_state()

    def moments(self) -> dict[str, Any]:
        first: dict[str, Any] = next(iter(self.optimizer.state.values()), {})
        long = [key for key, value in first.items() if isinstance(value, Tensor) and value.dim()]
        found = {name: {key: self._part(self._get(parameter, key)) for key in long} for name, parameter in self.trained.items()}
        return moments.packed({key: value for key, value in first.items() if key not in long}, found, self.optimizer)

    def load_moments(self, state: Mapping[str, Any]) -> None:
        keys: list[str] = list(next(iter(state["moments"].values()), {}))
        self._make_room(keys, state["shared"])
        for name, parameter in self.trained.items():
            for key in keys:
                self._set(parameter, state["moments"][name][key], key)

    def _make_room(self, keys: list[str], shared: Mapping[str, Any]) -> None:
        """The state that the optimizer would make at its first step, for each of the vectors that it steps here."""
        if not keys and not shared:
            return
        self.forget_past()
        inner = self.zero.optimizer
        for number, part in enumerate(inner.single_partition_of_fp32_groups if self.stage < 3 else inner.fp32_partitioned_groups_flat):
            self.window.show_group(number)
            zeros: dict[str, Any] = {key: torch.zeros_like(part) for key in keys}
            inner.optimizer.state[part] = zeros | moments.copied(shared)
        if self.stage < 3:
            inner._lazy_init_hp_params_optimizer_state()


class TaskModule(nn.Module):
    """DeepSpeed's engine in the network's place: `forward` goes through it, everything else to the network, as long as it is whole."""

    def __init__(self, zero: Any, model: nn.Module, whole: bool) -> None:
        super().__init__()
        self.__dict__ |= {"zero": zero, "model": model, "whole": whole}

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.zero(*arguments, **keywords)

    def next_logits(self, input_ids: Tensor, cache: Any, **keywords: Any) -> Tensor:
        """Logits of the token after these. Where parameters are sharded, all processes must ask together."""
        if self.whole:
            return self.model.next_logits(input_ids, cache, **keywords)
        return self.zero(input_ids, cache=cache, **keywords)[:, -1]

    def train(self, mode: bool = True) -> TaskModule:
        self.zero.train(mode)
        return self

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """The modules of the network: code that switches dropout off needs to find them."""
        return self.model.modules(remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.model.parameters(recurse)

    def __getattr__(self, name: str) -> Any:
        if self.__dict__["whole"] or name in _OPEN:
            return getattr(self.__dict__["model"], name)
        raise AttributeError(f"{name}: its parameters are sharded")
