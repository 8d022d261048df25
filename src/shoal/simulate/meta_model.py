"""A run with its model on torch's meta device: parameter count, memory, operations per batch, and step times on given machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from shoal import data, models, strategies
from shoal.config import Run
from shoal.config.machines import MachineKind
from shoal.config.schema.engine import Ddp, Fsdp
from shoal.engines import SingleEngine
from shoal.engines.pipeline.split import LayerSizes, layers_of, numbers_used
from shoal.errors import ShoalError
from shoal.runs.build_run import RunParts, feed_for_seat
from shoal.runs.coordinator_run import RunAgreement
from shoal.runs.live_objects import NO_LIVE_OBJECTS, data_for, players_for, task_for
from shoal.runs.run_size import data_extent, ranks_per_worker
from shoal.scheduling import memory_estimate as memory
from shoal.simulate import device_exchange
from shoal.simulate.machines import CALM, SimulatedMachine
from shoal.transports.netem.profiles import LinkProfile

APART, SHARING = Ddp().kind, Fsdp().kind
"""Engines for a worker of several devices: each device has all weights, or the weights are sharded."""
_MOST_DOUBLINGS = 13
"""Up to 4,096 devices are tried for a model that is too large for one."""
_PASSES, _WEIGHT_GRADIENT = 4, 2
"""Operations per weight and token: two forward, two for the gradient of the input, and two more for the gradient of a trained weight."""


class MetaModel(NamedTuple):
    """A run and its parts, the model without values. Holds for every strategy, codec and batch size that is planned."""

    run: Run
    parts: RunParts

    @property
    def parameters(self) -> int:
        return self.parts.single.vector.numel()

    @property
    def active(self) -> int:
        """The parameters that a token uses: of a mixture's experts those that it goes to."""
        weights = [one for player in self.parts.engine.task.players.values() for one in numbers_used(player)]
        return round(sum(used for weight, used in weights if weight.requires_grad))

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary; 0: the data is no text."""
        return self.parts.data.info.vocab_size or 0

    @property
    def layers(self) -> LayerSizes:
        return layers_of(self.parts.engine.task.players["model"])

    @property
    def sharded(self) -> device_exchange.ShardedSizes:
        return device_exchange.sizes_of(next(iter(self.parts.engine.task.players.values())))

    def agreed(self, run: Run, workers: int) -> RunAgreement:
        """The run's agreement with this number of workers. Raises ShoalError where the settings and the data do not fit."""
        samples = self.parts.data
        expected = shards_of(run, samples.train, workers)
        policies = strategies.policies_for(run, expected)
        length = policies.length(data_extent(run, samples, expected))
        return RunAgreement(self.parts, policies, length, (), expected)

    def memory(self, run: Run) -> memory.MemoryEstimate:
        """Memory of a worker, or of each of its devices."""
        blocks = _blocks_of(self.parts.engine.task.players["model"]) if run.model.kind == "huggingface" else None
        whole = memory.training_memory(run, self.parameters, self.vocabulary, self.parts.frozen_bytes, blocks)
        if run.engine.kind != SHARING:
            return whole
        return whole.shared(ranks_per_worker(run), device_exchange.gathered_bytes(run, self.sharded))

    def step_s(self, run: Run, kind: MachineKind) -> float:
        """Seconds per batch on a machine, proportional to the batch size."""
        if kind.steps_per_s is not None:
            return (run.training.batch_size or 1) / (self.run.training.batch_size or 1) / kind.steps_per_s
        assert kind.flops is not None  # the machines file is refused without either
        return self.operations(run) / kind.flops

    def worker_step_s(self, run: Run, kind: MachineKind) -> float:
        """Mean seconds per batch of a worker whose devices compute one batch each and then exchange gradients."""
        if kind.devices == 1:
            return self.step_s(run, kind)
        ranks = ranks_per_worker(run)
        if run.engine.kind == SHARING:
            exchanged_mbit = device_exchange.sharded_mbit(run, self.sharded, ranks)
        else:
            exchanged_mbit = device_exchange.copied_mbit(run, self.parameters)
        return (self.step_s(run, kind) + exchanged_mbit / kind.device_mbps) / ranks

    def operations(self, run: Run) -> float:
        """Floating-point operations per batch. Raises ShoalError for convolutions, which use a weight at every position of an image."""
        if any(value.dim() > 3 for player in self.parts.engine.task.players.values() for value in player.parameters()):
            raise ShoalError(
                "the model has convolutions, so what a batch takes does not follow from its size: say what it takes, with steps_per_s or "
                "--step-s, not with flops"
            )
        tokens = run.data.sequence_length or getattr(run.model, "max_seq_len", None) or 1
        recomputed = 2 if run.training.gradient_checkpointing else 0
        weights = [one for player in self.parts.engine.task.players.values() for one in numbers_used(player)]
        each = sum((_PASSES + recomputed + _WEIGHT_GRADIENT * weight.requires_grad) * used for weight, used in weights)
        return each * tokens * (run.training.batch_size or 1)


def _blocks_of(network: Any) -> memory.BlockShape | None:
    """The blocks of a model of Hugging Face, as far as its configuration names them."""
    network = getattr(network, "trunk", network)
    if hasattr(network, "conversion"):
        settings = network.conversion.settings
        return memory.BlockShape(settings.num_layers, settings.hidden_size, settings.num_heads, memory.numbers_kept(settings))
    config = network.inner.config.get_text_config()
    layers, width, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    return memory.BlockShape(layers, width, heads or 0) if layers and width else None


def data_of(run: Run, count: int | None = None) -> data.Data:
    """The data of a run, for a simulation of times. Local data is read; other data, and all data if `count` gives the number of samples, is
    replaced by fake data of the same size and shapes. Raises ShoalError where size or shapes are unknown."""
    return data_for(run, NO_LIVE_OBJECTS, lambda: data.load(run)) if is_read(run, count) else data.make_fake_data(run, count)


def is_read(run: Run, count: int | None) -> bool:
    return count is None and data.is_local(run.data.source)


def shards_of(run: Run, samples: object, workers: int) -> int:
    """Number of shards of the data: one for each simulated worker, and at most one for each batch."""
    if not isinstance(samples, data.Samples):
        return workers
    return max(1, min(workers, len(samples) // (run.training.batch_size or 1)))


def build_meta_model(run: Run, samples: data.Data | None = None) -> MetaModel:
    """Build the networks on the meta device: they may be larger than this machine's memory. `samples`: the run's data; None: read it."""
    samples = samples or data_of(run)
    shaped = run.model.kind in ("mlp", "lstm", "gpt", "moe", "dcgan", "huggingface")  # user models cannot be built on the meta device
    players = models.build(run, samples.info.shapes, "meta") if shaped else players_for(run, NO_LIVE_OBJECTS, samples.info)
    with torch.device("meta"):
        task = task_for(run, NO_LIVE_OBJECTS, players, samples.info)
        engine = SingleEngine(run, task, torch.device("meta"), 1)
    return MetaModel(run, RunParts(run, samples, engine, feed_for_seat(run, samples)))


def machines_of(found: MetaModel, run: Run, kinds: dict[str, MachineKind]) -> list[SimulatedMachine]:
    """The machines of these kinds, one by one, present from the beginning."""
    return [SimulatedMachine(name, found.worker_step_s(run, kind), link_of(kind), start_s=0.0) for name, kind in one_by_one(kinds)]


def one_by_one(kinds: Mapping[str, MachineKind]) -> list[tuple[str, MachineKind]]:
    """Every machine of these kinds, with a name of its own."""
    return [(name if kind.count == 1 else f"{name}-{number + 1}", kind) for name, kind in kinds.items() for number in range(kind.count)]


def link_of(kind: MachineKind) -> LinkProfile:
    return CALM._replace(round_trip_ms=kind.latency_ms, mbit_per_s=kind.bandwidth_mbps)


def devices_of(kinds: dict[str, MachineKind]) -> int:
    """Devices per machine. Raises ShoalError where machines differ: all workers have the same engine."""
    counts = {kind.devices for kind in kinds.values()}
    if len(counts) > 1:
        listed = ", ".join(f"{name} {kind.devices}" for name, kind in kinds.items())
        raise ShoalError(f"machines with different numbers of devices ({listed}) have no engine in common: plan for some of them at a time")
    return counts.pop() if counts else 1


def with_sharded_engine(found: MetaModel, devices: int) -> Run:
    """The run with the engine that uses the least memory per device."""
    if devices == 1:
        return found.run
    engine = Fsdp(expert_parallel=device_exchange.sharings(found.sharded, devices)[-1])
    return found.run.replace(engine=engine, launch=found.run.launch.replace(devices_per_node=devices))


def best_sharing(found: MetaModel, devices: int, kinds: Mapping[str, MachineKind]) -> int:
    """The number of devices, 2 or more, that share experts where a step is fastest, of those that fit most machines; 1: none can."""

    def cost(sharing: int) -> tuple[int, float]:
        run = found.run.replace(engine=Fsdp(expert_parallel=sharing), launch=found.run.launch.replace(devices_per_node=devices))
        return -len(machines_that_fit(found, run, dict(kinds))), max(found.worker_step_s(run, kind) for kind in kinds.values())

    return min(device_exchange.sharings(found.sharded, devices)[1:], key=cost, default=1)


def machines_that_fit(found: MetaModel, run: Run, kinds: dict[str, MachineKind]) -> dict[str, MachineKind]:
    """The machines whose memory is large enough to train this."""
    needs_gb = found.memory(run).gb
    return {name: kind for name, kind in kinds.items() if kind.memory_gb is None or needs_gb <= kind.memory_gb}


def changes_that_fit(found: MetaModel, run: Run, memory_gb: float) -> list[str]:
    """Changes with which a machine of this memory can train the model, one per line of the message."""
    training, changes = run.training, list[str]()
    batches = [training.batch_size or 1]
    while batches[-1] > 1:
        batches.append(batches[-1] // 2)
    for checkpointing in (False, True) if found.memory(run).activations and getattr(run.model, "num_layers", None) else (False,):
        for batch in batches:
            tried = training.replace(batch_size=batch, gradient_checkpointing=checkpointing or training.gradient_checkpointing)
            if (needs := found.memory(run.replace(training=tried)).gb) <= memory_gb:
                switched = "training.gradient_checkpointing=true and " if checkpointing and not training.gradient_checkpointing else ""
                changes.append(f"{switched}training.batch_size={batch}: {needs:.3g} GB")
                break
    return changes or _sharded_changes(found, run, memory_gb)


def _sharded_changes(found: MetaModel, run: Run, memory_gb: float) -> list[str]:
    """Sharding: devices share weights, gradients and optimizer state; each keeps the activations of its own batch."""
    one = run.replace(training=run.training.replace(batch_size=1))
    whole = f"a machine with {found.memory(one).gb:.3g} GB, with training.batch_size=1"
    for devices in (2**power for power in range(1, _MOST_DOUBLINGS)):
        tried = with_sharded_engine(found._replace(run=one), devices)
        if found.memory(tried).gb <= memory_gb:
            sharing = device_exchange.sharing_of(tried)
            experts = f" and engine.expert_parallel={sharing}" if sharing > 1 else ""
            return [f"engine.kind=fsdp{experts} over {devices} devices of {memory_gb:.3g} GB, with training.batch_size=1", whole]
    return [whole]
