"""The table of all settings: what a coordinator may set on a worker's machine, and within which bounds.

Holds: every setting of the schema stands in exactly one row, itself or with its section, so that a new setting cannot be
forgotten. The `kind` of a section stands in no row: it is one of the kinds that this machine's own Shoal and plugins have.
"""

from __future__ import annotations

from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

from shoal.config.fields import Checker, ListType, MappingType, OptionalType, Section, SectionType, TaggedType
from shoal.config.schema import Run


class Limit(Enum):
    """What a coordinator may do with a setting."""

    ANY = auto()
    """Set it. It is a number, a choice or a word of the computation, and the schema bounds it."""
    OWN = auto()
    """Nothing: this machine uses its own value, or the default."""
    READS = auto()
    """Name a file or folder that this machine allows to be read."""
    READS_OR_HUB = auto()
    """The same, or name something on the hub."""
    HUB = auto()
    """Name something on the hub."""
    TOKENIZER = auto()
    """Name a built-in tokenizer, or as READS_OR_HUB. Not read where the coordinator sends the tokenizer's files."""
    READS_IF_ALLOWED = auto()
    """Name a file or folder; one that this machine does not allow is left out, since the run does not need it on every machine."""
    WRITES = auto()
    """Name a folder that this machine allows by name; otherwise the default is used."""
    FUNCTION = auto()
    """Name a function that this machine allows with --factory (`runs/live_objects.py` refuses others)."""
    PROCESSES = auto()
    """At most as many as this machine has cores."""
    LOADERS = auto()
    """Taken as at most the cores that the processes of this machine leave; batches do not depend on it."""


class LimitedSettings(NamedTuple):
    """Settings of one section that have the same limit."""

    section: str
    """Path of the section, with the kind where there are several: `data.source[text]`. Empty: the root."""
    limit: Limit
    names: str
    """Names of settings, or of whole sections."""


_TRANSFORMER = (
    "vocab_size hidden_size num_layers num_heads num_kv_heads intermediate_size max_seq_len positions feed_forward norm norm_eps bias "
    "qk_norm tied_embeddings dropout"
)

TABLE: tuple[LimitedSettings, ...] = (
    LimitedSettings("", Limit.ANY, "name seed log_level log_format"),
    LimitedSettings("", Limit.WRITES, "output_dir"),
    LimitedSettings("", Limit.OWN, "alerts hub serving simulation"),
    LimitedSettings("task[reward]", Limit.ANY, "head_only"),
    LimitedSettings("task[dpo]", Limit.ANY, "loss beta label_smoothing desirable_weight undesirable_weight gamma"),
    # --- models
    LimitedSettings("model[mlp]", Limit.ANY, "input_dim hidden_sizes output_dim"),
    LimitedSettings("model[lstm]", Limit.ANY, "vocab_size hidden_size num_layers dropout"),
    LimitedSettings("model[gpt]", Limit.ANY, _TRANSFORMER),
    LimitedSettings("model[moe]", Limit.ANY, f"{_TRANSFORMER} attention_dropout initializer_range"),
    LimitedSettings("model[moe].experts", Limit.ANY, "count per_token capacity_factor router aux_loss_weight z_loss_weight bias_step"),
    LimitedSettings("model[moe].experts", Limit.ANY, "intermediate_size shared_size shared_gate dense_layers scores normalise_gates"),
    LimitedSettings("model[moe].mtp", Limit.ANY, "enabled loss_weight"),
    LimitedSettings("model[moe].mixture_of_heads", Limit.ANY, "enabled active_share shared_heads balance_weight"),
    LimitedSettings("model[moe].mixture_of_activations", Limit.ANY, "enabled"),
    LimitedSettings("model[moe].cross_attention", Limit.ANY, "enabled every_layers encoder_layers"),
    LimitedSettings("model[moe].retrieval", Limit.ANY, "enabled encoder top_k chunk_size passage_words passage_tokens max_passages"),
    LimitedSettings("model[moe].retrieval", Limit.READS, "passages index"),
    LimitedSettings("model[moe].episodic_memory", Limit.ANY, "enabled capacity top_k chunk_size vectors replay_rate replay_weight"),
    LimitedSettings("model[dcgan]", Limit.ANY, "latent_dim generator_features discriminator_features image_size channels"),
    LimitedSettings("model[huggingface]", Limit.READS_OR_HUB, "pretrained weights"),
    LimitedSettings("model[huggingface]", Limit.ANY, "from_scratch num_layers load layers"),
    LimitedSettings("model[huggingface].lora", Limit.ANY, "rank alpha rslora dora dropout target_modules"),
    LimitedSettings("model[factory]", Limit.FUNCTION, "function loss"),
    # --- data
    LimitedSettings("data", Limit.TOKENIZER, "tokenizer"),
    LimitedSettings("data", Limit.OWN, "chat_template"),  # it comes with the tokenizer's files
    LimitedSettings("data", Limit.ANY, "chat_time learn_from"),
    LimitedSettings(
        "data",
        Limit.ANY,
        "sequence_length batching packing padding_side truncation streaming shuffle_buffer shuffle_seed reshuffle_each_epoch",
    ),
    LimitedSettings("data", Limit.ANY, "max_samples max_train_samples max_eval_samples"),
    LimitedSettings("data.source[builtin]", Limit.ANY, "name"),
    LimitedSettings("data.source[mnist]", Limit.READS, "path"),
    LimitedSettings("data.source[images]", Limit.READS, "path"),
    LimitedSettings("data.source[images]", Limit.HUB, "download"),
    LimitedSettings("data.source[images]", Limit.ANY, "serve"),
    LimitedSettings("data.source[text]", Limit.READS, "path"),
    LimitedSettings("data.source[text]", Limit.ANY, "text_field context_field"),
    LimitedSettings("data.source[huggingface]", Limit.READS_OR_HUB, "name"),
    LimitedSettings("data.source[huggingface]", Limit.ANY, "subset text_field context_field"),
    LimitedSettings("data.source[wikitext]", Limit.READS, "path"),
    LimitedSettings("data.source[snli]", Limit.READS, "path"),
    LimitedSettings("data.source[preferences]", Limit.READS, "path"),
    LimitedSettings("data.source[preferences]", Limit.ANY, "chosen_field rejected_field context_field"),
    LimitedSettings("data.source[mixture].parts", Limit.ANY, "weight"),
    LimitedSettings("data.source[factory]", Limit.FUNCTION, "function eval_function collate"),
    LimitedSettings("data.mixing", Limit.ANY, "enabled temperature"),
    LimitedSettings("data.loader", Limit.LOADERS, "num_workers"),
    LimitedSettings("data.loader", Limit.ANY, "drop_last pin_memory prefetch_factor persistent_workers"),
    # --- training
    LimitedSettings(
        "training", Limit.ANY, "batch_size gradient_accumulation_steps global_batch_size epochs max_steps polyak_alpha allow_emulation"
    ),
    LimitedSettings("training", Limit.ANY, "gradient_checkpointing compile cuda_graph device"),
    LimitedSettings("training.optimizer[torch]", Limit.ANY, "name learning_rate weight_decay beta1 beta2 eps momentum moments kwargs"),
    LimitedSettings("training.optimizer[function]", Limit.FUNCTION, "function"),
    LimitedSettings("training.scheduler[function]", Limit.FUNCTION, "function"),
    LimitedSettings("training.players", Limit.ANY, "name learning_rate weight_decay beta1 beta2"),
    LimitedSettings("training.schedule", Limit.ANY, "kind warmup_steps warmup end_learning_rate power cycles decay_steps decay timescale"),
    LimitedSettings("training.ema", Limit.ANY, "decay warmup"),
    LimitedSettings("training.clipping", Limit.ANY, "enabled max_norm"),
    LimitedSettings("training.precision[fp8]", Limit.ANY, "margin interval"),
    LimitedSettings(
        "training.penalties", Limit.ANY, "repetition_weight repetition_window immediate_repetition_weight eos_weight min_sequence_length"
    ),
    LimitedSettings("training.early_stopping", Limit.ANY, "patience threshold"),
    LimitedSettings("training.gradient_health", Limit.ANY, "enabled initial_clip_value final_clip_value warmup_steps explosion_threshold"),
    LimitedSettings("training.gradient_health", Limit.ANY, "auto_reduce_lr lr_reduction_factor"),
    *(
        LimitedSettings(f"engine[{kind}]", Limit.ANY, "experts")
        for kind in ("single", "ddp", "fsdp", "deepspeed", "pipeline", "collectives")
    ),
    LimitedSettings("engine[fsdp]", Limit.ANY, "cpu_offload reshard_after_forward expert_parallel"),
    LimitedSettings("engine[deepspeed]", Limit.ANY, "zero_stage cpu_offload nvme_offload allgather_bucket_size reduce_bucket_size"),
    LimitedSettings(
        "engine[deepspeed]", Limit.ANY, "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters"
    ),
    LimitedSettings("engine[deepspeed]", Limit.WRITES, "nvme_path"),
    LimitedSettings("engine[pipeline]", Limit.ANY, "micro_batches schedule layers timeout_s"),
    # --- strategies and updates
    LimitedSettings("strategy[workunits]", Limit.ANY, "batches_per_unit units_per_update max_lag lease_timeout_s max_retries"),
    LimitedSettings("strategy[rollouts]", Limit.ANY, "prompts_per_unit max_lag inexact_share lease_timeout_s max_retries"),
    LimitedSettings("strategy[edp]", Limit.ANY, "pull_every_steps look_ahead"),
    LimitedSettings("strategy[syncps]", Limit.ANY, "pull_every_steps round_timeout_s window"),
    LimitedSettings(
        "strategy[async]", Limit.ANY, "max_staleness adaptive min_staleness max_staleness_multiplier contributions_per_update look_ahead"
    ),
    LimitedSettings(
        "strategy[diloco]", Limit.ANY, "inner_steps rounds outer_schedule outer_power outer_clip_norm round_timeout_s quorum grace_s late"
    ),
    LimitedSettings("strategy[diloco]", Limit.ANY, "balance_speeds fragments overlap_steps overlap_blend expert_weight_cap"),
    LimitedSettings("strategy[diloco].outer", Limit.ANY, "name learning_rate momentum nesterov kwargs"),
    LimitedSettings("updates", Limit.ANY, "clip_norm memory experts_apart below_quorum"),
    LimitedSettings("updates.privacy", Limit.ANY, "enabled unit noise_multiplier delta"),
    LimitedSettings("updates.scorer", Limit.ANY, "enabled share batches memory kept"),
    *(LimitedSettings(f"updates.codec[{kind}]", Limit.ANY, "error_feedback") for kind in ("fp16", "int8", "int4", "ternary")),
    LimitedSettings("updates.codec[topk]", Limit.ANY, "ratio chunk values error_feedback error_decay"),
    LimitedSettings("updates.mixing[bucketing]", Limit.ANY, "size"),
    LimitedSettings("updates.mixing[nearest-neighbours]", Limit.ANY, "byzantine"),
    LimitedSettings("updates.aggregation[trimmed-mean]", Limit.ANY, "trim_ratio"),
    LimitedSettings("updates.aggregation[geometric-median]", Limit.ANY, "iterations smoothing"),
    *(LimitedSettings(f"updates.aggregation[{kind}]", Limit.ANY, "byzantine") for kind in ("krum", "multi-krum", "bulyan")),
    LimitedSettings("updates.aggregation[multi-krum]", Limit.ANY, "select"),
    LimitedSettings("updates.aggregation[centered-clipping]", Limit.ANY, "radius iterations"),
    # --- machines: where a relay listens, what it starts and where it writes is its own
    LimitedSettings("transport[zmq]", Limit.OWN, "host port uploads_at_once"),
    LimitedSettings("transport[zmq]", Limit.ANY, "connections connections_per_address"),
    LimitedSettings("transport[xmlrpc]", Limit.OWN, "host port"),
    LimitedSettings("transport[postgres]", Limit.OWN, "host port database user password"),
    LimitedSettings("transport[postgres]", Limit.ANY, "poll_interval_s"),
    LimitedSettings("cluster", Limit.OWN, "server workers hosts"),
    LimitedSettings("cluster", Limit.ANY, "num_workers"),
    LimitedSettings("coordinator", Limit.OWN, "trains held_in metrics_port metrics_host state_path checkpoint_path"),
    LimitedSettings("coordinator", Limit.ANY, "heartbeat_interval_s telemetry_alpha joins_per_minute workers_at_once failures_per_worker"),
    LimitedSettings("coordinator", Limit.ANY, "devices_per_worker"),
    LimitedSettings("launch", Limit.OWN, "kind ssh ray slurm kubernetes"),
    LimitedSettings("launch", Limit.PROCESSES, "devices_per_node"),
    LimitedSettings("launch", Limit.ANY, "nodes"),
    LimitedSettings("scheduler", Limit.ANY, "kind interval_s"),
    LimitedSettings("scheduler.tasks", Limit.ANY, "id model_share data_share required_flops priority"),
    # --- what a run writes and contacts
    LimitedSettings("evaluation", Limit.ANY, "strategy every_steps batches batch_size"),
    LimitedSettings("checkpoint", Limit.ANY, "strategy every_steps keep_last best"),
    LimitedSettings("checkpoint", Limit.READS_IF_ALLOWED, "resume_from"),
    LimitedSettings("logging", Limit.ANY, "every_steps track_gradients peak_tflops"),
    LimitedSettings("logging", Limit.OWN, "sinks directory project"),
    # --- feedback: the coordinator scores the answers and has the prompts; a worker reads no file for it, and contacts no address
    LimitedSettings("rlhf", Limit.OWN, "fine_tune reward prompts"),
    LimitedSettings("rlhf", Limit.READS_IF_ALLOWED, "policy"),
    LimitedSettings("rlhf", Limit.ANY, "algorithm beta group_size value stop_penalty"),
    LimitedSettings(
        "rlhf.ppo",
        Limit.ANY,
        "rollout_size mini_batch_size epochs clip_range value_clip_range value_weight entropy_weight gamma gae_lambda",
    ),
    LimitedSettings(
        "rlhf.ppo", Limit.ANY, "whiten_advantages whiten_rewards scale_scores stop_kl prompt_length response_length temperature steps"
    ),
    LimitedSettings("rlhf.kl", Limit.ANY, "penalty coefficient adaptive target horizon"),
)

Setting = tuple[type[Section], str]
"""A section's class, and the name of a setting in it."""


def limit_of(section: type[Section], name: str) -> Limit | None:
    """The limit of a setting; None for a setting that a plugin declares."""
    return _limits().get((section, name))


@lru_cache(maxsize=1)
def _limits() -> dict[Setting, Limit]:
    homes = sections()
    return {(homes[row.section], name): row.limit for row in TABLE for name in row.names.split()}


@lru_cache(maxsize=1)
def sections() -> dict[str, type[Section]]:
    """The sections of the schema by their paths. A section that occurs in several places has the path of the first."""
    found: dict[str, type[Section]] = {}
    _collect(Run, "", found)
    return found


def _collect(section: type[Section], path: str, found: dict[str, type[Section]]) -> None:
    if section in found.values():
        return
    found[path] = section
    for name, field in section.fields().items():
        below = f"{path}.{name}".lstrip(".")
        checker = innermost(field.checker)
        if isinstance(checker, TaggedType):
            for kind, one in checker.kinds.items():
                _collect(one, f"{below}[{kind}]", found)
        elif isinstance(checker, SectionType):
            _collect(checker.section, below, found)


def innermost(checker: Checker) -> Checker:
    """The checker of a single value: that of a list's or a mapping's items."""
    while isinstance(checker, OptionalType | ListType | MappingType):
        checker = checker.item
    return checker
