"""What must hold between settings: each rule, seen to fail and to hold, with the lines it names."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.config.derived_values import quorum, tolerated
from shoal.config.dialects import native_paths
from shoal.config.load import ConfigFile, LoadedConfig, parse_override, resolve
from shoal.config.missing_parts import missing_workers
from shoal.config.problems import render
from shoal.config.rules import RULES
from shoal.config.rules import rule as rules
from shoal.config.rules.rule import Rule
from shoal.config.rules.unused_settings import NO_EFFECT
from shoal.config.schema.training import KEYWORDS
from shoal.config.show import explain, provenance, show
from shoal.errors import masked
from shoal.runs.folder.run_directory import settings_text

HOSTS = "cluster: {server: s, workers: [a, b], hosts: {s: {}, a: {}, b: {}}}\n"

PART = "{source: {kind: builtin, name: python-source}"

KTO = "task: {kind: dpo, loss: kto}\nmodel: {kind: gpt}\ndata: {source: {kind: preferences, path: x}}\n"
PAIRS = "task: {kind: dpo}\nmodel: {kind: gpt}\ndata: {source: {kind: preferences, path: x}}\n"
POLICY = "task: ppo\nmodel: {kind: gpt}\nrlhf: {}\n"
CONTEXTS = "data: {batching: dynamic, source: {kind: text, path: x}}\n"
CUT = "engine: {kind: pipeline}\nmodel: "
STAGES = "engine: {kind: pipeline}\nmodel: {kind: gpt}\nscheduler: "
FEW_BITS = "model: {kind: huggingface, pretrained: gpt2, load: int8, lora: {rank: 2}}\n"
OWN = "model: {kind: huggingface, pretrained: gpt2, layers: own, "
SHARED = "engine: {kind: fsdp, expert_parallel: 2}\n"
NOT_SHARED = [SHARED + f"model: {{kind: huggingface, pretrained: FOLDER, {more}}}\n" for more in ("lora: {rank: 2}", "layers: original")]
BROKEN = [
    (
        "held-in",
        "coordinator: {held_in: file}\nstrategy: {kind: syncps}\nupdates: {scorer: {enabled: true}}\n",
        ["coordinator.held_in", "updates.scorer.enabled"],
    ),
    ("held-in", "coordinator: {held_in: file}\nstrategy: {kind: diloco}\nmodel: {kind: moe}\n", ["coordinator.held_in", "model.kind"]),
    (
        "held-in",
        "coordinator: {held_in: file}\nstrategy: {kind: syncps}\nupdates: {memory: 0.9}\n",
        ["coordinator.held_in", "updates.memory"],
    ),
    ("alerts", "alerts: {webhook: 'ftp://x/y'}\n", ["alerts.webhook"]),
    ("alerts", "alerts: {link: here}\n", ["alerts.link"]),
    ("alerts", "alerts: {email: {to: [ann]}}\n", ["alerts.email.to"]),
    (
        "alerts",
        "alerts: {email: {to: [a@b.c], user: u, password: p, encryption: none, host: mail.example.org}}\n",
        ["alerts.email.encryption", "alerts.email.host"],
    ),
    ("alerts", "alerts: {email: {to: [a@b.c], user: u}}\n", ["alerts.email.to"]),
    ("tasks", STAGES + "{tasks: [{id: a, model_share: 0.7}, {id: b, model_share: 0.7}]}\n", ["scheduler.tasks", "engine.kind"]),
    ("tasks", STAGES + "{tasks: [{id: a, model_share: 1.0}, {id: b, model_share: 0.0}]}\n", ["scheduler.tasks", "engine.kind"]),
    ("tasks", STAGES + "{tasks: [{id: a, model_share: 0.5}]}\nstrategy: {kind: async}\n", ["scheduler.tasks", "engine.kind"]),
    ("scheduler", STAGES + "{kind: priority}\n", ["scheduler.kind"]),
    (
        "tasks",
        "engine: {kind: pipeline, layers: [1, 2]}\nmodel: {kind: gpt}\nscheduler: {tasks: [{id: a, model_share: 0.5}]}\n",
        ["engine.layers", "scheduler.tasks"],
    ),
    ("name", "name: a/b\n", ["name"]),
    ("name", "name: ..\n", ["name"]),
    ("name", 'name: "a\\\\b"\n', ["name"]),
    ("name", "logging: {project: ../x}\n", ["logging.project"]),
    ("name", "logging: {project: /x}\n", ["logging.project"]),
    ("engine", "strategy: {kind: async}\ntransport: {kind: in-process}\nengine: {kind: ddp}\n", ["engine.kind", "transport.kind"]),
    ("engine", "engine: {kind: deepspeed, zero_stage: 0}\n", ["engine.zero_stage"]),
    ("engine", "engine: {kind: fsdp}\ntraining: {optimizer: {name: Muon}}\n", ["training.optimizer.name", "engine.kind"]),
    ("engine", "engine: {kind: fsdp}\nmodel: {kind: dcgan}\ntask: gan\n", ["engine.kind"]),
    ("engine", CONTEXTS + CUT + "{kind: moe, cross_attention: {enabled: true}}\n", ["model.cross_attention.enabled", "engine.kind"]),
    ("engine", CUT + "{kind: moe, retrieval: {enabled: true}}\n", ["model.retrieval.enabled", "engine.kind"]),
    ("engine", CUT + "{kind: moe, episodic_memory: {enabled: true}}\n", ["model.episodic_memory.enabled", "engine.kind"]),
    ("engine", CUT + "{kind: huggingface, pretrained: gpt2, lora: {rank: 2}}\n", None),
    ("load", "model: {kind: huggingface, pretrained: gpt2, load: nf4}\n", ["model.load"]),
    ("model", "engine: {kind: fsdp}\n" + OWN + "lora: {rank: 2}}\n", ["model.layers", "engine.kind"]),
    ("model", OWN + "lora: {rank: 2, dora: true}}\n", ["model.layers", "model.lora.dora"]),
    ("model", OWN + "load: nf4, lora: {rank: 2}}\n", ["model.layers"]),
    ("gguf", "model: {kind: huggingface, pretrained: model.gguf}\n", ["model.pretrained"]),
    ("load", "engine: {kind: fsdp}\n" + FEW_BITS, ["model.load", "engine.kind"]),
    ("load", "engine: {kind: deepspeed, zero_stage: 3}\n" + FEW_BITS, ["model.load", "engine.zero_stage"]),
    ("load", "training: {precision: {kind: nvfp4}}\n" + FEW_BITS, ["training.precision.kind", "model.load"]),
    ("load", "engine: {kind: deepspeed}\ntraining: {precision: {kind: fp16}}\n" + FEW_BITS, ["training.precision.kind", "model.load"]),
    ("engine", "engine: {kind: deepspeed, zero_stage: 3}\ntraining: {compile: true}\n", ["training.compile", "engine.zero_stage"]),
    (
        "rollouts",
        "task: ppo\nmodel: {kind: gpt, max_seq_len: 48}\nrlhf: {ppo: {prompt_length: 16, response_length: 40}}\n",
        ["rlhf.ppo.response_length", "rlhf.ppo.prompt_length", "model.max_seq_len"],
    ),
    (
        "engine",
        "engine: {kind: deepspeed, zero_stage: 3, nvme_offload: true, nvme_path: x}\nlogging: {track_gradients: true}\n",
        ["logging.track_gradients", "engine.nvme_offload"],
    ),
    (
        "privacy",
        "strategy: {kind: async}\nengine: {kind: ddp}\nupdates: {clip_norm: 1.0, privacy: {enabled: true, unit: sample}}\n",
        ["updates.privacy.unit", "engine.kind"],
    ),
    ("model", "model: {kind: huggingface, pretrained: x, from_scratch: true, weights: y}\n", ["model.from_scratch", "model.weights"]),
    ("heads", "model: {kind: gpt, positions: rotary, hidden_size: 12, num_heads: 4}\n", ["model.num_heads", "model.hidden_size"]),
    ("optimizer", "training: {optimizer: {kwargs: {lr: 0.1}}}\n", ["training.optimizer.kwargs.lr"]),
    ("optimizer", "training: {optimizer: {kwargs: {bogus: 1}}}\n", ["training.optimizer.kwargs.bogus"]),
    ("optimizer", "training: {optimizer: {name: SGD, beta1: 0.8}}\n", ["training.optimizer.beta1", "training.optimizer.name"]),
    ("optimizer", "training: {optimizer: {name: SGD, eps: 1e-3}}\n", ["training.optimizer.eps", "training.optimizer.name"]),
    ("optimizer", "training: {optimizer: {momentum: 0.9}}\n", ["training.optimizer.momentum"]),
    (
        "optimizer",
        "training: {optimizer: {beta1: 0.9, kwargs: {betas: [0.8, 0.9]}}}\n",
        ["training.optimizer.kwargs.betas", "training.optimizer.beta1"],
    ),
    ("optimizer", "training: {optimizer: {name: SGD, kwargs: {nesterov: true}}}\n", ["training.optimizer.kwargs.nesterov"]),
    (
        "optimizer",
        "training: {optimizer: {name: SGD, momentum: 0.9, kwargs: {nesterov: true, dampening: 0.1}}}\n",
        ["training.optimizer.kwargs.nesterov", "training.optimizer.momentum"],
    ),
    (
        "optimizer",
        "task: gan\nmodel: {kind: dcgan}\ntraining: {players: {generator: {name: SGD, beta2: 0.9}}}\n",
        ["training.players.generator.beta2", "training.players.generator.name"],
    ),
    (
        "optimizer",
        "training: {optimizer: {moments: bf16, kwargs: {amsgrad: true}}}\n",
        ["training.optimizer.kwargs.amsgrad", "training.optimizer.moments"],
    ),
    ("optimizer", "strategy: {kind: diloco, outer: {kwargs: {bogus: 1}}}\n", ["strategy.outer.kwargs.bogus"]),
    (
        "optimizer",
        "strategy: {kind: diloco, outer: {momentum: 0.0, kwargs: {nesterov: true}}}\n",
        ["strategy.outer.kwargs.nesterov", "strategy.outer.momentum"],
    ),
    (
        "heads",
        "model: {kind: moe, num_heads: 4, hidden_size: 16, mixture_of_heads: {enabled: true, shared_heads: 4}}\n",
        ["model.mixture_of_heads.shared_heads", "model.mixture_of_heads.enabled", "model.num_heads"],
    ),
    (
        "heads",
        "model: {kind: moe, mixture_of_heads: {enabled: true, active_share: 0.01}}\n",
        ["model.mixture_of_heads.active_share", "model.mixture_of_heads.enabled"],
    ),
    (
        "memory",
        "model: {kind: moe, max_seq_len: 64, episodic_memory: {enabled: true, chunk_size: 64}}\n",
        ["model.episodic_memory.chunk_size", "model.max_seq_len", "model.episodic_memory.enabled"],
    ),
    ("data", "data: {chat_time: yesterday}\n", ["data.chat_time"]),
    (
        "model",
        "model: {kind: moe, episodic_memory: {enabled: true}}\ndata: {packing: documents}\n",
        ["data.packing", "model.episodic_memory.enabled"],
    ),
    (
        "retrieval",
        "model: {kind: moe, retrieval: {enabled: true}}\ndata: {sequence_length: 64}\n",
        ["data.sequence_length", "model.retrieval.enabled"],
    ),
    ("needs-gpu", "training: {precision: {kind: fp8}, device: cpu}\n", ["training.precision.kind", "training.device"]),
    ("device", "training: {cuda_graph: true, device: cpu}\n", ["training.cuda_graph", "training.device"]),
    ("model", "task: gan\nmodel: {kind: dcgan}\ntraining: {cuda_graph: true}\n", ["training.cuda_graph", "task"]),
    (
        "model",
        "model: {kind: moe}\ndata: {source: {kind: text, path: x, context_field: about}}\n",
        ["data.source.context_field", "model.kind"],
    ),
    (
        "stream",
        "strategy: {kind: workunits}\ndata: {streaming: true, source: {kind: builtin, name: zen}}\n",
        ["data.streaming", "strategy.kind"],
    ),
    (
        "stream",
        "strategy: {kind: syncps}\nscheduler: {kind: priority}\ndata: {streaming: true, source: {kind: builtin, name: zen}}\n",
        ["data.streaming", "scheduler.kind"],
    ),
    ("stream", "data: {streaming: true}\n", ["data.streaming"]),
    (
        "stream",
        "model: {kind: gpt}\ntraining: {max_steps: 9}\ndata: {streaming: true, tokenizer: characters}\n",
        ["data.tokenizer", "data.streaming"],
    ),
    ("stream", "model: {kind: gpt}\ndata: {streaming: true}\n", ["data.streaming"]),
    (
        "mixture",
        "data: {streaming: true, mixing: {enabled: true}, source: {kind: mixture, parts: [{source: {kind: wikitext}}]}}\n",
        ["data.source.parts", "data.streaming"],
    ),
    ("data", "model: {kind: gpt}\ndata: {source: {kind: builtin, name: digits}}\n", ["data.source.kind", "model.kind"]),
    (
        "model",
        "model: {kind: moe, cross_attention: {enabled: true}}\ndata: {batching: dynamic, source: {kind: wikitext}}\n",
        ["model.cross_attention.enabled", "data.source.kind"],
    ),
    (
        "model",
        "model: {kind: moe, cross_attention: {enabled: true}}\ndata: {source: {kind: snli}}\n",
        ["model.cross_attention.enabled"],
    ),
    ("model", "model: {kind: lstm}\ntraining: {gradient_checkpointing: true}\n", ["training.gradient_checkpointing", "model.kind"]),
    ("precision", "model: {kind: mlp}\ntraining: {precision: {kind: nvfp4}}\n", ["training.precision.kind", "model.kind"]),
    ("offload", "engine: {kind: fsdp, cpu_offload: true}\ntraining: {device: cpu}\n", ["engine.cpu_offload", "training.device"]),
    ("model", "model: {kind: huggingface, pretrained: x}\ndata: {sequence_length: 8}\nrlhf: {value: head}\n", ["rlhf.value", "model.kind"]),
    (
        "engine",
        "model: {kind: gpt}\nengine: {kind: deepspeed, zero_stage: 3}\nrlhf: {value: head}\n",
        ["rlhf.value", "engine.zero_stage"],
    ),
    (
        "engine",
        "model: {kind: gpt}\nengine: {kind: deepspeed, zero_stage: 3, nvme_offload: true, nvme_path: x}\nrlhf: {algorithm: ppo}\n",
        ["engine.nvme_offload"],
    ),
    (
        "strategy",
        "model: {kind: moe, experts: {router: sigmoid-bias}}\nrlhf: {algorithm: rloo}\nstrategy: {kind: rollouts}\n",
        ["model.experts.router", "strategy.kind"],
    ),
    ("heads", "model: {kind: gpt, hidden_size: 100, num_heads: 3}\n", ["model.num_heads", "model.hidden_size"]),
    ("heads", "model: {kind: gpt, num_heads: 4, num_kv_heads: 3}\n", ["model.num_kv_heads", "model.num_heads"]),
    ("router", "model: {kind: moe, experts: {router: expert-choice}}\n", ["model.experts.router"]),
    ("router", "model: {kind: moe, experts: {router: soft}}\n", ["model.experts.router"]),
    ("router", "model: {kind: moe, experts: {router: gshard, per_token: 1}}\n", ["model.experts.per_token", "model.experts.router"]),
    ("experts", "model: {kind: moe, num_layers: 2, experts: {dense_layers: 2}}\n", ["model.experts.dense_layers", "model.num_layers"]),
    (
        "router",
        "model: {kind: moe, experts: {router: sigmoid-bias, scores: softmax}}\n",
        ["model.experts.scores", "model.experts.router"],
    ),
    (
        "router",
        "model: {kind: moe, experts: {per_token: 1, normalise_gates: true}}\n",
        ["model.experts.normalise_gates", "model.experts.per_token"],
    ),
    (
        "router",
        "model: {kind: moe, experts: {router: gshard, normalise_gates: false}}\n",
        ["model.experts.normalise_gates", "model.experts.router"],
    ),
    (
        "mtp",
        "task: dpo\ndata: {source: {kind: preferences, path: p.jsonl}}\nmodel: {kind: moe, mtp: {enabled: true}}\n",
        ["model.mtp.enabled", "task"],
    ),
    ("mtp", "engine: {kind: pipeline}\nmodel: {kind: moe, mtp: {enabled: true}}\n", ["model.mtp.enabled", "engine.kind"]),
    (
        "mtp",
        "model: {kind: moe, mtp: {enabled: true}, episodic_memory: {enabled: true}}\n",
        ["model.mtp.enabled", "model.episodic_memory.enabled"],
    ),
    ("experts", "model: {kind: moe, experts: {count: 2, per_token: 3}}\n", ["model.experts.per_token", "model.experts.count"]),
    ("experts", "strategy: {kind: diloco, expert_weight_cap: 2}\nmodel: {kind: gpt}\n", ["strategy.expert_weight_cap", "model.kind"]),
    (
        "experts",
        "strategy: {kind: diloco, expert_weight_cap: 2}\nmodel: {kind: moe}\nupdates: {aggregation: {kind: median}}\n",
        ["strategy.expert_weight_cap", "updates.aggregation.kind"],
    ),
    (
        "experts",
        "strategy: {kind: diloco, expert_weight_cap: 2}\nmodel: {kind: moe}\nupdates: {clip_norm: 1.0, privacy: {enabled: true}}\n",
        ["strategy.expert_weight_cap", "updates.privacy.enabled"],
    ),
    (
        "not-built",
        "model: {kind: moe, episodic_memory: {enabled: true}}\ntask: ppo\nrlhf: {reward: sentiment}\nstrategy: {kind: rollouts}\n",
        ["model.episodic_memory.enabled", "strategy.kind"],
    ),
    ("held", "strategy: {kind: edp}\nmodel: {kind: gpt}\nengine: {experts: [0, 1]}\n", ["engine.experts", "model.kind"]),
    ("held", "strategy: {kind: local}\nmodel: {kind: moe}\nengine: {experts: [0, 1]}\n", ["engine.experts", "strategy.kind"]),
    (
        "held",
        "strategy: {kind: edp}\nmodel: {kind: huggingface, pretrained: x, lora: {rank: 2}}\nengine: {experts: [0, 1]}\n",
        ["engine.experts"],
    ),
    (
        "held",
        "strategy: {kind: edp}\nmodel: {kind: moe, experts: {count: 8}}\nengine: {experts: [0, 8]}\n",
        ["engine.experts", "model.experts.count"],
    ),
    ("held", "strategy: {kind: edp}\nmodel: {kind: moe}\nengine: {experts: [1, 0]}\n", ["engine.experts"]),
    (
        "held",
        "strategy: {kind: edp}\nmodel: {kind: moe, experts: {per_token: 2}}\nengine: {experts: [3]}\n",
        ["engine.experts", "model.experts.per_token"],
    ),
    (
        "held",
        "strategy: {kind: edp}\nmodel: {kind: moe, experts: {router: hash}}\nengine: {experts: [0, 1]}\n",
        ["engine.experts", "model.experts.router"],
    ),
    (
        "held",
        "strategy: {kind: diloco}\nmodel: {kind: moe}\nengine: {kind: collectives, experts: [0, 1]}\n",
        ["engine.experts", "engine.kind"],
    ),
    (
        "experts",
        "model: {kind: gpt}\nupdates: {experts_apart: true, aggregation: {kind: geometric-median}}\n",
        ["updates.experts_apart", "model.kind"],
    ),
    (
        "sequence-length",
        "model: {kind: gpt, max_seq_len: 64}\ndata: {sequence_length: 65}\n",
        ["data.sequence_length", "model.max_seq_len"],
    ),
    ("engine", "strategy: {kind: edp}\nengine: {kind: collectives}\n", ["engine.kind", "strategy.kind"]),
    ("engine", "strategy: {kind: diloco, fragments: 2}\nengine: {kind: collectives}\n", ["strategy.fragments", "engine.kind"]),
    ("engine", "strategy: {kind: diloco, overlap_steps: 2}\nengine: {kind: collectives}\n", ["strategy.overlap_steps", "engine.kind"]),
    (
        "codec",
        "updates: {codec: {kind: topk, error_feedback: false, error_decay: 0.9}}\n",
        ["updates.codec.error_decay", "updates.codec.error_feedback"],
    ),
    ("codec", "updates: {codec: {kind: topk, values: 2-bit}}\n", None),
    ("scorer", "strategy: {kind: edp}\nupdates: {scorer: {enabled: true}}\n", ["updates.scorer.enabled", "strategy.kind"]),
    (
        "scorer",
        "strategy: {kind: syncps}\nmodel: {kind: dcgan}\nupdates: {scorer: {enabled: true}}\n",
        None,
    ),
    (
        "scorer",
        "strategy: {kind: syncps}\nmodel: {kind: moe}\nupdates: {scorer: {enabled: true}}\n",
        ["updates.scorer.enabled", "model.kind"],
    ),
    (
        "rounds",
        "strategy: {kind: diloco, inner_steps: 10, rounds: 3}\ntraining: {max_steps: 40}\n",
        ["strategy.rounds", "training.max_steps"],
    ),
    ("fragments", "strategy: {kind: diloco, inner_steps: 10, fragments: 3}\n", ["strategy.fragments", "strategy.inner_steps"]),
    ("fragments", "strategy: {kind: diloco, inner_steps: 10, fragments: 2, late: weigh}\n", ["strategy.late", "strategy.fragments"]),
    (
        "fragments",
        "strategy: {kind: diloco, inner_steps: 10, fragments: 2}\nupdates: {aggregation: {kind: centered-clipping}}\n",
        ["updates.aggregation.kind", "strategy.fragments"],
    ),
    (
        "overlap",
        "strategy: {kind: diloco, inner_steps: 10, fragments: 2, overlap_steps: 5}\n",
        ["strategy.overlap_steps", "strategy.inner_steps"],
    ),
    (
        "privacy",
        "strategy: {kind: diloco}\nupdates: {clip_norm: 1.0, privacy: {enabled: true, unit: sample}}\n",
        ["updates.privacy.unit", "strategy.kind"],
    ),
    ("workers", HOSTS + "dialect: shoal\n", None),
    ("workers", "cluster: {num_workers: 3, workers: [a, b], hosts: {a: {}, b: {}}}\n", ["cluster.num_workers", "cluster.workers"]),
    ("workers", "cluster: {workers: [a, a], hosts: {a: {}}}\n", ["cluster.workers"]),
    ("hosts", "cluster: {server: z, workers: [a], hosts: {a: {memory_gb: 4}}}\n", ["cluster.server", "cluster.hosts.a.memory_gb"]),
    ("hosts", "cluster: {workers: [a, b], hosts: {a: {memory_gb: 4}}}\n", ["cluster.workers", "cluster.hosts.a.memory_gb"]),
    ("hosts", "cluster: {server: a, workers: [a], hosts: {a: {}}}\n", ["cluster.workers", "cluster.server"]),
    ("privacy", "updates: {privacy: {enabled: true}}\n", ["updates.privacy.enabled"]),
    (
        "quorum",
        "strategy: {kind: async, contributions_per_update: 6}\nupdates: {aggregation: {kind: krum, byzantine: 2}}\n",
        ["updates.aggregation.byzantine", "strategy.contributions_per_update", "updates.aggregation.kind"],
    ),
    ("quorum", "strategy: {kind: async, contributions_per_update: 10}\nupdates: {aggregation: {kind: bulyan, byzantine: 2}}\n", None),
    ("quorum", "strategy: {kind: syncps}\nupdates: {aggregation: {kind: krum, byzantine: 1}}\ncluster: {num_workers: 4}\n", None),
    (
        "quorum",
        "strategy: {kind: async, contributions_per_update: 8}\n"
        "updates: {aggregation: {kind: multi-krum, byzantine: 1}, mixing: {kind: bucketing, size: 2}}\n",
        ["updates.aggregation.byzantine", "strategy.contributions_per_update", "updates.mixing.size", "updates.aggregation.kind"],
    ),
    ("quorum", "strategy: {kind: async, contributions_per_update: 4}\nupdates: {mixing: {kind: nearest-neighbours, byzantine: 2}}\n", None),
    (
        "selection",
        "strategy: {kind: async, contributions_per_update: 9}\nupdates: {aggregation: {kind: multi-krum, byzantine: 2, select: 8}}\n",
        ["updates.aggregation.select", "strategy.contributions_per_update", "updates.aggregation.byzantine"],
    ),
    ("staleness", "strategy: {kind: async, min_staleness: 9, max_staleness: 5}\n", ["strategy.min_staleness", "strategy.max_staleness"]),
    (
        "warm-up",
        "training: {max_steps: 10, schedule: {kind: cosine, warmup_steps: 10}}\n",
        ["training.schedule.warmup_steps", "training.max_steps"],
    ),
    (
        "engine",
        "training: {optimizer: {kind: function, function: 'a:b'}}\nengine: {kind: fsdp}\n",
        ["training.optimizer.kind", "engine.kind"],
    ),
    (
        "optimizer",
        "training: {optimizer: {kind: function, function: 'a:b'}, players: {policy: {learning_rate: 0.1}}}\n",
        ["training.players.policy.learning_rate", "training.optimizer.kind"],
    ),
    ("schedule", "training: {optimizer: {learning_rate: 0.1}, schedule: {kind: cosine, end_learning_rate: 0.2}}\n", None),
    ("engine", "training: {ema: {decay: 0.9}}\nengine: {kind: deepspeed}\n", ["training.ema.decay", "engine.kind"]),
    ("best", "checkpoint: {best: loss}\nevaluation: {strategy: never}\n", ["checkpoint.best", "evaluation.strategy"]),
    ("best", "checkpoint: {best: beauty}\n", None),
    ("schedule", "training: {max_steps: 9, schedule: {kind: wsd, warmup_steps: 4, decay_steps: 6}}\n", None),
    ("batch-arithmetic", "training: {batch_size: 4, gradient_accumulation_steps: 2, global_batch_size: 12}\n", None),
    ("batch-arithmetic", "training: {batch_size: 4, global_batch_size: 12}\nlaunch: {devices_per_node: 4}\n", None),
    ("gradient-health", "training: {gradient_health: {enabled: true, initial_clip_value: 1.0, final_clip_value: 2.0}}\n", None),
    ("offload", "engine: {kind: deepspeed, zero_stage: 2, nvme_offload: true}\n", ["engine.nvme_offload", "engine.zero_stage"]),
    ("offload", "engine: {kind: deepspeed, zero_stage: 3, nvme_offload: true, cpu_offload: true}\n", None),
    ("hub", "hub: {enabled: true, repo_id: nobody, token: x}\n", ["hub.repo_id", "hub.enabled"]),
    ("weights", "serving: {weights: int8}\nmodel: {kind: moe}\n", ["serving.weights", "model.kind"]),
    ("proposals", "serving: {proposed_tokens: 4}\nmodel: {kind: lstm}\n", ["serving.proposed_tokens", "model.kind"]),
    (
        "proposals",
        "serving: {proposed_tokens: 4}\nmodel: {kind: moe, retrieval: {enabled: true}}\n",
        ["serving.proposed_tokens", "model.retrieval.enabled"],
    ),
    ("origin", 'serving: {allow_origins: ["*"]}\n', ["serving.allow_origins"]),
    ("origin", "serving: {allow_origins: [https://chat.example/]}\n", ["serving.allow_origins"]),
    ("memory", "serving: {memory: much}\n", ["serving.memory"]),
    ("memory", "serving: {memory: 8GB, num_nodes: 2}\n", ["serving.memory", "serving.num_nodes"]),
    ("nodes", "serving: {num_nodes: 4}\n" + HOSTS, ["serving.num_nodes", "cluster.workers"]),
    ("nodes", "serving: {num_nodes: 4}\nmodel: {kind: gpt, num_layers: 3}\n", ["serving.num_nodes", "model.num_layers"]),
    ("early-stopping", "training: {early_stopping: {patience: 2}}\nevaluation: {strategy: never}\n", None),
    ("no-effect", "model: {kind: gpt}\ntraining: {penalties: {eos_weight: 1.0}}\n", ["training.penalties.eos_weight"]),
    ("tasks", "strategy: {kind: async}\nscheduler: {tasks: [{id: a}, {id: a}]}\n", ["scheduler.tasks"]),
    ("expert-parallel", SHARED + "model: {kind: gpt}\n", ["engine.expert_parallel", "model.kind"]),
    ("expert-parallel", SHARED + "model: {kind: moe, experts: {count: 9}}\n", ["engine.expert_parallel", "model.experts.count"]),
    (
        "expert-parallel",
        "strategy: {kind: edp}\nmodel: {kind: moe}\nengine: {kind: fsdp, expert_parallel: 2, experts: [0, 1, 2]}\n",
        ["engine.expert_parallel", "engine.experts"],
    ),
    (
        "expert-parallel",
        SHARED + "model: {kind: moe}\nlaunch: {devices_per_node: 3}\n",
        ["engine.expert_parallel", "launch.devices_per_node"],
    ),
    (
        "expert-parallel",
        SHARED + "model: {kind: moe}\ntraining: {precision: {kind: fp8, interval: 2}, allow_emulation: true}\n",
        ["training.precision.interval", "engine.expert_parallel"],
    ),
    ("expert-parallel", SHARED + "model: {kind: huggingface, pretrained: x}\n", ["engine.expert_parallel", "model.pretrained"]),
    ("unknown-key", "model: {kind: moe}\nengine: {kind: ddp, expert_parallel: 2}\n", None),
    ("tasks", "strategy: {kind: async}\nscheduler: {kind: none, tasks: [{id: a}]}\n", ["scheduler.tasks", "scheduler.kind"]),
    ("tasks", "strategy: {kind: edp}\nscheduler: {tasks: [{id: a, data_share: 0.7}, {id: b, data_share: 0.7}]}\n", ["scheduler.tasks"]),
    ("scheduler", "strategy: {kind: diloco}\nscheduler: {kind: priority}\n", ["scheduler.kind", "strategy.kind"]),
    ("task", "task: gan\nmodel: {kind: mlp}\n", ["task", "model.kind"]),
    ("no-effect", "model: {kind: mlp}\ntraining: {penalties: {repetition_weight: 1.0}}\n", ["training.penalties.repetition_weight"]),
    ("mixture", "model: {kind: gpt}\ndata: {source: {kind: mixture, parts: []}}\n", ["data.source.parts"]),
    ("mixture", f"model: {{kind: gpt}}\ndata: {{source: {{kind: mixture, parts: [{PART}, weight: 2.0}}]}}}}\n", ["data.source.parts"]),
    (
        "mixture",
        f"model: {{kind: gpt}}\ndata: {{mixing: {{enabled: true}}, source: {{kind: mixture, parts: [{PART}, weight: 2.0}}, {PART}}}]}}}}\n",
        ["data.source.parts"],
    ),
    (
        "optimizer",
        "training: {optimizer: {name: SGD, moments: bf16}}\n",
        ["training.optimizer.moments", "training.optimizer.name"],
    ),
    ("engine", "engine: {kind: fsdp}\ntraining: {optimizer: {moments: bf16}}\n", ["training.optimizer.moments", "engine.kind"]),
    ("engine", "engine: {kind: ddp}\ntraining: {cuda_graph: true}\n", ["training.cuda_graph", "engine.kind"]),
    (
        "model",
        "training: {cuda_graph: true}\nmodel: {kind: moe, episodic_memory: {enabled: true}}\n",
        ["training.cuda_graph", "model.episodic_memory.enabled"],
    ),
    ("engine", "engine: {kind: pipeline}\nmodel: {kind: mlp}\n", ["engine.kind", "model.kind"]),
    ("engine", "engine: {kind: pipeline}\nmodel: {kind: gpt}\ntraining: {compile: true}\n", ["training.compile", "engine.kind"]),
    (
        "cannot-serve",
        "data: {source: {kind: images, path: x, serve: true}}\nstrategy: {kind: async}\n",
        ["data.source.serve", "strategy.kind"],
    ),
    ("task", "task: dpo\nmodel: {kind: gpt}\ndata: {source: {kind: builtin, name: zen}}\n", ["task", "data.source.kind"]),
    ("engine", PAIRS + "engine: {kind: pipeline}\n", ["engine.kind", "task.kind"]),
    ("strategy", POLICY + "strategy: {kind: async}\n", ["strategy.kind", "task"]),
    ("strategy", "task: language-modelling\nmodel: {kind: gpt}\nstrategy: {kind: rollouts}\n", ["strategy.kind", "task"]),
    ("strategy", POLICY + "strategy: {kind: rollouts}\nupdates: {clip_norm: 1.0}\n", ["updates.clip_norm", "strategy.kind"]),
    (
        "rollouts",
        POLICY + "strategy: {kind: rollouts, prompts_per_unit: 3}\n",
        ["rlhf", "strategy.prompts_per_unit"],
    ),
    ("task", "task: ppo\nmodel: {kind: gpt}\n", ["task"]),
    ("reward", "task: ppo\nmodel: {kind: gpt}\nrlhf: {reward: {kind: exact}}\n", ["rlhf.reward.kind"]),
    ("reward", "task: ppo\nmodel: {kind: gpt}\nrlhf: {reward: {kind: sum, parts: [{reward: exact}]}}\n", ["rlhf.reward.kind"]),
    ("reward", "task: ppo\nmodel: {kind: gpt}\nrlhf: {reward: {kind: sum, parts: [{reward: trained}]}}\n", ["rlhf.reward.kind"]),
    (
        "reward",
        "task: ppo\nmodel: {kind: gpt}\nrlhf: {reward: {kind: sum, parts: [{reward: sentiment}], runs: [one]}}\n",
        ["rlhf.reward.runs"],
    ),
    (
        "reward",
        "task: ppo\nmodel: {kind: gpt}\n"
        "rlhf: {reward: {kind: sum, parts: [{reward: {kind: sum, parts: [{reward: sentiment}], runs: [one]}}]}}\n",
        ["rlhf.reward.parts"],
    ),
    ("task", PAIRS.replace("kind: dpo", "kind: dpo, label_smoothing: 0.6"), ["task.label_smoothing"]),
    ("task", KTO + "training: {batch_size: 1}\n", ["training.batch_size", "task.loss"]),
    (
        "task",
        KTO.replace("loss: kto", "loss: kto, desirable_weight: 0, undesirable_weight: 0"),
        ["task.desirable_weight", "task.undesirable_weight"],
    ),
    (
        "model",
        KTO.replace("kind: gpt", "kind: moe, retrieval: {enabled: true}"),
        ["model.retrieval.enabled", "task.loss"],
    ),
    (
        "privacy",
        KTO + "strategy: {kind: syncps}\nupdates: {clip_norm: 1, privacy: {enabled: true, unit: sample}}\n",
        ["updates.privacy.unit", "task.loss"],
    ),
    (
        "router",
        "model: {kind: moe, experts: {router: sigmoid-bias}}\nupdates: {clip_norm: 1.0, privacy: {enabled: true}}\n",
        ["model.experts.router", "updates.privacy.enabled"],
    ),
    (
        "memory",
        "model: {kind: moe, episodic_memory: {enabled: true}}\nupdates: {clip_norm: 1.0, privacy: {enabled: true}}\n",
        ["model.episodic_memory.enabled", "updates.privacy.enabled"],
    ),
]


def load(tmp_path: Path, text: str) -> LoadedConfig:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return resolve([ConfigFile(str(file))], dialect="shoal", environ={})


@pytest.mark.parametrize(("code", "text", "paths"), [case for case in BROKEN if "dialect: shoal" not in case[1]])
def test_a_broken_rule_is_an_error_with_its_places(tmp_path: Path, code: str, text: str, paths: list[str] | None) -> None:
    loaded = load(tmp_path, text)
    assert [problem.code for problem in loaded.problems if problem.severity == "error"] == [code], render(loaded.problems)
    (problem,) = (problem for problem in loaded.problems if problem.code == code)
    assert problem.labels
    assert all(label.span.line for label in problem.labels)
    if paths is not None:
        assert [label.text.strip("`") for label in problem.labels] == paths


def test_experts_of_a_folder_are_shared_but_not_under_lora(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_experts": 8}')
    assert load(tmp_path, SHARED + f"model: {{kind: huggingface, pretrained: '{tmp_path}'}}\n").ok
    for text in NOT_SHARED:
        loaded = load(tmp_path, text.replace("FOLDER", f"'{tmp_path}'"))
        assert [problem.code for problem in loaded.problems if problem.severity == "error"] == ["expert-parallel"]


def test_the_same_files_mended_load(tmp_path: Path) -> None:
    for text in (
        HOSTS,
        "strategy: {kind: diloco, quorum: 2}\nengine: {kind: collectives}\nupdates: {codec: {kind: int8}, clip_norm: 1.0}\n",
        "updates: {privacy: {enabled: true}, clip_norm: 1.0}\n",
        "strategy: {kind: async, contributions_per_update: 7}\nupdates: {aggregation: {kind: krum, byzantine: 2}}\n",
        "strategy: {kind: async, contributions_per_update: 11}\nupdates: {aggregation: {kind: bulyan, byzantine: 2}}\n",
        "training: {max_steps: 11, schedule: {kind: cosine, warmup_steps: 10}}\n",
        "training: {batch_size: 4, gradient_accumulation_steps: 2, global_batch_size: 16}\n",
        "training: {batch_size: 4, global_batch_size: 16}\nlaunch: {devices_per_node: 4}\n",
        "engine: {kind: deepspeed, zero_stage: 3, nvme_offload: true}\n",
        "training: {optimizer: {name: SGD, momentum: 0.9, kwargs: {nesterov: true}}}\n",
        "task: gan\nmodel: {kind: dcgan}\n"
        "training: {optimizer: {momentum: 0.9}, players: {generator: {name: SGD}, discriminator: {name: SGD}}}\n",
        "model: {kind: moe, retrieval: {enabled: true, chunk_size: 32}}\ndata: {sequence_length: 64}\n",
        "model: {kind: moe, mixture_of_heads: {enabled: true}}\n",
        SHARED + "model: {kind: moe, experts: {count: 8}, mixture_of_heads: {enabled: true}}\nlaunch: {devices_per_node: 2, nodes: 3}\n",
        "training: {cuda_graph: true}\n",
        "serving: {num_nodes: 3}\n" + HOSTS,
        "scheduler: {tasks: [{id: a}, {id: b}]}\nstrategy: {kind: async}\n",
    ):
        assert load(tmp_path, text).ok, text


def test_the_keywords_of_optimizers_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for name, keywords in KEYWORDS.items():
        assert {"params", "lr", *keywords} == set(inspect.signature(getattr(torch.optim, name)).parameters), name


def test_keywords_of_the_inner_optimizer_are_refused_in_the_users_own_words(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model_name: x\ndataset_name: y\ninner_opt_kwargs: {bogus: 1}\n")
    (problem,) = resolve([ConfigFile(str(tmp_path / "run.yaml"))], dialect="diloco", environ={}).problems
    assert (problem.code, problem.message, problem.labels[0].text) == ("optimizer", "AdamW takes no `bogus`", "`inner_opt_kwargs.bogus`")


def test_rules_run_though_other_settings_are_wrong(tmp_path: Path) -> None:
    loaded = load(tmp_path, "seed: x\nmodel: {kind: gpt, hidden_size: 100, num_heads: 3, dropout: 7}\n")
    assert {problem.code for problem in loaded.problems} == {"wrong-type", "out-of-range", "heads"}


WARNED = [
    "training: {schedule: {warmup_steps: 9}, scheduler: {kind: function, function: 'a:b'}}\n",
    "strategy: {kind: async}\nscheduler: {kind: priority, tasks: [{id: a, required_flops: 5}]}\n",
    "model: {kind: moe, episodic_memory: {enabled: true}}\ntask: dpo\ndata: {source: {kind: preferences, path: x}}\n",
    "task: gan\nmodel: {kind: dcgan}\ntraining: {optimizer: {learning_rate: 0.1}, players: {generator: {learning_rate: 0.1}, "
    "discriminator: {learning_rate: 0.2}}}\n",
    "training: {precision: {kind: fp8}, allow_emulation: true}\n",
    POLICY.replace("kind: gpt", "kind: gpt, dropout: 0.1"),
    "strategy: {kind: workunits, units_per_update: 9}\ntransport: {kind: postgres}\ncluster: {num_workers: 4}\n",
    "strategy: {kind: edp}\ntraining: {polyak_alpha: 0.5}\n",
    "strategy: {kind: diloco, grace_s: 5.0}\n",
    "strategy: {kind: diloco, overlap_blend: 0.3}\n",
    "strategy: {kind: diloco, quorum: 1, late: weigh}\n",
    PAIRS.replace("kind: dpo", "kind: dpo, gamma: 1"),
    PAIRS.replace("kind: dpo", "kind: dpo, undesirable_weight: 2"),
    PAIRS.replace("kind: dpo", "kind: dpo, loss: ipo, label_smoothing: 0.1"),
    "data: {loader: {prefetch_factor: 4}}\n",
    "evaluation: {strategy: never, batch_size: 7}\n",
    "training: {schedule: {end_learning_rate: 1e-5}}\n",
    "training: {schedule: {cycles: 3}}\n",
    "training: {ema: {warmup: false}}\n",
    "engine: {kind: deepspeed, stage3_max_live_parameters: 7}\n",
    "strategy: {kind: syncps}\ncluster: {num_workers: 2}\nupdates: {aggregation: {kind: trimmed-mean}}\n",
    "strategy: {kind: async, contributions_per_update: 2}\nupdates: {aggregation: {kind: median}}\n",
    "strategy: {kind: syncps}\nmodel: {kind: moe}\nupdates: {experts_apart: true}\n",
    "model: {kind: moe, cross_attention: {every_layers: 1}}\n",
    "engine: {kind: pipeline}\nmodel: {kind: gpt}\nscheduler: {tasks: [{id: a, data_share: 0.5}]}\n",
    "model: {kind: moe, experts: {router: hash, aux_loss_weight: 0.5}}\n",
    "model: {kind: moe, experts: {router: hash, z_loss_weight: 0.1}}\n",
    "model: {kind: moe, experts: {bias_step: 0.01}}\n",
    "model: {kind: moe, experts: {shared_gate: true}}\n",
    "model: {kind: moe, mtp: {loss_weight: 0.1}}\n",
    "model: {kind: moe, experts: {router: hash, scores: softmax}}\n",
    "model: {kind: moe, experts: {router: hash, normalise_gates: false}}\n",
    "model: {kind: moe, retrieval: {top_k: 2}}\n",
    "model: {kind: moe, retrieval: {passages: texts}}\n",
    "model: {kind: moe, episodic_memory: {capacity: 5}}\n",
    "model: {kind: moe, episodic_memory: {replay_weight: 2.0}}\n",
    "model: {kind: moe, episodic_memory: {enabled: true, replay_rate: 0.0, replay_weight: 2.0}}\n",
    "model: {kind: moe, mixture_of_heads: {active_share: 0.5}}\n",
    "model: {kind: gpt}\ntraining: {penalties: {repetition_window: 9}}\n",
]


@pytest.mark.parametrize("text", WARNED)
def test_what_is_probably_not_meant_is_told(tmp_path: Path, text: str) -> None:
    loaded = load(tmp_path, text)
    assert loaded.ok
    assert [problem.severity for problem in loaded.problems] == ["warning"]


def test_settings_of_parts_that_are_on_say_nothing(tmp_path: Path) -> None:
    for text in (
        "strategy: {kind: diloco, inner_steps: 100}\ncheckpoint: {every_steps: 30}\n",
        "model: {kind: moe, experts: {router: sigmoid-bias, bias_step: 0.01, aux_loss_weight: 0.5, z_loss_weight: 0.1}}\n",
        "model: {kind: moe, retrieval: {enabled: true, top_k: 2}, cross_attention: {every_layers: 1}}\n",
        "model: {kind: moe, episodic_memory: {enabled: true, capacity: 5, replay_weight: 2.0}, cross_attention: {encoder_layers: 2}}\n",
        "model: {kind: moe, mixture_of_heads: {enabled: true, active_share: 0.5}}\n",
        "model: {kind: moe, mixture_of_heads: {enabled: false, active_share: 0.75}}\n",
        "model: {kind: gpt}\ntraining: {penalties: {repetition_weight: 0.1, repetition_window: 9}}\n",
        "engine: {kind: pipeline}\nmodel: {kind: gpt}\nstrategy: {kind: async}\nscheduler: {tasks: [{id: a}, {id: b}]}\n",
    ):
        assert load(tmp_path, text).problems == [], text


def test_rounds_and_steps_follow_from_each_other(tmp_path: Path) -> None:
    def lengths(text: str) -> tuple[int | None, int | None]:
        run = load(tmp_path, text).run
        return run.strategy.rounds, run.training.max_steps  # type: ignore[union-attr]

    assert lengths("strategy: {kind: diloco, inner_steps: 10}\n") == (10, 100)
    assert lengths("strategy: {kind: diloco, inner_steps: 10, rounds: 3}\n") == (3, 30)
    assert lengths("strategy: {kind: diloco, inner_steps: 10}\ntraining: {max_steps: 25}\n") == (3, 25)
    assert lengths("strategy: {kind: diloco, inner_steps: 10}\ntraining: {epochs: 2}\n") == (None, None)


def test_every_rule_is_exercised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each registered rule reports something for some case above, or is one of the warnings tested below."""
    reported: set[str] = set()

    def recorded(rule: Rule) -> Rule:
        def check(settings: Any, *values: Any) -> None:
            before = len(settings.problems)
            rule.check(settings, *values)
            if len(settings.problems) > before:
                reported.add(rule.check.__name__)

        return rule._replace(check=check)

    originals = list(RULES)
    monkeypatch.setattr(rules, "RULES", [recorded(rule) for rule in originals])
    for text in [text for _, text, _ in BROKEN] + WARNED + NOT_SHARED:
        load(tmp_path, text)
    assert reported == {rule.check.__name__ for rule in originals}


# --- across layers -----------------------------------------------------------------------------


def test_a_short_test_run_of_a_long_config_only_warns() -> None:
    """The document's own advice: try a configuration with --max_steps 100."""
    loaded = resolve([ConfigFile("gpu/base")], [parse_override("training.max_steps=100")], environ={})
    assert loaded.ok
    assert [problem.code for problem in loaded.problems] == ["warm-up"]


def test_the_settings_that_a_run_wrote_of_such_layers_load_again(tmp_path: Path) -> None:
    loaded = resolve([ConfigFile("gpu/base")], [parse_override("training.max_steps=100")], environ={})
    (tmp_path / "config.yaml").write_text(settings_text(loaded.run))
    again = resolve([ConfigFile(str(tmp_path / "config.yaml"))], environ={})
    assert again.run == loaded.run
    assert [(problem.code, problem.severity) for problem in again.problems] == [("warm-up", "warning")]
    more = resolve([ConfigFile(str(tmp_path / "config.yaml"))], [parse_override("training.schedule.power=2")], environ={})
    assert [problem.code for problem in more.problems] == ["warm-up", "no-effect"]


def test_a_later_layer_outdates_the_global_batch() -> None:
    """base + a100 + zero2 with --num_gpus 8, and the full stack with --batch_size 16: both are documented commands."""
    files = [ConfigFile("gpu/base"), ConfigFile("hardware/a100_80gb"), ConfigFile("distributed/deepspeed_zero2")]
    loaded = resolve(files, [parse_override("num_gpus=8")], environ={})
    assert loaded.ok
    assert loaded.run.training.global_batch_size == 4 * 8 * 8
    assert "batch-arithmetic" in [problem.code for problem in loaded.problems]
    plain = resolve(files, environ={})
    assert plain.run.training.global_batch_size == 64
    assert "batch-arithmetic" not in [problem.code for problem in plain.problems]


def test_a_documented_quorum_is_raised_with_a_warning_naming_both_lines() -> None:
    for name, needed, more in (("federated", 13, 11), ("high-security", 15, 12)):
        loaded = resolve([ConfigFile(f"dist-llm-train/{name}")], environ={})
        assert loaded.run.strategy.contributions_per_update == needed
        (problem,) = loaded.problems
        assert (problem.code, problem.severity, len(problem.labels)) == ("quorum", "warning", 2)
        (waiting,) = missing_workers(loaded)
        assert waiting.message.endswith(f"waits for {more} more")
        assert f"--workers {needed}`" in waiting.help


@pytest.mark.parametrize("strategy", ["{kind: async, contributions_per_update: 13}", "{kind: workunits, units_per_update: 13}"])
def test_check_says_how_many_workers_a_rule_needs(tmp_path: Path, strategy: str) -> None:
    """Native files too, whether they name too few workers or none."""
    text = f"strategy: {strategy}\nupdates: {{aggregation: {{kind: krum, byzantine: 5}}}}\n"
    for workers in ("", "cluster: {num_workers: 3}\n"):
        (problem,) = missing_workers(load(tmp_path, text + workers))
        assert "--workers 13`" in problem.help
    assert missing_workers(load(tmp_path, text + "cluster: {num_workers: 13}\n")) == []


def test_steps_of_a_later_layer_replace_the_epochs_of_an_earlier_one(tmp_path: Path) -> None:
    """`--max-steps 30` means 30 steps, also where the file's epochs would end before."""
    file = tmp_path / "run.yaml"
    file.write_text("training: {epochs: 3, max_steps: 40}\n")

    def length(*overrides: str) -> tuple[int | None, int | None]:
        run = resolve([ConfigFile(str(file))], [parse_override(text) for text in overrides], dialect="shoal", environ={}).run
        return run.training.epochs, run.training.max_steps

    assert length() == (3, 40), "one layer: whichever is reached first"
    assert length("training.max_steps=30") == (None, 30)
    assert length("training.max_steps=null") == (3, None)
    assert length("training.epochs=9") == (9, 40)
    assert length("training.max_steps=30", "training.epochs=9") == length("training.epochs=9", "training.max_steps=30") == (9, 30)
    preset = resolve([ConfigFile("dist-llm-train/wan-conservative")], [parse_override("training.max_steps=30")], environ={}).run
    assert (preset.training.epochs, preset.training.max_steps) == (None, 30)


@pytest.mark.parametrize(
    ("aggregation", "mixing", "count", "own", "mixed"),
    [
        ("krum", "none", 12, 3, None),
        ("krum", "none", 4, 0, None),
        ("bulyan", "none", 12, 2, None),
        ("multi-krum", "bucketing", 12, 1, None),
        ("bulyan", "nearest-neighbours", 15, 3, 3),
        ("median", "nearest-neighbours", 12, None, 3),
    ],
)
def test_the_number_of_false_contributions_that_is_left_open_is_one_that_holds(
    tmp_path: Path, aggregation: str, mixing: str, count: int, own: int | None, mixed: int | None
) -> None:
    text = f"strategy: {{kind: async, contributions_per_update: {count}}}\n"
    loaded = load(tmp_path, text + f"updates: {{aggregation: {{kind: {aggregation}}}, mixing: {{kind: {mixing}}}}}\n")
    assert loaded.ok
    assert getattr(loaded.run.updates.aggregation, "byzantine", None) == own
    assert getattr(loaded.run.updates.mixing, "byzantine", None) == mixed


@pytest.mark.parametrize("rule", ["krum", "multi-krum", "bulyan", "nearest-neighbours"])
def test_a_quorum_and_what_is_tolerated_are_each_other_s_inverse(rule: str) -> None:
    for bucket in (1, 2, 3):
        for false in range(4):
            needed = quorum(rule, false, bucket)
            assert tolerated(rule, needed, bucket) == false
            assert tolerated(rule, needed - 1, bucket) < false


def test_polyak_without_syncps_warns() -> None:
    files = [ConfigFile("smolcluster/cluster_config_edp"), ConfigFile("smolcluster/nn_config")]
    assert [problem.code for problem in resolve(files, environ={}).problems] == ["no-effect"]
    files[0] = ConfigFile("smolcluster/cluster_config_syncps")
    assert not resolve(files, environ={}).problems


def test_uploads_need_a_token(tmp_path: Path) -> None:
    loaded = load(tmp_path, "hub: {enabled: true, repo_id: teacher/gan}\n")
    assert not loaded.ok
    assert "HF_TOKEN" in loaded.problems[0].help
    assert load(tmp_path, "hub: {enabled: true, repo_id: teacher/gan, token: hf_x}\n").ok
    assert load(tmp_path, "hub: {repo_id: teacher/gan}\n").ok, "nothing is uploaded"


@pytest.mark.parametrize(
    "name", ["''", "gan", "a/b/c", "a/", "/b", "a/b c", "a/b--c", "a/-b", "a/b.", "a/b..c", "a/b.git", "é/b", "a/" + "b" * 97]
)
def test_names_that_are_no_repository(tmp_path: Path, name: str) -> None:
    loaded = load(tmp_path, f"hub: {{enabled: true, token: hf_x, repo_id: {name}}}\n")
    assert [problem.code for problem in loaded.problems] == ["hub"]


@pytest.mark.parametrize("name", ["a/b", "teacher/distributed-gan", "Some_One/model.v2-final", "a/" + "b" * 96])
def test_names_of_repositories(tmp_path: Path, name: str) -> None:
    assert load(tmp_path, f"hub: {{enabled: true, token: hf_x, repo_id: {name}}}\n").ok


# --- derived values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "batch_size", "epochs"),
    [
        ([], 32, 30),
        (["model.max_seq_len=256"], 16, 30),
        (["dataset.name=SNLI"], 32, 20),
        (["training.batch_size=5", "training.epochs=6"], 5, 6),
    ],
)
def test_auto_values_of_the_gpt_file(overrides: list[str], batch_size: int, epochs: int) -> None:
    run = resolve([ConfigFile("smolcluster/gpt_config")], [parse_override(text) for text in overrides], environ={}).run
    assert (run.training.batch_size, run.training.epochs) == (batch_size, epochs)


def test_algorithms_are_told_apart_by_their_keys() -> None:
    expected = {
        "cluster_config_edp": ("edp", "single"),
        "cluster_config_syncps": ("syncps", "single"),
        "cluster_config_mp": ("local", "pipeline"),
        "cluster_config_inference": ("local", "pipeline"),
    }
    for name, kinds in expected.items():
        run = resolve([ConfigFile(f"smolcluster/{name}")], environ={}).run
        assert (run.strategy.kind, run.engine.kind) == kinds
    assert resolve([ConfigFile("cluster_config_mp")], environ={}).run.engine.timeout_s == 300


def test_ports_may_be_a_map_by_host(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("host_ip: {s: 10.0.0.1, a: 10.0.0.1}\nport: {a: 7001, s: 7002}\nworkers: [a]\nserver: s\nnum_workers: 1\n")
    run = resolve([ConfigFile(str(file))], environ={}).run
    assert run.cluster.hosts["a"].server_port == 7001
    assert run.cluster.hosts["a"].server_address == "10.0.0.1"


def test_a_nested_and_a_flat_gpt_file_are_one(tmp_path: Path) -> None:
    file = tmp_path / "flat.yaml"
    file.write_text(
        "model_dim: 256\nnum_layers: 6\nnum_heads: 4\nff_dim: 1024\ndropout: 0.1\nmax_seq_len: 128\nbatch_size: null\nepochs: null\n"
        "learning_rate: 6e-4\nweight_decay: 0.01\ngrad_clip_norm: 1.0\nwarmup_iters: 100\nmin_lr: 6e-5\n"
        'tokenizer: "openai-community/gpt2"\n'
        'project_name: "smolcluster-gpt-wikitext2"\n'
    )
    assert resolve([ConfigFile(str(file))], environ={}).run == resolve([ConfigFile("gpt_config")], environ={}).run


def volunteers(tmp_path: Path, text: str) -> LoadedConfig:
    (tmp_path / "volunteers.yaml").write_text(text)
    return resolve([ConfigFile(str(tmp_path / "volunteers.yaml"))], dialect="dist-llm-train", environ={})


def test_a_memory_and_privacy_exclude_each_other(tmp_path: Path) -> None:
    private = "strategy: {kind: syncps}\nupdates: {privacy: {enabled: true}, clip_norm: 1.0}\n"
    text = f"model: {{kind: moe, episodic_memory: {{enabled: true}}}}\n{private}"
    (problem,) = [problem for problem in load(tmp_path, text).problems if problem.code == "memory"]
    assert "replays whole sequences" in problem.message


def test_privacy_without_a_limit_names_the_key_of_the_user_s_own_file(tmp_path: Path) -> None:
    text = "controller: {enable_differential_privacy: true, gradient_clip_norm: 0}\n"
    (problem,) = [problem for problem in volunteers(tmp_path, text).problems if problem.code == "privacy"]
    assert problem.help == "set `controller.gradient_clip_norm` above 0"
    (problem,) = load(tmp_path, "strategy: {kind: syncps}\nupdates: {privacy: {enabled: true}}\n").problems
    assert problem.help == "set `updates.clip_norm` above 0"


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("controller: {port: 8000}\n", 2),
        ("training: {num_workers: 5}\n", 5),
        ("workers: [{name: a}, {name: b}, {name: c}]\n", 3),
    ],
)
def test_a_dist_llm_train_file_has_two_workers_unless_it_says_otherwise(tmp_path: Path, text: str, workers: int) -> None:
    assert volunteers(tmp_path, text).run.cluster.num_workers == workers


def test_every_setting_that_may_have_no_effect_and_what_decides_it_are_settings() -> None:
    known = set(native_paths())
    for path, other, _, why in NO_EFFECT:
        assert path in known
        assert other in known or any(name.startswith(f"{other}.") for name in known), other
        assert why


@pytest.mark.parametrize("line", ["num_experts_per_token: 8", "per_token: 2"])
def test_how_many_experts_a_token_goes_to_is_no_secret(line: str) -> None:
    assert masked(line) == line
    assert masked("serving.api_key=abc") == "serving.api_key=********"
    assert masked("reward: {kind: http, key: abc}") == "reward: {kind: http, key: ********"
    assert masked("postgresql://ann:abc@h:1/db and ${DB_PASSWORD}") == "postgresql://ann:********@h:1/db and ${DB_PASSWORD}"
    assert masked("hub_token: hf_abc") == masked("token: hf_abc").replace("token", "hub_token", 1) == "hub_token: ********"


@pytest.mark.parametrize("typed", ["serving.api_key=a-long-secret", "serving={api_key: a-long-secret, max_running: 3}"])
def test_where_a_setting_came_from_does_not_tell_the_secret_that_was_typed(typed: str) -> None:
    loaded = resolve([ConfigFile("demo-gpt")], [parse_override(typed)], environ={})
    told = (
        json.dumps(provenance(loaded))
        + show(loaded, origin=True)
        + explain(loaded, "serving.api_key")
        + explain(loaded, "serving.max_running")
    )
    assert "command line" in told or "--set serving" in told
    assert "a-long-secret" not in told


def test_an_ava_file_that_says_how_texts_are_padded_and_cut_has_them_padded_and_cut(tmp_path: Path) -> None:
    file = tmp_path / "ava.yaml"
    for text, batching in (("padding_side: left", "dynamic"), ("truncation: false", "dynamic"), ("max_length: 64", "packed")):
        file.write_text(f"model: {{num_experts: 2}}\ndata: {{{text}}}\n")
        assert resolve([ConfigFile(str(file))], dialect="ava", environ={}).run.data.batching == batching


def test_a_later_layer_outdates_the_accumulation_of_an_earlier_one() -> None:
    """base + a100 + zero3: 12 accumulated batches are the A100's, and no number of devices makes 128 of 2 × 12."""
    files = [ConfigFile("gpu/base"), ConfigFile("hardware/a100_80gb"), ConfigFile("distributed/deepspeed_zero3")]
    torchrun = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for overrides, environ, steps in (([], {}, 64), ([parse_override("num_gpus=16")], {}, 4), ([], torchrun, 8)):
        loaded = resolve(files, overrides, environ=environ)
        assert loaded.ok, loaded.problems
        training = loaded.run.training
        assert (training.global_batch_size, training.batch_size, training.gradient_accumulation_steps) == (128, 2, steps)
        (told,) = [problem for problem in loaded.problems if problem.code == "batch-arithmetic"]
        assert told.severity == "warning"
        assert "`training.gradient_accumulation_steps` follows from it: 128 / (2 ×" in told.message


def test_a_global_batch_that_the_processes_do_not_make_says_how_many_would() -> None:
    files = [ConfigFile("gpu/base"), ConfigFile("hardware/a100_80gb"), ConfigFile("distributed/deepspeed_zero1")]
    torchrun = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    (told,) = [problem for problem in resolve(files, environ=torchrun).problems if problem.code == "batch-arithmetic"]
    assert (told.severity, told.message) == ("error", "a global batch of 32 is not 8 × 4 × 4 devices = 128")
    assert "32 fits 1 device (launch.devices_per_node) or training.gradient_accumulation_steps 1 on 4 devices" in told.help


def test_accumulation_that_nobody_gave_follows_from_the_global_batch(tmp_path: Path) -> None:
    loaded = load(tmp_path, "training: {batch_size: 4, global_batch_size: 32}\nlaunch: {devices_per_node: 2}\nengine: {kind: ddp}\n")
    assert loaded.run.training.gradient_accumulation_steps == 4
    assert not loaded.problems


def test_several_devices_for_an_engine_of_one_are_a_warning(tmp_path: Path) -> None:
    (told,) = load(tmp_path, "launch: {devices_per_node: 8}\n").problems
    assert (told.code, told.severity) == ("no-effect", "warning")
    assert "the engine single computes on one device" in told.message
    assert not load(tmp_path, "launch: {devices_per_node: 1}\n").problems


def test_experts_of_a_folder_are_shared_evenly(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_local_experts": 9}')
    found = load(tmp_path, SHARED + f"model: {{kind: huggingface, pretrained: {tmp_path}}}\n").problems
    (problem,) = [one for one in found if one.code == "expert-parallel"]
    assert problem.message == "2 devices cannot share 9 experts evenly"
    assert problem.help == "9 experts are shared by 3, 9 devices"
