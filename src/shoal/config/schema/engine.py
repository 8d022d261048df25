"""Inside a worker: how it turns batches into an update on its own devices."""

from typing import ClassVar, Literal

from shoal.config.fields import NonNegativeInt, PositiveFloat, PositiveInt
from shoal.config.parts import Part


class Engine(Part, noun="engine"):
    """Inside a worker: how batches become an update on its own devices. Built by a function of the run, the task, the device, the number of
    steps and the worker's processes."""

    several_processes: ClassVar[bool] = True
    """Whether a worker is several processes, one for each device."""
    reads_whole_batches: ClassVar[bool] = False
    """Whether every process of a worker reads whole batches; else each reads its own part of them."""

    experts: tuple[NonNegativeInt, ...] | None = None
    """The experts of a mixture that a worker holds where all of them do not fit it: `shoal join … --set engine.experts=[0,1,2,3]`.

    It computes with these and the trunk, and nothing else travels. null: all of them.
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
    """Give a block's gathered parameters up after the forward pass, and gather them again for the backward pass."""


class DeepSpeed(Engine, built_by="shoal.engines.deepspeed.engine:DeepSpeedEngine"):
    """DeepSpeed ZeRO."""

    kind: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3] = 1
    """1 shards optimizer state, 2 gradients too, 3 parameters too; 0, which shards nothing, is refused: take ddp."""
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
    """1f1b takes a backward pass as soon as it can, and keeps few activations; gpipe takes all forward passes of a step first."""
    layers: tuple[PositiveInt, ...] = ()
    """Layers of each block, from the first on; none: as scheduler.tasks share the model out, else so that the slowest machine is done as
    soon as it can be."""
    timeout_s: PositiveFloat = 300.0
    """Longest wait for a neighbour or a request."""


class Collectives(Engine, built_by="shoal.engines.collectives:CollectivesEngine"):
    """A copy of the model in each process, which steps by itself; an all-reduce averages the copies at the end of each round of diloco."""

    kind: Literal["collectives"] = "collectives"
