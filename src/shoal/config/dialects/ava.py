"""ava: pretrain mixture-of-experts language models from layered files, with DeepSpeed and RLHF."""

from typing import Any

from shoal.config.dialects.table import NOTHING, Dialect, Implied, RejectError, Row, WrittenKeys, choice, off_at, same
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
    switch, precision = seen.get("deepspeed.fp8_enabled"), seen.get("deepspeed.precision")
    if switch and precision and switch.value is False and precision.value == "fp8" and switch.span.source is precision.span.source:
        message = "`deepspeed.fp8_enabled` is false, `deepspeed.precision` is fp8"
        raise RejectError(message, code="two-values", paths=("deepspeed.fp8_enabled", "deepspeed.precision"))
    return implied


AVA = Dialect(
    "ava",
    "Pretrain mixture-of-experts models on a rack",
    (
        *same("model.", f"{_MOE}.", "hidden_size num_layers intermediate_size vocab_size attention_dropout initializer_range"),
        Row("model.num_attention_heads", f"{_MOE}.num_heads"),
        Row("model.max_position_embeddings", f"{_MOE}.max_seq_len"),
        Row("model.num_experts", f"{_MOE}.experts.count"),
        Row("model.num_experts_per_token", f"{_MOE}.experts.per_token"),
        Row("model.expert_capacity_factor", f"{_MOE}.experts.capacity_factor"),
        Row("model.router_type", f"{_MOE}.experts.router"),
        Row("model.router_aux_loss_coef", f"{_MOE}.experts.aux_loss_weight"),
        Row("model.use_moh", f"{_MOE}.mixture_of_heads.enabled"),
        Row("model.use_moa", f"{_MOE}.mixture_of_activations.enabled"),
        Row("model.use_rag", f"{_MOE}.retrieval.enabled"),
        Row("model.use_cross_attention", f"{_MOE}.cross_attention.enabled"),
        Row("model.use_episodic_memory", f"{_MOE}.episodic_memory.enabled"),
        Row("model.layer_norm_eps", f"{_MOE}.norm_eps"),
        Row("model.hidden_dropout", f"{_MOE}.dropout"),
        *same("training.", "training.", "batch_size gradient_accumulation_steps max_steps gradient_checkpointing"),
        *same("training.", "training.optimizer.", "learning_rate weight_decay beta1 beta2 eps"),
        Row("training.max_gradient_norm", "training.clipping.max_norm"),
        Row("training.num_epochs", "training.epochs"),
        Row("training.warmup_steps", "training.schedule.warmup_steps"),
        Row("training.warmup_schedule", "training.schedule.warmup"),
        Row("training.lr_scheduler_type", "training.schedule.kind"),
        Row("training.lr_end", "training.schedule.end_learning_rate"),
        Row("training.repetition_penalty_weight", "training.penalties.repetition_weight"),
        Row("training.immediate_repetition_weight", "training.penalties.immediate_repetition_weight"),
        Row("training.min_sequence_length", "training.penalties.min_sequence_length"),
        Row("training.eos_penalty_weight", "training.penalties.eos_weight"),
        Row("training.mixed_precision", "training.precision.kind", convert=_PRECISION),
        Row("training.dataloader_num_workers", "data.loader.num_workers"),
        Row("training.eval_strategy", "evaluation.strategy", convert=_CADENCE),
        Row("training.eval_steps", "evaluation.every_steps"),
        Row("training.save_strategy", "checkpoint.strategy", convert=_CADENCE),
        Row("training.save_steps", "checkpoint.every_steps"),
        Row("training.logging_steps", "logging.every_steps"),
        *same("training.early_stopping_", "training.early_stopping.", "patience threshold"),
        *same("training.gradient_health.", "training.gradient_health.", "enabled initial_clip_value final_clip_value warmup_steps"),
        *same("training.gradient_health.", "training.gradient_health.", "explosion_threshold auto_reduce_lr lr_reduction_factor"),
        Row("data.data_dir", "data.source[text].path"),
        Row("data.tokenizer_name", "data.tokenizer"),
        Row("data.max_length", "data.sequence_length"),
        Row("data.max_train_examples", "data.max_train_samples", convert=_ALL),
        Row("data.max_eval_examples", "data.max_eval_samples", convert=_ALL),
        *same("data.", "data.", "padding_side truncation streaming shuffle_seed reshuffle_each_epoch"),
        Row("data.train_batch_size", "training.batch_size"),
        Row("data.eval_batch_size", "evaluation.batch_size"),
        *same("data.dataloader_", "data.loader.", "num_workers drop_last pin_memory prefetch_factor persistent_workers"),
        Row("data.use_weighted_mixing", "data.mixing.enabled"),
        Row("data.mixing_temperature", "data.mixing.temperature"),
        Row("data.buffer_size", "data.shuffle_buffer"),
        Row("data.max_samples", "data.max_samples", convert=_ALL),
        Row("deepspeed.enabled", "engine.kind", convert=choice({True: "deepspeed", False: "single"})),
        *same("deepspeed.", f"{_ZERO}.", "zero_stage cpu_offload nvme_offload allgather_bucket_size reduce_bucket_size"),
        Row("deepspeed.precision", "training.precision.kind", convert=_PRECISION),
        Row("deepspeed.fp8_enabled", "training.precision.kind", convert=_fp8),
        *same("deepspeed.fp8_", "training.precision[fp8].", "margin interval"),
        Row("deepspeed.gradient_accumulation_steps", "training.gradient_accumulation_steps"),
        Row("deepspeed.train_batch_size", "training.global_batch_size"),
        Row("deepspeed.micro_batch_size", "training.batch_size"),
        Row("deepspeed.optimizer.type", "training.optimizer.name"),
        Row("deepspeed.optimizer.params.lr", "training.optimizer.learning_rate"),
        Row("deepspeed.optimizer.params.betas", "training.optimizer", convert=_betas),
        *same("deepspeed.optimizer.params.", "training.optimizer.", "eps weight_decay"),
        *same("deepspeed.stage3_", f"{_ZERO}.stage3_", "prefetch_bucket_size param_persistence_threshold max_live_parameters"),
        Row("num_gpus", "launch.devices_per_node"),
        Row("num_nodes", "launch.nodes"),
        Row("rlhf.**", "rlhf.**"),
    ),
    _imply,
)
