"""Warnings for settings that have no effect because of another setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.config.layers import Settings, UnavailableError
from shoal.config.rules.rule import changed, rule
from shoal.config.schema.cluster import Kubernetes, Ray, Slurm, Ssh
from shoal.config.schema.engine import Engine
from shoal.config.schema.model import EpisodicMemory, MixtureOfHeads, Mtp, Retrieval
from shoal.config.schema.task import TEXT, Task
from shoal.config.schema.training import EMULATED, PlayerOptimizer

_NEVER, _NOT_STEPS = ("never",), ("never", "epoch")
_OF_LAUNCHERS = tuple(
    (f"launch.{kind}.{name}", "launch.kind", lambda chosen, kind=kind: chosen != kind, f"that is for launch.kind {kind}")
    for kind, section in (("ssh", Ssh), ("ray", Ray), ("slurm", Slurm), ("kubernetes", Kubernetes))
    for name in section.fields()
)

_CLIP_VALUES = ("initial_clip_value", "final_clip_value", "warmup_steps", "explosion_threshold")
_OF_PARTS_THAT_ARE_OFF = tuple(
    (f"{part}.{name}", f"{part}.enabled", lambda on: not on, why)
    for part, names, why in (
        ("model.mixture_of_heads", MixtureOfHeads.fields(), "all heads are active for every token"),
        ("model.mtp", Mtp.fields(), "one token is predicted at a time"),
        ("model.retrieval", Retrieval.fields(), "no passages are looked for"),
        ("model.episodic_memory", EpisodicMemory.fields(), "nothing is remembered"),
        ("hub", ("repo_id", "push_interval", "private"), "nothing is uploaded"),
        ("training.gradient_health", _CLIP_VALUES, "gradient_health is off"),
        ("updates.scorer", ("share", "batches", "memory", "kept"), "contributions are not measured"),
        ("updates.privacy", ("noise_multiplier", "unit", "delta"), "differential privacy is off"),
    )
    for name in names
    if name != "enabled"
)


def _all_have_rates(players: Mapping[str, PlayerOptimizer]) -> bool:
    """Whether both networks of a pair (generator and discriminator, policy and value) have own learning rates."""
    return len(players) == 2 and all(one.learning_rate is not None for one in players.values())


NO_EFFECT: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    ("data.padding_side", "data.batching", lambda batching: batching == "packed", "packed sequences are padded on the right"),
    ("data.truncation", "data.packing", lambda packing: packing == "stream", "texts are joined, so none is too long"),
    ("data.packing", "data.batching", lambda batching: batching != "packed", "each text is a sample of its own"),
    ("data.learn_from", "task.kind", lambda kind: Task.kinds[kind].needs != "tokens", "this task has no answers in its data to learn"),
    ("data.chat_template", "task.kind", lambda kind: Task.kinds[kind].needs not in TEXT, "this task reads no text"),
    ("data.packing", "task.kind", lambda kind: Task.kinds[kind].needs not in ("tokens", "prompts"), "this task packs nothing"),
    ("data.loader.prefetch_factor", "data.loader.num_workers", lambda count: not count, "no processes load ahead"),
    ("data.loader.persistent_workers", "data.loader.num_workers", lambda count: not count, "no processes load ahead"),
    ("data.shuffle_buffer", "data.streaming", lambda streams: not streams, "the data is no stream, so all of it is shuffled"),
    ("data.mixing.temperature", "data.mixing.enabled", lambda mixes: not mixes, "sources are not drawn by weight"),
    ("data.max_eval_samples", "evaluation.strategy", lambda when: when == "never", "nothing is evaluated"),
    ("evaluation.every_steps", "evaluation.strategy", lambda when: when in _NOT_STEPS, "evaluations do not go by steps"),
    ("evaluation.batches", "evaluation.strategy", lambda when: when in _NEVER, "nothing is evaluated"),
    ("evaluation.batch_size", "evaluation.strategy", lambda when: when in _NEVER, "nothing is evaluated"),
    ("checkpoint.every_steps", "checkpoint.strategy", lambda when: when in _NOT_STEPS, "checkpoints do not go by steps"),
    ("task.label_smoothing", "task.loss", lambda loss: loss not in ("sigmoid", "robust", "simpo"), "this loss takes labels as they are"),
    ("task.desirable_weight", "task.loss", lambda loss: loss != "kto", "this loss compares pairs"),
    ("task.undesirable_weight", "task.loss", lambda loss: loss != "kto", "this loss compares pairs"),
    ("task.gamma", "task.loss", lambda loss: loss != "simpo", "it is simpo's margin"),
    ("training.optimizer.learning_rate", "training.players", _all_have_rates, "each network has a rate of its own"),
    ("training.schedule.end_learning_rate", "training.schedule.kind", lambda kind: kind == "constant", "the learning rate stays as it is"),
    ("training.schedule.power", "training.schedule.kind", lambda kind: kind != "polynomial", "the schedule is no polynomial"),
    ("training.schedule.cycles", "training.schedule.kind", lambda kind: kind != "cosine-restarts", "the schedule has no restarts"),
    ("training.schedule.decay_steps", "training.schedule.kind", lambda kind: kind != "wsd", "wsd alone has a decay of its own"),
    ("training.schedule.decay", "training.schedule.kind", lambda kind: kind != "wsd", "wsd alone has a decay of its own"),
    (
        "training.schedule.timescale",
        "training.schedule.kind",
        lambda kind: kind != "inverse-sqrt",
        "the schedule is no inverse square root",
    ),
    ("strategy.outer_power", "strategy.outer_schedule", lambda kind: kind != "polynomial", "the outer schedule is no polynomial"),
    ("training.ema.warmup", "training.ema.decay", lambda decay: decay is None, "no average of the weights is kept"),
    ("training.schedule.warmup", "training.schedule.warmup_steps", lambda steps: not steps, "there is no warm-up"),
    ("training.clipping.max_norm", "training.clipping.enabled", lambda clips: not clips, "gradients are not clipped"),
    ("training.early_stopping.threshold", "training.early_stopping.patience", lambda patience: patience is None, "nothing stops early"),
    ("training.allow_emulation", "training.precision.kind", lambda kind: kind not in EMULATED, "no precision is emulated"),
    ("training.penalties.min_sequence_length", "training.penalties.eos_weight", lambda weight: not weight, "an early end costs nothing"),
    ("training.gradient_health.lr_reduction_factor", "training.gradient_health.auto_reduce_lr", lambda on: not on, "it is never reduced"),
    ("training.penalties.repetition_window", "training.penalties.repetition_weight", lambda weight: not weight, "repetitions cost nothing"),
    *_OF_PARTS_THAT_ARE_OFF,
    ("model.experts.aux_loss_weight", "model.experts.router", lambda router: router == "hash", "a fixed table does not learn to balance"),
    ("model.experts.z_loss_weight", "model.experts.router", lambda router: router == "hash", "a fixed table has no logits"),
    ("model.experts.bias_step", "model.experts.router", lambda router: router != "sigmoid-bias", "the router has no biases"),
    ("model.experts.scores", "model.experts.router", lambda router: router == "hash", "a fixed table has no logits"),
    ("model.experts.normalise_gates", "model.experts.router", lambda router: router == "hash", "all gates of a fixed table are equal"),
    ("model.experts.shared_gate", "model.experts.shared_size", lambda size: size is None, "there is no shared expert"),
    ("model.episodic_memory.replay_weight", "model.episodic_memory.replay_rate", lambda rate: not rate, "nothing is replayed"),
    ("logging.directory", "logging.sinks", lambda sinks: "tensorboard" not in [sink.kind for sink in sinks], "TensorBoard is not used"),
    (
        "updates.below_quorum",
        "updates.aggregation",
        lambda rule: rule.withstands is None,
        "the rule needs no certain number of them",
    ),
    ("strategy.min_staleness", "strategy.adaptive", lambda on: not on, "all workers have the same bound"),
    ("strategy.max_staleness_multiplier", "strategy.adaptive", lambda on: not on, "all workers have the same bound"),
    ("strategy.outer.nesterov", "strategy.outer.momentum", lambda momentum: not momentum, "there is no momentum"),
    ("engine.nvme_path", "engine.nvme_offload", lambda on: not on, "nothing is kept on a disk"),
    ("engine.stage3_prefetch_bucket_size", "engine.zero_stage", lambda stage: stage < 3, "this is not ZeRO stage 3"),
    ("engine.stage3_param_persistence_threshold", "engine.zero_stage", lambda stage: stage < 3, "this is not ZeRO stage 3"),
    ("engine.stage3_max_live_parameters", "engine.zero_stage", lambda stage: stage < 3, "this is not ZeRO stage 3"),
    *_OF_LAUNCHERS,
    ("launch.nodes", "engine.kind", lambda kind: not Engine.kinds[kind].several_processes, "one process on one machine trains"),
)
"""(setting, other setting, condition on the other's value, reason why the first has no effect)."""


@rule()
def what_does_nothing_here(settings: Settings) -> None:
    reported: set[str] = set()
    for path, other, is_so, why in NO_EFFECT:
        try:
            if path not in reported and changed(settings, path) and is_so(settings.get(other)):
                reported.add(path)
                settings.warn_no_effect(path, why, other, help=f"`{settings.spelling(other)}` decides that")
        except UnavailableError:
            continue


_READERS = ("cross_attention", "retrieval", "episodic_memory")


@rule(*(f"model.{part}.enabled" for part in _READERS))
def something_is_read_beside_the_input(settings: Settings, *switched_on: bool) -> None:
    for name in ("every_layers", "encoder_layers") if not any(switched_on) else ():
        path = f"model.cross_attention.{name}"
        if changed(settings, path):
            help = "cross-attention, retrieval and an episodic memory read such things, and all three are off"
            settings.warn_no_effect(path, "nothing is read beside the input", help=help)
