"""ava: pretrain mixture-of-experts language models from layered files, with DeepSpeed and RLHF."""

from typing import Any

from shoal.config.dialects.table import NOTHING, Dialect, Implied, RejectError, WrittenKeys, choice, off_at, row
from shoal.config.text import describe

_MOE = "model[moe]"
_ZERO = "engine[deepspeed]"
_ALL = off_at(-1)
_CADENCE = choice({"steps": "steps", "epoch": "epoch", "no": "never"})
_PRECISION = choice({"no": "fp32", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"})


def _betas(value: Any) -> Any:
    if not isinstance(value, list) or len(value) != 2:
        raise RejectError(f"expected a list of two numbers, found {describe(value)}")
    return {"beta1": value[0], "beta2": value[1]}


def _fp8(value: Any) -> Any:
    """`fp8_enabled: false` chooses no precision; `_imply` checks that it contradicts none."""
    return choice({True: "fp8", False: NOTHING})(value)


def _imply(seen: WrittenKeys) -> Implied:
    implied: Implied = {"model.kind": ("moe", "ava files train mixture-of-experts models")}
    if "data.data_dir" in seen:
        implied["data.source.kind"] = ("text", "`data_dir` is a folder of texts")
    if "data.padding_side" in seen or "data.truncation" in seen:
        implied["data.batching"] = ("dynamic", "`padding_side` and `truncation` say how a text becomes a sample of its own")
    if seen.any_below("deepspeed") and "deepspeed.enabled" not in seen:
        implied["engine.kind"] = ("deepspeed", "there is a `deepspeed` section")
    switch, precision = seen.nodes.get("deepspeed.fp8_enabled"), seen.nodes.get("deepspeed.precision")
    if switch and precision and switch.value is False and precision.value == "fp8" and switch.span.source is precision.span.source:
        message = "`deepspeed.fp8_enabled` is false, `deepspeed.precision` is fp8"
        raise RejectError(message, "deepspeed.fp8_enabled deepspeed.precision", "two-values")
    return implied


AVA = Dialect(
    "ava",
    "Pretrain mixture-of-experts models on a rack",
    (
        row("model.hidden_size", f"{_MOE}.hidden_size"),
        row("model.num_layers", f"{_MOE}.num_layers"),
        row("model.num_attention_heads", f"{_MOE}.num_heads"),
        row("model.intermediate_size", f"{_MOE}.intermediate_size"),
        row("model.vocab_size", f"{_MOE}.vocab_size"),
        row("model.max_position_embeddings", f"{_MOE}.max_seq_len"),
        row("model.num_experts", f"{_MOE}.experts.count"),
        row("model.num_experts_per_token", f"{_MOE}.experts.per_token"),
        row("model.expert_capacity_factor", f"{_MOE}.experts.capacity_factor"),
        row("model.router_type", f"{_MOE}.experts.router"),
        row("model.router_aux_loss_coef", f"{_MOE}.experts.aux_loss_weight"),
        row("model.use_moh", f"{_MOE}.mixture_of_heads.enabled"),
        row("model.use_moa", f"{_MOE}.mixture_of_activations.enabled"),
        row("model.use_rag", f"{_MOE}.retrieval.enabled"),
        row("model.use_cross_attention", f"{_MOE}.cross_attention.enabled"),
        row("model.use_episodic_memory", f"{_MOE}.episodic_memory.enabled"),
        row("model.layer_norm_eps", f"{_MOE}.norm_eps"),
        row("model.attention_dropout", f"{_MOE}.attention_dropout"),
        row("model.hidden_dropout", f"{_MOE}.dropout"),
        row("model.initializer_range", f"{_MOE}.initializer_range"),
        row("training.batch_size", "training.batch_size"),
        row("training.gradient_accumulation_steps", "training.gradient_accumulation_steps"),
        row("training.learning_rate", "training.optimizer.learning_rate"),
        row("training.weight_decay", "training.optimizer.weight_decay"),
        row("training.beta1", "training.optimizer.beta1"),
        row("training.beta2", "training.optimizer.beta2"),
        row("training.eps", "training.optimizer.eps"),
        row("training.max_gradient_norm", "training.clipping.max_norm"),
        row("training.num_epochs", "training.epochs"),
        row("training.max_steps", "training.max_steps"),
        row("training.warmup_steps", "training.schedule.warmup_steps"),
        row("training.warmup_schedule", "training.schedule.warmup"),
        row("training.lr_scheduler_type", "training.schedule.kind"),
        row("training.lr_end", "training.schedule.end_learning_rate"),
        row("training.repetition_penalty_weight", "training.penalties.repetition_weight"),
        row("training.immediate_repetition_weight", "training.penalties.immediate_repetition_weight"),
        row("training.min_sequence_length", "training.penalties.min_sequence_length"),
        row("training.eos_penalty_weight", "training.penalties.eos_weight"),
        row("training.mixed_precision", "training.precision.kind", convert=_PRECISION),
        row("training.gradient_checkpointing", "training.gradient_checkpointing"),
        row("training.dataloader_num_workers", "data.loader.num_workers"),
        row("training.eval_strategy", "evaluation.strategy", convert=_CADENCE),
        row("training.eval_steps", "evaluation.every_steps"),
        row("training.save_strategy", "checkpoint.strategy", convert=_CADENCE),
        row("training.save_steps", "checkpoint.every_steps"),
        row("training.logging_steps", "logging.every_steps"),
        row("training.early_stopping_patience", "training.early_stopping.patience"),
        row("training.early_stopping_threshold", "training.early_stopping.threshold"),
        row("training.gradient_health.enabled", "training.gradient_health.enabled"),
        row("training.gradient_health.initial_clip_value", "training.gradient_health.initial_clip_value"),
        row("training.gradient_health.final_clip_value", "training.gradient_health.final_clip_value"),
        row("training.gradient_health.warmup_steps", "training.gradient_health.warmup_steps"),
        row("training.gradient_health.explosion_threshold", "training.gradient_health.explosion_threshold"),
        row("training.gradient_health.auto_reduce_lr", "training.gradient_health.auto_reduce_lr"),
        row("training.gradient_health.lr_reduction_factor", "training.gradient_health.lr_reduction_factor"),
        row("data.data_dir", "data.source[text].path"),
        row("data.tokenizer_name", "data.tokenizer"),
        row("data.max_length", "data.sequence_length"),
        row("data.max_train_examples", "data.max_train_samples", convert=_ALL),
        row("data.max_eval_examples", "data.max_eval_samples", convert=_ALL),
        row("data.padding_side", "data.padding_side"),
        row("data.truncation", "data.truncation"),
        row("data.train_batch_size", "training.batch_size"),
        row("data.eval_batch_size", "evaluation.batch_size"),
        row("data.dataloader_num_workers", "data.loader.num_workers"),
        row("data.dataloader_drop_last", "data.loader.drop_last"),
        row("data.dataloader_pin_memory", "data.loader.pin_memory"),
        row("data.dataloader_prefetch_factor", "data.loader.prefetch_factor"),
        row("data.dataloader_persistent_workers", "data.loader.persistent_workers"),
        row("data.use_weighted_mixing", "data.mixing.enabled"),
        row("data.mixing_temperature", "data.mixing.temperature"),
        row("data.streaming", "data.streaming"),
        row("data.buffer_size", "data.shuffle_buffer"),
        row("data.max_samples", "data.max_samples", convert=_ALL),
        row("data.shuffle_seed", "data.shuffle_seed"),
        row("data.reshuffle_each_epoch", "data.reshuffle_each_epoch"),
        row("deepspeed.enabled", "engine.kind", convert=choice({True: "deepspeed", False: "single"})),
        row("deepspeed.zero_stage", f"{_ZERO}.zero_stage"),
        row("deepspeed.cpu_offload", f"{_ZERO}.cpu_offload"),
        row("deepspeed.nvme_offload", f"{_ZERO}.nvme_offload"),
        row("deepspeed.precision", "training.precision.kind", convert=_PRECISION),
        row("deepspeed.fp8_enabled", "training.precision.kind", convert=_fp8),
        row("deepspeed.fp8_margin", "training.precision[fp8].margin"),
        row("deepspeed.fp8_interval", "training.precision[fp8].interval"),
        row("deepspeed.gradient_accumulation_steps", "training.gradient_accumulation_steps"),
        row("deepspeed.train_batch_size", "training.global_batch_size"),
        row("deepspeed.micro_batch_size", "training.batch_size"),
        row("deepspeed.optimizer.type", "training.optimizer.name"),
        row("deepspeed.optimizer.params.lr", "training.optimizer.learning_rate"),
        row("deepspeed.optimizer.params.betas", "training.optimizer", convert=_betas),
        row("deepspeed.optimizer.params.eps", "training.optimizer.eps"),
        row("deepspeed.optimizer.params.weight_decay", "training.optimizer.weight_decay"),
        row("deepspeed.allgather_bucket_size", f"{_ZERO}.allgather_bucket_size"),
        row("deepspeed.reduce_bucket_size", f"{_ZERO}.reduce_bucket_size"),
        row("deepspeed.stage3_prefetch_bucket_size", f"{_ZERO}.stage3_prefetch_bucket_size"),
        row("deepspeed.stage3_param_persistence_threshold", f"{_ZERO}.stage3_param_persistence_threshold"),
        row("deepspeed.stage3_max_live_parameters", f"{_ZERO}.stage3_max_live_parameters"),
        row("num_gpus", "launch.devices_per_node"),
        row("num_nodes", "launch.nodes"),
        row("rlhf.**", "rlhf.**"),
    ),
    _imply,
)
