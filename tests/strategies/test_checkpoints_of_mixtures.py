"""Mixtures of Hugging Face over workers: all weights or LoRA matrices, by workers with all experts or with some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.models.huggingface.adapted_gpt import AdaptedMoe
from shoal.models.moe import Moe
from shoal.updates.expert_subsets import size_of
from tests.strategies.test_mixtures_over_workers import MOE, STRATEGIES

PARTS = {1: ("engine.experts=[0,1,2]",), 2: ("engine.experts=[1,2,3]",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3-MoE."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 24, "norm_topk_prob": True}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.AutoConfig.for_model("qwen3_moe", vocab_size=257, max_position_embeddings=16, **sizes, **experts, **ends)
    path = tmp_path_factory.mktemp("qwen3-moe")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def settings_of(folder: Path, **model: Any) -> dict[str, Any]:
    chosen = {"kind": "huggingface", "pretrained": str(folder), **model}
    return {**MOE, "model": chosen, "data": {**MOE["data"], "tokenizer": "bytes", "sequence_length": 16}}  # type: ignore[dict-item]


def test_islands_with_some_of_the_experts_each_train_all_weights(cluster: Callable[..., Any], folder: Path) -> None:
    together = cluster(settings_of(folder), {"strategy": STRATEGIES["diloco"]}, workers=2, own=PARTS)
    assert isinstance(together.loop.engine.task.players["model"], Moe)
    blocks, whole = together.loop.coordinator.plan.experts, len(together.loop.engine.vector)
    for joined in together.workers:
        assert len(joined.worker.engine.vector) == size_of(blocks, joined.protocol.experts) < whole
    assert together.loss < 5.6


def test_islands_train_lora_matrices_beside_frozen_experts(cluster: Callable[..., Any], folder: Path) -> None:
    together = cluster(settings_of(folder, lora={"rank": 2}), {"strategy": STRATEGIES["diloco"]}, workers=2)
    model = together.loop.engine.task.players["model"]
    assert isinstance(model, AdaptedMoe)
    assert len(together.loop.engine.vector) == sum(one.numel() for one in model.parameters() if one.requires_grad) < 2000


def test_a_worker_cannot_hold_experts_that_a_folder_does_not_have(cluster: Callable[..., Any], folder: Path) -> None:
    with pytest.raises(AssertionError, match="the experts of this run have the numbers 0 to 3"):
        cluster(settings_of(folder), {"strategy": STRATEGIES["syncps"]}, workers=1, own={1: ("engine.experts=[0,9]",)})
