"""Rules for models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.config.layers import Settings
from shoal.config.rules.rule import names_a_model, rule
from shoal.config.schema.task import Task

_MOST_OF_CONFIG = 1 << 20
"""Bytes of a model's config.json that are read."""


@rule("model.hidden_size", "model.num_heads")
def heads_divide_width(settings: Settings, width: int, heads: int) -> None:
    if width % heads:
        settings.report("heads", f"{heads} attention heads do not divide a width of {width}", "model.num_heads", "model.hidden_size")


@rule("model.num_heads", "model.num_kv_heads")
def kv_heads_divide_heads(settings: Settings, heads: int, kv_heads: int | None) -> None:
    if kv_heads and heads % kv_heads:
        message = f"{kv_heads} key and value heads do not divide {heads} attention heads"
        settings.report("heads", message, "model.num_kv_heads", "model.num_heads")


@rule("model.experts.count", "model.experts.per_token")
def enough_experts(settings: Settings, count: int, per_token: int) -> None:
    if per_token > count:
        message = f"{per_token} experts per token, of {count} experts in all"
        settings.report("experts", message, "model.experts.per_token", "model.experts.count")


@rule("model.experts.router", "model.experts.per_token")
def router_is_causal(settings: Settings, router: str, per_token: int) -> None:
    if router in ("expert-choice", "soft"):
        message = f"the router {router} looks at later tokens of a sequence, and a causal model must not; switch and the others do not"
        settings.report("router", message, "model.experts.router")
    if router == "gshard" and per_token != 2:
        message = f"the router gshard chooses 2 experts per token, not {per_token}"
        settings.report("router", message, "model.experts.per_token", "model.experts.router")


@rule("model.experts.dense_layers", "model.num_layers")
def some_layers_have_experts(settings: Settings, dense: int, layers: int) -> None:
    if dense >= layers:
        message = f"{dense} dense layers, of {layers} layers in all, leave none with experts"
        settings.report("experts", message, "model.experts.dense_layers", "model.num_layers", help="set model.kind to gpt, or lower it")


@rule("model.experts.scores", "model.experts.router")
def scores_fit_the_router(settings: Settings, scores: str | None, router: str) -> None:
    needed = {"sigmoid-bias": "sigmoid", "gshard": "softmax", "stochastic": "softmax"}.get(router, scores)
    if scores is not None and scores != needed:
        message = f"the router {router} has {needed} scores; the router switch has either"
        settings.report("router", message, "model.experts.scores", "model.experts.router")


@rule("model.experts.normalise_gates", "model.experts.router", "model.experts.per_token")
def gates_fit_the_router(settings: Settings, normalises: bool | None, router: str, per_token: int) -> None:
    if normalises and per_token == 1:
        message = "the gate of a single expert would always be 1, so the router would learn nothing from the loss"
        settings.report("router", message, "model.experts.normalise_gates", "model.experts.per_token")
    if normalises is False and router == "gshard":
        message = "the router gshard draws the second expert by its normalised gate"
        settings.report("router", message, "model.experts.normalise_gates", "model.experts.router")


@rule("model.mtp.enabled", "task", "engine.kind")
def two_tokens_are_predicted_where_tokens_are_learned(settings: Settings, ahead: bool, task: Task | None, engine: str) -> None:
    if ahead and task is not None and task.kind != "language-modelling":
        message = f"the task {task.kind} has no loss for the token after the next"
        settings.report("mtp", message, "model.mtp.enabled", "task.kind", help="set model.mtp.enabled to false")
    if ahead and engine == "pipeline":
        message = "the last stage of a pipeline has no embeddings of the tokens, which the head reads"
        settings.report("mtp", message, "model.mtp.enabled", "engine.kind")


@rule("model.mtp.enabled", "model.episodic_memory.enabled")
def replayed_tokens_have_no_weight_ahead(settings: Settings, ahead: bool, remembers: bool) -> None:
    if ahead and remembers:
        message = "sequences that a memory replays have a weight of their own, which the loss of the token after the next does not know"
        settings.report("mtp", message, "model.mtp.enabled", "model.episodic_memory.enabled")


@rule("engine.experts", "model.lora")
def all_workers_hold_frozen_experts(settings: Settings, held: tuple[int, ...] | None, lora: object) -> None:
    if held is not None and lora is not None:
        message = "LoRA trains matrices beside frozen experts, and all workers hold these"
        settings.report("held", message, "engine.experts", help="set engine.experts to null")


@rule("engine.experts", "model.kind", "strategy.kind")
def only_workers_of_a_mixture_hold_experts(settings: Settings, held: tuple[int, ...] | None, model: str, strategy: str) -> None:
    if held is not None and model not in ("moe", "huggingface"):  # a folder is known when it is read
        message = f"a model of the kind {model} has no experts: a worker holds all of it"
        settings.report("held", message, "engine.experts", "model.kind", help="set engine.experts to null")
    elif held is not None and strategy == "local":
        message = "a run without other workers needs all of its experts"
        settings.report("held", message, "engine.experts", "strategy.kind", help="set engine.experts to null")


@rule("engine.experts", "model.experts.count", "model.experts.per_token", "model.experts.router")
def held_experts_are_there(settings: Settings, held: tuple[int, ...] | None, count: int, per_token: int, router: str) -> None:
    if held is None:
        return
    if list(held) != sorted(set(held)) or not held or held[-1] >= count:
        message = f"experts are named by numbers from 0 to {count - 1}, each once and in ascending order"
        settings.report("held", message, "engine.experts", "model.experts.count")
    elif len(held) < per_token:
        message = f"each token visits {per_token} experts, and {len(held)} are held"
        settings.report("held", message, "engine.experts", "model.experts.per_token")
    elif router == "hash":
        message = "the router hash sends each token to experts of a fixed table: a worker that lacks some cannot send it to others"
        settings.report("held", message, "engine.experts", "model.experts.router")


@rule("engine.experts", "engine.kind")
def collectives_hold_all_experts(settings: Settings, held: tuple[int, ...] | None, engine: str) -> None:
    if held is not None and engine in ("collectives", "pipeline"):
        message = f"the engine {engine} holds all experts"
        settings.report("held", message, "engine.experts", "engine.kind", help="set engine.experts to null")


@rule("engine.expert_parallel", "model.kind")
def shared_experts_are_those_of_a_mixture(settings: Settings, ranks: int, model: str) -> None:
    if ranks > 1 and model not in ("moe", "huggingface") and names_a_model(settings):
        message = f"a model of the kind {model} has no experts that devices could share"
        settings.report("expert-parallel", message, "engine.expert_parallel", "model.kind", help="set engine.expert_parallel to 1")


@rule("engine.expert_parallel", "model.pretrained")
def a_folder_names_the_experts_that_are_shared(settings: Settings, ranks: int, pretrained: str) -> None:
    count = _experts_of(Path(pretrained).expanduser() / "config.json") if ranks > 1 else 0
    if ranks > 1 and count is None:
        message = f"{pretrained} is no folder here whose config.json names experts that devices could share"
        help = "set engine.expert_parallel to 1; download a mixture first, and name its folder"
        settings.report("expert-parallel", message, "engine.expert_parallel", "model.pretrained", help=help)
    elif count is not None:
        _share_evenly(settings, ranks, count, "model.pretrained")


def _experts_of(file: Path) -> int | None:
    try:
        with file.open("rb") as content:
            config = json.loads(content.read(_MOST_OF_CONFIG))
    except (OSError, ValueError, RecursionError):
        return None
    counts = [config.get(name) for name in ("num_experts", "num_local_experts")] if isinstance(config, dict) else []
    return next((count for count in counts if isinstance(count, int)), None)


@rule("engine.expert_parallel", "model.lora")
def experts_beside_adapters_are_not_shared(settings: Settings, ranks: int, lora: Any) -> None:
    if ranks > 1 and lora is not None:
        message = "under LoRA fsdp keeps the layers of transformers, whose experts devices do not share"
        settings.report(
            "expert-parallel",
            message,
            "engine.expert_parallel",
            "model.lora",
            help="set engine.expert_parallel to 1, or model.lora to null",
        )


@rule("engine.expert_parallel", "model.layers")
def layers_of_transformers_are_not_shared(settings: Settings, ranks: int, layers: str) -> None:
    if ranks > 1 and layers == "original":
        message = "devices share the experts of Shoal's own layers, not of those of transformers"
        settings.report("expert-parallel", message, "engine.expert_parallel", "model.layers", help="set model.layers to auto")


@rule("engine.expert_parallel", "model.experts.count", "engine.experts")
def experts_are_shared_evenly(settings: Settings, ranks: int, count: int, held: tuple[int, ...] | None) -> None:
    own, setting = (count, "model.experts.count") if held is None else (len(held), "engine.experts")
    _share_evenly(settings, ranks, own, setting)


def _share_evenly(settings: Settings, ranks: int, own: int, setting: str) -> None:
    if own % ranks:
        fitting = ", ".join(str(one) for one in range(2, own + 1) if own % one == 0)
        message = f"{ranks} devices cannot share {own} experts evenly"
        help = f"{own} experts are shared by {fitting} devices" if fitting else "set engine.expert_parallel to 1"
        settings.report("expert-parallel", message, "engine.expert_parallel", setting, help=help)


@rule("engine.expert_parallel", "launch.devices_per_node", "launch.nodes")
def all_devices_share_experts(settings: Settings, ranks: int, devices: int | None, nodes: int | None) -> None:
    count = devices * (nodes or 1) if devices else None
    if count is not None and count % ranks:
        message = f"{count} devices are not divided into groups of {ranks} that share the experts"
        settings.report("expert-parallel", message, "engine.expert_parallel", "launch.devices_per_node")


@rule("engine.expert_parallel", "training.precision.kind", "training.precision.interval")
def scales_of_shared_experts_hold_for_a_step(settings: Settings, ranks: int, precision: str, interval: int) -> None:
    if ranks > 1 and precision == "fp8" and interval > 1:
        message = "scales that outlast a step are those of all experts, and each device has a part of the experts"
        paths = ("training.precision.interval", "engine.expert_parallel")
        settings.report("expert-parallel", message, *paths, help="set training.precision.interval to 1")


@rule("model.experts.router", "updates.privacy.enabled")
def loads_are_private(settings: Settings, router: str, private: bool) -> None:
    if private and router == "sigmoid-bias":
        message = "the router sigmoid-bias reports the experts' loads without noise, which updates.privacy does not account for"
        settings.report("router", message, "model.experts.router", "updates.privacy.enabled")


@rule("data.sequence_length", "model.max_seq_len")
def sequence_fits_model(settings: Settings, length: int | None, longest: int) -> None:
    if length is not None and length > longest:
        message = f"sequences of {length} tokens do not fit a model that takes {longest}"
        settings.report("sequence-length", message, "data.sequence_length", "model.max_seq_len")


@rule("model.episodic_memory.enabled", "updates.privacy.enabled")
def a_memory_keeps_no_secrets(settings: Settings, remembers: bool, private: bool) -> None:
    if remembers and private:
        message = "an episodic memory keeps and replays whole sequences, which updates.privacy does not account for"
        settings.report("memory", message, "model.episodic_memory.enabled", "updates.privacy.enabled")


@rule("model.mixture_of_heads.enabled", "model.mixture_of_heads.active_share", "model.mixture_of_heads.shared_heads", "model.num_heads")
def some_heads_are_chosen(settings: Settings, mixes: bool, share: float, shared: int | None, heads: int) -> None:
    always = max(1, heads // 4) if shared is None else shared
    if mixes and (always >= heads or round(share * heads) <= always):
        message = f"{share:.0%} of {heads} heads, of which {always} are active for every token, leave none to choose"
        paths = tuple(f"model.mixture_of_heads.{name}" for name in ("active_share", "shared_heads", "enabled"))
        settings.report("heads", message, *paths, "model.num_heads", help="raise active_share, or lower shared_heads")


@rule("model.episodic_memory.enabled", "model.episodic_memory.chunk_size", "model.max_seq_len")
def what_is_recalled_is_read(settings: Settings, remembers: bool, chunk: int, longest: int) -> None:
    if remembers and chunk >= longest:
        message = f"what a chunk of {chunk} tokens recalls is read by the tokens after it, and a sequence has {longest} at most"
        paths = ("model.episodic_memory.chunk_size", "model.max_seq_len", "model.episodic_memory.enabled")
        settings.report("memory", message, *paths, help=f"set `{settings.spelling(paths[0])}` lower")


@rule("model.retrieval.enabled", "model.retrieval.chunk_size", "data.sequence_length")
def what_is_found_is_read(settings: Settings, retrieves: bool, chunk: int, length: int | None) -> None:
    if retrieves and length is not None and chunk >= length:
        message = f"what is found for a chunk is read by those after it, and a sequence of {length} tokens has one chunk of {chunk}"
        paths = ("model.retrieval.chunk_size", "data.sequence_length", "model.retrieval.enabled")
        settings.report("retrieval", message, *paths, help=f"set `{settings.spelling(paths[0])}` lower")


@rule("model.from_scratch", "model.weights")
def weights_are_fresh_or_given(settings: Settings, from_scratch: bool, weights: str | None) -> None:
    if from_scratch and weights is not None:
        settings.report("model", "fresh weights and given ones contradict each other", "model.from_scratch", "model.weights")


@rule("model.pretrained")
def training_starts_from_a_folder(settings: Settings, pretrained: str) -> None:
    if pretrained.endswith(".gguf"):
        message = f"{pretrained} is a GGUF file, and training starts from a folder of Hugging Face"
        help = f"write one with `shoal export {pretrained} FOLDER`, and name it here"
        settings.report("gguf", message, "model.pretrained", help=help)


@rule("model.positions", "model.hidden_size", "model.num_heads")
def rotary_positions_turn_pairs(settings: Settings, positions: str, width: int, heads: int) -> None:
    if positions == "rotary" and width % heads == 0 and (width // heads) % 2:
        message = f"rotary positions turn pairs, and a head has {width // heads} numbers ({width} / {heads})"
        paths = ("model.num_heads", "model.hidden_size")
        settings.report("heads", message, *paths, help="choose sizes with an even quotient, or model.positions: learned")
