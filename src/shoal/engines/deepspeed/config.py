"""DeepSpeed's configuration, derived from Shoal's settings."""

from __future__ import annotations

import logging
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from shoal.config import Run
from shoal.config.schema.engine import DeepSpeed
from shoal.errors import ShoalError

_BUFFER_MARGIN = 1 << 20
"""Elements: buffers are aligned."""
_GROUP, _GROUPS = 100_000_000, 8
"""`_GROUP`: elements per process that are read from or written to the disk at a time; `_GROUPS`: the number of groups that a small model
is cut into."""
_BUFFERS = 5
"""Number of buffers of the size of a group: parameters, gradients, and at most three vectors of optimizer state."""


class NvmeOffload(NamedTuple):
    """Where parameters and optimizer state are kept while they are not in use."""

    path: str
    largest: int
    """Elements of the largest parameter that a process holds."""
    all: int
    """Elements that the process holds in all."""


def library(device: torch.device) -> Any:
    """DeepSpeed, for this device. Raises ShoalError where it is not installed."""
    if find_spec("deepspeed") is None:
        raise ShoalError("engine.kind deepspeed needs DeepSpeed: pip install 'shoal[deepspeed]'")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # about calls inside DeepSpeed
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # DeepSpeed logs while it is imported
    import deepspeed

    backend: Any = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # it would be compiled at the first use, for minutes; gloo does without
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    found = deepspeed.accelerator.get_accelerator().device_name()
    logging.disable(disabled)
    if found.split(":")[0] != device.type:
        raise ShoalError(
            f"training.device is {device.type}, and DeepSpeed takes {found}: set DS_ACCELERATOR={device.type} in the environment"
        )
    return deepspeed


def zero_config(run: Run, size: int, limit: float | None, disk: NvmeOffload | None = None) -> dict[str, Any]:
    engine, accumulation = run.engine, run.training.gradient_accumulation_steps
    assert isinstance(engine, DeepSpeed)
    batch_size = run.training.batch_size or 1
    precision = run.training.precision.kind
    return {
        "train_batch_size": batch_size * accumulation * size,
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": limit or 0.0,
        "zero_optimization": _zero(engine, disk),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "torch_autocast": {"enabled": precision == "bf16", "dtype": "bfloat16"},
        "fp16": {"enabled": precision == "fp16"},
        "steps_per_print": 10**12,
    }


def _zero(engine: DeepSpeed, disk: NvmeOffload | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "stage": engine.zero_stage,
        "allgather_bucket_size": engine.allgather_bucket_size,
        "reduce_bucket_size": engine.reduce_bucket_size,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    offload = _offload(engine) if disk is None else {"device": "nvme", "nvme_path": disk.path}
    if offload:
        settings["offload_optimizer"] = offload
    if engine.zero_stage == 3:
        settings |= {
            "stage3_prefetch_bucket_size": engine.stage3_prefetch_bucket_size,
            "stage3_param_persistence_threshold": engine.stage3_param_persistence_threshold,
            "stage3_max_live_parameters": engine.stage3_max_live_parameters,
        } | ({"offload_param": offload} if offload else {})
    if disk is not None:
        settings["offload_param"] = offload | {"buffer_size": disk.largest + _BUFFER_MARGIN}
        settings["offload_optimizer"] = offload | {"buffer_count": _BUFFERS}
        settings["sub_group_size"] = min(_GROUP, disk.all // _GROUPS + 1)
    return settings


def _offload(engine: DeepSpeed) -> dict[str, Any]:
    return {"device": "cpu", "pin_memory": torch.cuda.is_available()} if engine.cpu_offload else {}
