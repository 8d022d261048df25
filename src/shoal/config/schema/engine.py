"""Engines: how one worker computes, on one device or on several."""

from typing import ClassVar, Literal

from shoal.config.fields import NonNegativeInt, PositiveFloat, PositiveInt
from shoal.config.parts import Part


class Engine(Part, noun="engine"):
    """How one worker computes updates on its devices. Built by a function of the run, the task, the device, the number of steps and the
    worker's processes."""

    several_processes: ClassVar[bool] = True
    """Whether a worker has several processes, one per device."""
    reads_whole_batches: ClassVar[bool] = False
    """Whether every process reads whole batches; otherwise each reads its part."""

    experts: tuple[NonNegativeInt, ...] | None = None
    """Experts of a mixture that this worker holds, if not all fit its memory: `shoal join … --set 'engine.experts=[0,1,2,3]'`.

    The worker computes and exchanges only these and the layers that all workers share. null: all experts.
    """


class Single(Engine, built_by="shoal.engines.single:build"):
    """One process, one device."""

    kind: Literal["single"] = "single"
    several_processes = False


class Ddp(Engine, built_by="shoal.engines.ddp:DdpEngine"):
    """A copy of the model on each device, gradients averaged."""

    kind: Literal["ddp"] = "ddp"


class Fsdp(Engine, built_by="shoal.engines.fsdp:FsdpEngine"):
    """Parameters, gradients and optimizer state sharded over the devices (torch `fully_shard`)."""

    kind: Literal["fsdp"] = "fsdp"
    cpu_offload: bool = False
    """Keep parameters in main memory when they are not in use."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters after the forward pass, and gather them again for the backward pass."""
    expert_parallel: PositiveInt = 1
    """Devices in a row that share the experts of a mixture: each computes its part of them, for the tokens of all, which are exchanged by
    all-to-all. It must divide the number of devices and of experts. 1: every device gathers all experts of a layer."""


class DeepSpeed(Engine, built_by="shoal.engines.deepspeed.engine:DeepSpeedEngine"):
    """DeepSpeed ZeRO."""

    kind: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3] = 1
    """1 shards optimizer state, 2 gradients too, 3 parameters too; 0 shards nothing and is refused: use ddp."""
    cpu_offload: bool = False
    """Keep optimizer state (and parameters, at stage 3) in main memory."""
    nvme_offload: bool = False
    """Keep them on disk instead (stage 3)."""
    nvme_path: str = "/local_nvme"
    """Folder for nvme_offload."""
    allgather_bucket_size: PositiveInt = 500_000_000
    """Elements gathered at a time."""
    reduce_bucket_size: PositiveInt = 500_000_000
    """Elements reduced at a time."""
    stage3_prefetch_bucket_size: NonNegativeInt = 50_000_000
    """Elements fetched ahead at stage 3."""
    stage3_param_persistence_threshold: NonNegativeInt = 100_000
    """Parameters smaller than this are never sharded at stage 3."""
    stage3_max_live_parameters: NonNegativeInt = 1_000_000_000
    """Most parameters held at once at stage 3."""


Schedule = Literal["1f1b", "gpipe"]


class Pipeline(Engine, built_by="shoal.engines.pipeline.engine:PipelineEngine"):
    """Layers in consecutive blocks over several machines, each block's output feeding the next."""

    kind: Literal["pipeline"] = "pipeline"
    reads_whole_batches = True
    micro_batches: PositiveInt = 4
    """Parts a batch is cut into, so that all blocks work at once."""
    schedule: Schedule = "1f1b"
    """1f1b starts each backward pass as early as possible and keeps few activations; gpipe runs all forward passes of a step first."""
    layers: tuple[PositiveInt, ...] = ()
    """Layers of each block, from the first on; none: by the shares of scheduler.tasks, else the split whose slowest stage is
    fastest."""
    timeout_s: PositiveFloat = 300.0
    """Longest wait for a neighbouring stage, in seconds."""


class Collectives(Engine, built_by="shoal.engines.collectives:CollectivesEngine"):
    """Each process trains its own copy of the model; an all-reduce averages the copies at the end of each round of diloco."""

    kind: Literal["collectives"] = "collectives"
