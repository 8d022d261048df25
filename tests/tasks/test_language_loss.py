"""The loss of a language model on a CPU: without padding, and with the logits of the tokens that count alone, some at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.config.schema import model as schema
from shoal.models.gpt import Gpt
from shoal.models.huggingface.frozen_weights import store_frozen
from shoal.models.huggingface.model import HuggingFace
from shoal.models.layers import documents
from shoal.models.lstm import Lstm
from shoal.models.moe import Moe
from shoal.tasks import chunked_logprobs
from shoal.tasks.base import IGNORED, Batch
from shoal.tasks.language import LanguageModelling

VOCABULARY, LENGTHS = 61, (3, 11, 7, 1)
SMALL: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 12, "dropout": 0.0}
ROTARY: dict[str, Any] = {"positions": "rotary", "feed_forward": "swiglu", "norm": "rms", "num_kv_heads": 2, "bias": False}


def llama(lora: bool = False, load: str = "fp32") -> nn.Module:
    """A model of transformers with its own layers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    inner = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=not lora, **sizes))
    if load != "fp32":
        store_frozen(inner, load)
    if lora:
        peft = pytest.importorskip("peft")
        inner = peft.get_peft_model(inner, peft.LoraConfig(r=2, init_lora_weights=False))
    return HuggingFace(inner)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "learned positions": lambda: Gpt(schema.Gpt(**SMALL), VOCABULARY),
    "rotary positions": lambda: Gpt(schema.Gpt(**SMALL, **ROTARY, tied_embeddings=False), VOCABULARY),
    "mixture": lambda: Moe(schema.Moe(**SMALL, experts=schema.Experts(count=4, capacity_factor=None)), VOCABULARY),
    "lstm": lambda: Lstm(schema.Lstm(hidden_size=16), VOCABULARY),
    "llama": llama,
    "llama, LoRA": lambda: llama(lora=True),
    "llama, LoRA over 4 bits": lambda: llama(lora=True, load="nf4"),
}


def padded(side: str = "right") -> Batch:
    """Four texts, of which every third token counts, and one no token."""
    draw = torch.Generator().manual_seed(1)
    ids_BL, labels_BL = (torch.randint(VOCABULARY, (len(LENGTHS), 11), generator=draw) for _ in range(2))
    real_BL = torch.arange(11) < torch.tensor(LENGTHS)[:, None]
    real_BL = real_BL if side == "right" else real_BL.flip(1)
    counted_BL = real_BL & (torch.arange(44).view(4, 11) % 3 == 0)
    counted_BL[3] = False
    return {"input_ids": ids_BL * real_BL, "labels": labels_BL.masked_fill(~counted_BL, IGNORED), "attention_mask": real_BL}


def loss_and_slopes(task: LanguageModelling, batch: Batch, fixed_shapes: bool) -> list[Tensor]:
    task.fixed_shapes = fixed_shapes
    (loss,) = task.losses(batch)
    parameters = [one for one in task.players["model"].parameters() if one.requires_grad]
    return [loss.value.detach(), loss.metrics["loss"].detach(), *torch.autograd.grad(loss.value, parameters, allow_unused=True)]


@pytest.mark.parametrize(("side", "dtype"), [("right", torch.float64), ("left", torch.float32)])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_whole_batches(name: str, side: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens at a time. Parts of models of transformers compute in float32 whatever they hold."""
    monkeypatch.setattr(chunked_logprobs, "_LOGITS_AT_ONCE", 3 * VOCABULARY)
    monkeypatch.setattr(documents, "_CALL_COST", 0)
    torch.manual_seed(0)
    task = LanguageModelling({"model": MODELS[name]().to(dtype).train()}, left_padding=side == "left")
    batch, most = padded(side), 1e-6 if dtype == torch.float32 or "llama" in name else 1e-12
    for one, other in zip(*(loss_and_slopes(task, batch, fixed) for fixed in (False, True)), strict=True):
        assert float((one - other).norm()) <= most * max(1.0, float(other.norm())), one.shape
    with torch.no_grad():
        found = [float(task.measure(batch)["loss"]) for task.fixed_shapes in (False, True)]
    assert found[0] == pytest.approx(found[1], rel=most)


def test_neither_padding_nor_tokens_without_a_label_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = MODELS["rotary positions"]()
    batch, product, seen = padded(), chunked_logprobs._logits, list[tuple[int, ...]]()

    def product_noted(hidden_nD: Tensor, *rest: Any) -> Tensor:
        seen.append(tuple(hidden_nD.shape))
        return product(hidden_nD, *rest)

    model.blocks[0].register_forward_hook(lambda block, given, made: seen.append(tuple(given[0].shape)))
    monkeypatch.setattr(chunked_logprobs, "_LOGITS_AT_ONCE", 3 * VOCABULARY)
    monkeypatch.setattr(chunked_logprobs, "_logits", product_noted)
    LanguageModelling({"model": model}).measure(batch)
    counted = int((batch["labels"] != IGNORED).sum())
    assert seen[0] == (1, sum(LENGTHS), 32)
    assert sum(LENGTHS) > 12, "together they are longer than the model's longest text"
    assert [rows for rows, _ in seen[1:]] == [3] * (counted // 3) + [counted % 3] * (counted % 3 > 0)


def test_models_of_transformers_read_documents_one_by_one_with_the_same_result() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    window = HuggingFace(transformers.MistralForCausalLM(transformers.MistralConfig(**small, num_key_value_heads=2, sliding_window=4)))
    scaled = HuggingFace(transformers.GraniteForCausalLM(transformers.GraniteConfig(**small, num_key_value_heads=2, logits_scaling=8.0)))
    bloom = HuggingFace(transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)))
    plain: Any = MODELS["llama"]()
    assert [one.skips_padding for one in (window, scaled, bloom, plain)] == [False, True, False, True]
    assert [one.gives_product for one in (window, scaled, bloom, plain)] == [True, False, True, True]
    assert "attn_implementation" not in plain.inner.config.to_json_string(), "an export names no function of Shoal"


def test_a_batch_in_which_no_token_counts_has_loss_0() -> None:
    task, batch = LanguageModelling({"model": MODELS["rotary positions"]()}), padded()
    batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    loss, _, *slopes = loss_and_slopes(task, batch, fixed_shapes=False)
    assert loss == 0
    assert not any(slope.any() for slope in slopes if slope is not None)
