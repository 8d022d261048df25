"""Mixtures of Hugging Face by Shoal's own layers, and Shoal's mixtures as models of Hugging Face: logits, learning, names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config.data_shapes import DataShapes
from shoal.config.load import resolve_data
from shoal.config.schema import model as schema
from shoal.engines import SingleEngine
from shoal.errors import ShoalError
from shoal.models import build
from shoal.models.huggingface.adapted_gpt import AdaptedMoe
from shoal.models.huggingface.as_gpt import as_huggingface, gpt_conversion, weights_for
from shoal.models.huggingface.from_gpt import as_transformers
from shoal.models.huggingface.gpt_description import describe, described
from shoal.models.huggingface.model import HuggingFace
from shoal.models.huggingface.tensor_names import stacked_experts
from shoal.models.moe import Moe
from shoal.models.stages import required_tensors
from shoal.serve.nodes.weights import WeightStore
from shoal.tasks.language import LanguageModelling

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "intermediate_size": 24},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 12,
        "intermediate_size": 24,
        "head_dim": 16,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 12},
}


def made(kind: str, **settings: Any) -> HuggingFace:
    torch.manual_seed(2)
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **none, **FAMILIES[kind], **settings})
    model = HuggingFace(transformers.AutoModelForCausalLM.from_config(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def network(folder: Path, precision: str = "fp32", **model: Any) -> Any:
    settings = {
        "model": {"kind": "huggingface", "pretrained": str(folder), **model},
        "data": {"sequence_length": 16},
        "training": {"device": "cpu", "precision": {"kind": precision}},
    }
    run = resolve_data(settings, name="test", dialect="shoal", environ={}).run
    return build(run, DataShapes(vocab_size=50))["model"]


def tokens(rows: int = 2, length: int = 20) -> Tensor:
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", FAMILIES)
@torch.inference_mode()
def test_our_layers_give_the_logits_of_a_mixtures_own(kind):
    model = made(kind)
    found = gpt_conversion(model)
    assert found is not None
    assert found.trains_alike
    ours, ids_BL = found.convert(model.state_dict().__getitem__), tokens()
    torch.testing.assert_close(ours(ids_BL), model(ids_BL), atol=1e-4, rtol=0)
    cache = ours.new_cache(0)
    pieces = [ours(part, cache=cache) for part in (ids_BL[:, :12], ids_BL[:, 12:13], ids_BL[:, 13:])]
    torch.testing.assert_close(torch.cat(pieces, 1), model(ids_BL), atol=1e-4, rtol=0)
    there = described(describe(found))  # on another machine, without transformers
    torch.testing.assert_close(there.convert(model.state_dict().__getitem__)(ids_BL), ours(ids_BL))
    back = weights_for(model, ours.state_dict())
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("olmoe", {"clip_qkv": 5.0}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}),
        ("qwen3_moe", {"attention_bias": True}),
        ("mixtral", {"sliding_window": 5}),
        ("mixtral", {"num_experts_per_tok": 1}),
    ],
)
def test_a_mixture_that_computes_otherwise_keeps_its_own_layers(kind, settings):
    assert gpt_conversion(made(kind, **settings)) is None


def test_a_mixture_whose_router_adds_noise_in_training_keeps_its_own_layers(tmp_path):
    made("mixtral", router_jitter_noise=0.1).inner.save_pretrained(tmp_path)
    assert "in training" in network(tmp_path).kept_layers


@pytest.mark.parametrize("kind", FAMILIES)
def test_both_kinds_of_layers_learn_the_same_and_write_the_same_names(tmp_path, kind):
    made(kind).inner.save_pretrained(tmp_path)
    ids = tokens(4, 13)
    batch, losses, weights = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, {}, {}
    for layers in ("own", "original"):
        settings = {
            "model": {"kind": "huggingface", "pretrained": str(tmp_path), "layers": layers},
            "training": {"device": "cpu", "optimizer": {"name": "SGD", "learning_rate": 1e-3}},
        }
        run = resolve_data(settings, name="test", dialect="shoal", environ={}).run
        engine = SingleEngine(run, LanguageModelling(build(run, DataShapes(vocab_size=50))), torch.device("cpu"), 10)
        losses[layers] = [float(engine.step([batch]).metrics["loss"]) for _ in range(3)]
        model: Any = engine.task.players["model"]
        assert isinstance(model, Moe if layers == "own" else HuggingFace)
        written = as_huggingface(model) if layers == "own" else model
        weights[layers] = written.state_dict()
        written.save(tmp_path / layers)
    assert losses["own"] == pytest.approx(losses["original"], rel=1e-5)
    assert weights["own"].keys() == weights["original"].keys()
    for name, value in weights["own"].items():
        torch.testing.assert_close(value, weights["original"][name], atol=2e-5, rtol=1e-5)
    names = [tensor_names(tmp_path / layers) for layers in ("own", "original")]
    assert names[0] == names[1] == tensor_names(tmp_path)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_server_reads_the_experts_from_their_files_layer_by_layer(tmp_path, kind):
    model = made(kind)
    model.inner.save_pretrained(tmp_path)
    tensors, conversion = WeightStore.of_folder(tmp_path, "inner."), gpt_conversion(model)
    assert conversion is not None
    for name in required_tensors(conversion.make()):
        for source in conversion.sources(name):
            assert source in tensors
            assert torch.equal(tensors.get(source), model.state_dict()[source])
            assert tensors.stored_type(source) == torch.float32


def test_stacks_whose_experts_are_not_all_there_are_not_made():
    names = [f"model.layers.0.mlp.experts.{number}.{part}.weight" for number in (0, 2) for part in ("gate_proj", "up_proj", "down_proj")]
    assert stacked_experts(names) == {}
    gate_up = {"model.layers.0.mlp.experts.gate_up_proj": [tuple(names[:2])]}
    assert stacked_experts([*names[:2], "model.layers.0.mlp.gate.weight"]) == gate_up


def tensor_names(folder: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("kind", FAMILIES)
def test_lora_of_the_attention_gives_the_same_logits_beside_both_kinds_of_layers(tmp_path, kind):
    made(kind).inner.save_pretrained(tmp_path)
    ids_BL, logits = tokens(), []
    for layers in ("own", "original"):
        model = network(tmp_path, layers=layers, lora={"rank": 2}).eval()
        assert isinstance(model, AdaptedMoe if layers == "own" else HuggingFace)
        learned = {name: one for name, one in model.named_parameters() if one.requires_grad}
        assert len(learned) == 2 * 4 * 3, "queries, keys, values and outputs of three layers"
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for one in learned.values():
                one.copy_(torch.randn(one.shape, generator=generator) * 0.1)
            logits.append(model(ids_BL))
            if isinstance(model, AdaptedMoe):
                torch.testing.assert_close(model.as_huggingface()(ids_BL), logits[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "width"), [("olmoe", "intermediate_size"), ("qwen2_moe", "moe_intermediate_size")])
def test_frozen_experts_are_stored_as_bf16(tmp_path, kind, width):
    original = made(kind, **{width: 16})
    original.inner.save_pretrained(tmp_path)
    ids_BL, logits = tokens(), []
    for layers in ("own", "original"):
        model = network(tmp_path, "bf16", layers=layers, lora={"rank": 2}, load="bf16").eval()
        assert isinstance(model, AdaptedMoe if layers == "own" else HuggingFace)
        assert {one.dtype for one in model.parameters() if one.dim() == 3} == {torch.bfloat16}
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits.append(model(ids_BL).float())
        if isinstance(model, AdaptedMoe):
            merged, stack = model.as_huggingface().merged().state_dict(), "model.layers.1.mlp.experts.gate_up_proj"
            assert torch.equal(merged[stack], original.inner.state_dict()[stack].bfloat16().float())
    assert (logits[0] - logits[1]).abs().mean() < 0.03 < logits[0].std()  # rounding sends few tokens to other experts
    with pytest.raises(ShoalError, match="experts that are stored as bf16 compute in it"):
        network(tmp_path, lora={"rank": 2}, load="bf16")
    with pytest.raises(ShoalError, match="set it to bf16"):
        network(tmp_path, "bf16", lora={"rank": 2}, load="nf4")


def test_lora_beside_the_stacked_experts_is_refused(tmp_path):
    made("qwen3_moe").inner.save_pretrained(tmp_path)
    with pytest.raises(ShoalError, match="the matrices of all experts of a layer are one tensor"):
        network(tmp_path, lora={"rank": 2, "target_modules": ["gate_proj", "up_proj", "down_proj"]})


# --- from Shoal ----------------------------------------------------------------------------------------

SMALL = schema.Moe(hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, max_seq_len=64, intermediate_size=24, norm_eps=1e-4)
FINE = schema.Experts(count=8, per_token=3, intermediate_size=12)
AS: dict[str, schema.Moe] = {
    "MixtralForCausalLM": SMALL.replace(experts=schema.Experts(count=4)),
    "Qwen2MoeForCausalLM": SMALL.replace(experts=FINE.replace(shared_size=20, shared_gate=True, dense_layers=1, normalise_gates=False)),
    "Qwen3MoeForCausalLM": SMALL.replace(qk_norm="head", experts=FINE.replace(dense_layers=1)),
    "OlmoeForCausalLM": SMALL.replace(qk_norm="width", tied_embeddings=False, experts=FINE.replace(normalise_gates=False)),
}


@pytest.mark.parametrize("name", AS)
def test_transformers_computes_what_a_mixture_of_ours_computes(tmp_path, name):
    torch.manual_seed(2)
    model = Moe(AS[name].replace(mtp=schema.Mtp(enabled=True)), 50).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        as_transformers(model, AS[name], None).save_pretrained(tmp_path)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(theirs).__name__ == name
        torch.testing.assert_close(theirs(tokens()).logits, model(tokens()), rtol=0, atol=1e-4)
        ours = network(tmp_path)
        assert isinstance(ours, Moe)
        torch.testing.assert_close(ours(tokens()), model(tokens()), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (SMALL.replace(experts=schema.Experts(count=4, router="hash", per_token=1)), "no router hash and no normalise_gates false"),
        (SMALL.replace(experts=FINE.replace(shared_size=20)), "Qwen2-MoE has no shared_gate false"),
        (SMALL.replace(experts=FINE.replace(scores="sigmoid")), "no scores sigmoid"),
        (SMALL.replace(mixture_of_heads=schema.MixtureOfHeads(enabled=True)), "no mixture_of_heads"),
    ],
)
def test_what_no_mixture_of_transformers_computes_is_not_exported_as_one(settings, reason):
    with pytest.raises(ShoalError, match=reason):
        as_transformers(Moe(settings, 50), settings, None)
