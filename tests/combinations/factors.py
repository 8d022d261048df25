"""The factors of the covering array: settings that switch machinery on, with their values, and the tiny run that they are applied to.

Each value is a set of settings by path. The first value of a factor is its default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Settings = Mapping[str, Any]
Row = Mapping[str, str]
"""The name of a value, by factor."""

BASE: Settings = {
    "seed": 3,
    "data.source": {"kind": "text", "path": "DATA/lines.jsonl"},
    "data.tokenizer": "bytes",
    "data.sequence_length": 16,
    "training.device": "cpu",
    "training.batch_size": 4,
    "training.max_steps": 2,
    "training.optimizer.learning_rate": 0.001,
    "evaluation.batches": 1,
    "evaluation.batch_size": 4,
}
"""A run of two steps. `DATA` is the folder that `inputs.py` writes."""

_SMALL: Settings = {"model.hidden_size": 32, "model.num_layers": 2, "model.num_heads": 4, "model.max_seq_len": 32}
_IMAGES: Settings = {"data.source": {"kind": "builtin", "name": "digits"}, "data.tokenizer": None, "data.sequence_length": None}
_PAIRS: Settings = {"data.source": {"kind": "preferences", "path": "DATA/pairs.jsonl"}}
_FEW: Settings = {
    "rlhf.ppo.rollout_size": 8,
    "rlhf.ppo.mini_batch_size": 4,
    "rlhf.ppo.epochs": 1,
    "rlhf.ppo.prompt_length": 8,
    "rlhf.ppo.response_length": 4,
    "rlhf.ppo.steps": 1,
    "rlhf.group_size": 4,
}
_ANSWERS: Settings = _FEW | {"task": "ppo", "rlhf.reward": {"kind": "exact"}, "rlhf.prompts": "DATA/prompts.jsonl"}
_SEVERAL: Settings = {"launch.devices_per_node": 2}
_MIXTURE: Settings = _SMALL | {"model.kind": "moe", "model.experts.count": 4}

FACTORS: Mapping[str, Mapping[str, Settings]] = {
    "model": {
        "gpt": _SMALL | {"model.kind": "gpt"},
        "moe": _MIXTURE,
        "lstm": {"model.kind": "lstm", "model.hidden_size": 16},
        "gpt2": {"model.kind": "huggingface", "model.pretrained": "DATA/gpt2"},
        "mlp": _IMAGES | {"model.kind": "mlp", "model.hidden_sizes": [16]},
        "dcgan": _IMAGES | {"model.kind": "dcgan", "model.image_size": 8, "model.generator_features": 4, "model.discriminator_features": 4},
    },
    "task": {
        "own": {},
        "dpo": _PAIRS | {"task": "dpo"},
        "kto": _PAIRS | {"task": {"kind": "dpo", "loss": "kto"}},
        "orpo": _PAIRS | {"task": {"kind": "dpo", "loss": "orpo"}},
        "reward": _PAIRS | {"task": "reward"},
        "ppo": _ANSWERS,
        "ppo-value-head": _ANSWERS | {"rlhf.value": "head"},
        "rloo": _ANSWERS | {"rlhf.algorithm": "rloo"},
        "grpo": _ANSWERS | {"rlhf.algorithm": "grpo"},
        "online-dpo": _ANSWERS | {"rlhf.algorithm": "online-dpo"},
    },
    "data": {  # layers that read for a row as a whole refuse packed conversations where the data is loaded: see `refused`
        "texts": {},
        "conversations": {
            "data.source": {"kind": "text", "path": "DATA/chats.jsonl"},
            "data.chat_template": "plain",
            "data.sequence_length": 32,
        },
    },
    "prompts": {"file": {}, "texts": _FEW | {"rlhf.prompts": None, "rlhf.reward": {"kind": "sentiment"}}},
    "streaming": {"off": {}, "on": {"data.streaming": True}},
    "recompute": {"off": {}, "on": {"training.gradient_checkpointing": True}},
    "compile": {"off": {}, "on": {"training.compile": True}},
    "precision": {
        "fp32": {},
        "bf16": {"training.precision.kind": "bf16"},
        "fp16": {"training.precision.kind": "fp16"},
        "fp8": {"training.precision.kind": "fp8", "training.allow_emulation": True},
        "nvfp4": {"training.precision.kind": "nvfp4"},
    },
    "dropout": {"off": {}, "on": {"model.dropout": 0.1}},
    "layers": {
        "plain": {},
        "rotary": {"model.positions": "rotary", "model.feed_forward": "swiglu", "model.norm": "rms", "model.num_kv_heads": 2},
        "heads": {"model.mixture_of_heads.enabled": True},
        "activations": {"model.mixture_of_activations.enabled": True},
        "context": {"model.cross_attention.enabled": True, "data.batching": "dynamic"},
        "retrieval": {"model.retrieval.enabled": True, "model.retrieval.encoder": "words", "model.retrieval.chunk_size": 8},
        "memory": {"model.episodic_memory.enabled": True, "model.episodic_memory.chunk_size": 8},
        "lora": {"model.lora": {"rank": 2}},
        "lora-int8": {"model.lora": {"rank": 2}, "model.load": "int8"},
        "dora-nf4": {"model.lora": {"rank": 2, "dora": True, "rslora": True}, "model.load": "nf4"},
    },
    "router": {
        "switch": {},
        "gshard": {"model.experts.router": "gshard"},
        "hash": {"model.experts.router": "hash"},
        "stochastic": {"model.experts.router": "stochastic"},
        "sigmoid-bias": {"model.experts.router": "sigmoid-bias"},
    },
    "experts": {
        "plain": {},
        "shared": {
            "model.experts.shared_size": 16,
            "model.experts.shared_gate": True,
            "model.experts.capacity_factor": None,
            "model.qk_norm": "head",
        },
        "fine": {
            "model.experts.count": 8,
            "model.experts.per_token": 4,
            "model.experts.intermediate_size": 16,
            "model.experts.dense_layers": 1,
            "model.experts.scores": "sigmoid",
            "model.experts.normalise_gates": False,
            "model.qk_norm": "width",
        },
        "mtp": {"model.mtp.enabled": True},
    },
    "optimizer": {
        "AdamW": {},
        "SGD": {"training.optimizer.name": "SGD"},
        "Muon": {"training.optimizer.name": "Muon"},
        "fp8-moments": {"training.optimizer.moments": "fp8"},
    },
    "schedule": {"constant": {}, "wsd": {"training.schedule.kind": "wsd", "training.schedule.decay_steps": 1}},
    "ema": {"off": {}, "on": {"training.ema.decay": 0.5}},
    "best": {"off": {}, "on": {"training.early_stopping.patience": 2}},
    "accumulation": {"off": {}, "on": {"training.gradient_accumulation_steps": 2, "training.gradient_health.enabled": True}},
    "engine": {
        "single": {},
        "ddp": _SEVERAL | {"engine.kind": "ddp"},
        "fsdp": _SEVERAL | {"engine.kind": "fsdp"},
        "fsdp-experts": _SEVERAL | {"engine.kind": "fsdp", "engine.expert_parallel": 2},
        "deepspeed": _SEVERAL | {"engine.kind": "deepspeed", "engine.zero_stage": 2},
        "deepspeed-3": _SEVERAL | {"engine.kind": "deepspeed", "engine.zero_stage": 3},
        "pipeline": _SEVERAL | {"engine.kind": "pipeline", "engine.micro_batches": 2},
        "collectives": _SEVERAL | {"engine.kind": "collectives"},
    },
    "strategy": {
        "local": {},
        "workunits": {"strategy.kind": "workunits", "strategy.units_per_update": 2, "strategy.batches_per_unit": 1},
        "workunits-no-lag": {
            "strategy.kind": "workunits",
            "strategy.units_per_update": 2,
            "strategy.batches_per_unit": 1,
            "strategy.max_lag": 0,
        },
        "edp": {"strategy.kind": "edp"},
        "syncps": {"strategy.kind": "syncps"},
        "async": {"strategy.kind": "async"},
        "diloco": {"strategy.kind": "diloco", "strategy.inner_steps": 2},
        "rollouts": {"strategy.kind": "rollouts", "strategy.prompts_per_unit": 1},
    },
    "codec": {
        "none": {},
        "fp16": {"updates.codec": {"kind": "fp16"}},
        "int8": {"updates.codec": {"kind": "int8"}},
        "int4": {"updates.codec": {"kind": "int4"}},
        "ternary": {"updates.codec": {"kind": "ternary"}},
        "topk": {"updates.codec": {"kind": "topk", "ratio": 0.1}},
        "chunks": {"updates.codec": {"kind": "topk", "ratio": 0.1, "chunk": 256, "values": "2-bit"}},
    },
    "rule": {
        "mean": {},
        "median": {"updates.aggregation": {"kind": "median"}},
        "clipping": {"updates.aggregation": {"kind": "centered-clipping"}},
        "buckets": {"updates.aggregation": {"kind": "geometric-median"}, "updates.mixing": {"kind": "bucketing", "size": 2}},
    },
    "privacy": {
        "off": {},
        "contribution": {"updates.privacy.enabled": True, "updates.clip_norm": 1.0},
        "sample": {"updates.privacy.enabled": True, "updates.privacy.unit": "sample", "updates.clip_norm": 1.0},
    },
    "scorer": {"off": {}, "on": {"updates.scorer": {"enabled": True, "batches": 1, "share": 1.0}}},
    "transport": {"zmq": {}, "xmlrpc": {"transport.kind": "xmlrpc"}, "postgres": {"transport": {"kind": "postgres", "host": "embedded"}}},
    "scheduler": {"none": {}, "priority": {"scheduler.kind": "priority"}, "gale-shapley": {"scheduler.kind": "gale-shapley"}},
}

DEFAULTS: Row = {factor: next(iter(values)) for factor, values in FACTORS.items()}


def settings_of(row: Row) -> dict[str, Any]:
    """The settings of a row, as the nested mapping that a file holds. The values of later factors replace those of earlier ones."""
    flat: dict[str, Any] = dict(BASE)
    for factor, values in FACTORS.items():
        flat.update(values[row[factor]])
    if row["strategy"] != "local":
        flat["cluster.num_workers"] = 2 if row["rule"] == "mean" else 3
    return nested({path: value for path, value in flat.items() if value is not None})


def nested(flat: Settings) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, name = path.split(".")
        section = result
        for folder in folders:
            section = section.setdefault(folder, {})
        section[name] = value
    return result


def pairs_of(row: Row) -> list[tuple[str, str, str, str]]:
    """All pairs of values of a row: factor, value, factor, value."""
    names: Sequence[str] = list(FACTORS)
    return [(one, row[one], other, row[other]) for place, one in enumerate(names) for other in names[place + 1 :]]
