"""From Shoal's settings to DeepSpeed's own."""

from __future__ import annotations

import logging
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from shoal.config import Run
from shoal.config.schema.engine import DeepSpeed
from shoal.errors import ShoalError


def library(device: torch.device) -> Any:
    """DeepSpeed, for this device. Raises ShoalError where it is not installed."""
    if find_spec("deepspeed") is None:
        raise ShoalError("engine.kind deepspeed needs DeepSpeed: pip install 'shoal[deepspeed]'")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of calls that DeepSpeed makes
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it talks while it is imported
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


def zero_config(run: Run, size: int, limit: float | None) -> dict[str, Any]:
    """The configuration that `deepspeed.initialize` takes."""
    engine, accumulation = run.engine, run.training.gradient_accumulation_steps
    assert isinstance(engine, DeepSpeed)
    if engine.zero_stage == 0:
        raise ShoalError("engine.zero_stage: stage 0 shards nothing; that is the engine ddp")
    batch_size = run.training.batch_size or 1
    precision = run.training.precision.kind
    if engine.nvme_offload:
        _check_disk_access()
    return {
        "train_batch_size": batch_size * accumulation * size,
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": limit or 0.0,
        "zero_optimization": _zero(engine),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "torch_autocast": {"enabled": precision == "bf16", "dtype": "bfloat16"},
        "fp16": {"enabled": precision == "fp16"},
        "steps_per_print": 10**12,
    }


def _check_disk_access() -> None:
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False):
        raise ShoalError(
            "engine.nvme_offload: DeepSpeed needs libaio and a compiler for it, and they are not here (apt install libaio-dev)"
        )


def _zero(engine: DeepSpeed) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "stage": engine.zero_stage,
        "allgather_bucket_size": engine.allgather_bucket_size,
        "reduce_bucket_size": engine.reduce_bucket_size,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    offload = _offload(engine)
    if offload:
        settings["offload_optimizer"] = offload
    if engine.zero_stage == 3:
        settings |= {
            "stage3_prefetch_bucket_size": engine.stage3_prefetch_bucket_size,
            "stage3_param_persistence_threshold": engine.stage3_param_persistence_threshold,
            "stage3_max_live_parameters": engine.stage3_max_live_parameters,
        } | ({"offload_param": offload} if offload else {})
    return settings


def _offload(engine: DeepSpeed) -> dict[str, Any]:
    if engine.nvme_offload:
        return {"device": "nvme", "nvme_path": engine.nvme_path}
    return {"device": "cpu", "pin_memory": torch.cuda.is_available()} if engine.cpu_offload else {}
