"""LoRA adapters beside one copy of the weights: each request gets what the model with its adapter merged gives, whatever runs beside it."""

from __future__ import annotations

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.errors import ShoalError
from shoal.models.huggingface.adapters import read_adapters
from shoal.models.huggingface.as_gpt import gpt_conversion
from shoal.models.huggingface.batched_lora import BatchedLora
from shoal.models.huggingface.model import HuggingFace
from shoal.models.packed.formats import PackedShape, packed, unpacked
from shoal.models.packed.layers import PackedLayer, pack_loaded
from shoal.serve.backend import LocalBackend
from shoal.serve.batching.batching_engine import BatchingEngine
from tests.serve.test_batching import VOCABULARY, Heard, alone, finish, job

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs the Python package peft: pip install peft")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = {
    "llama": ({"num_key_value_heads": 2}, {"target_modules": ALL}),
    "qwen2": ({"num_key_value_heads": 2}, {"target_modules": ["k_proj", "up_proj", "o_proj"], "use_dora": True}),
    "gpt2": ({}, {"target_modules": ["c_attn", "c_proj"], "use_rslora": True, "fan_in_fan_out": True}),
    "gemma2": ({"num_key_value_heads": 2, "head_dim": 8}, {"target_modules": ["v_proj", "down_proj"], "use_dora": True}),
}


def base_model(kind: str) -> Any:
    torch.manual_seed(2)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **KINDS[kind][0], vocab_size=VOCABULARY, attn_implementation="eager")
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    inner = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return inner.eval()


def write_adapter(folder: Path, inner: Any, seed: int, **settings: Any) -> Path:
    """Adapters that change the text, as peft saves them."""
    import peft

    config = peft.LoraConfig(r=3 + seed, lora_alpha=8, task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(copy.deepcopy(inner), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.add_(torch.rand_like(value) * 0.5 if "magnitude" in name else torch.randn_like(value) * 0.3)
    model.peft_config["default"].base_model_name_or_path = "base"
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def served_layers(inner: Any) -> tuple[Any, BatchedLora]:
    """The model with the layers that serve it, in double precision."""
    model = HuggingFace(copy.deepcopy(inner))
    own = gpt_conversion(model)
    made = (model if own is None else own.convert(model.state_dict().__getitem__)).double().eval()
    return made, BatchedLora(made, own)


def merged(inner: Any, folder: Path) -> Any:
    changed = copy.deepcopy(inner).double()
    read_adapters(folder).merge_into(changed)
    return served_layers(changed)[0]


@pytest.mark.parametrize("kind", list(KINDS))
def test_requests_of_different_adapters_in_one_batch_get_the_merged_models_texts(kind, tmp_path):
    inner = base_model(kind)
    folders = {name: write_adapter(tmp_path / name, inner, seed, **KINDS[kind][1]) for seed, name in enumerate(("a", "b"))}
    model, adapters = served_layers(inner)
    for name, folder in folders.items():
        adapters.add(name, read_adapters(folder))
    models = {"": served_layers(inner)[0]} | {name: merged(inner, folder) for name, folder in folders.items()}
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9, 3, 2, 3, 8], [4, 6]] + [
        list(range(start, start + 12)) for start in range(3)
    ]
    names = ["a", "", "b", "a", "b", "b", "", "a"]
    one = BatchingEngine(LocalBackend(model, adapters=adapters), most_running=8, most_waiting=8, clock=iter(range(10**6)).__next__)
    heard = [Heard() for _ in prompts]
    for prompt, name, listener, length in zip(prompts, names, heard, (12, 9, 7, 12, 10, 3, 3, 3), strict=True):
        one.submit(job(prompt, listener, length, adapter=name))
    finish(one)
    texts = [alone(models[name], prompt, len(told.tokens)) for prompt, name, told in zip(prompts, names, heard, strict=True)]
    assert [told.tokens for told in heard] == texts
    assert texts[0] != alone(models[""], prompts[0], len(texts[0])), "the adapter changes the text"


@torch.inference_mode()
def test_dora_is_computed_as_peft_computes_it(tmp_path):
    inner = base_model("qwen2")
    folder = write_adapter(tmp_path / "a", inner, 1, target_modules=ALL, use_dora=True)
    model, adapters = served_layers(inner)
    adapters.add("a", read_adapters(folder))
    import peft

    wanted = peft.PeftModel.from_pretrained(copy.deepcopy(inner), folder).double()
    ids_BL = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]])
    with adapters.rows(["a", ""]):
        found = model(ids_BL)
    torch.testing.assert_close(found[0], wanted(ids_BL[:1]).logits[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], inner.double()(ids_BL[1:]).logits[0], atol=1e-6, rtol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize(("weights", "tolerance"), [("int8", 1e-3), ("int4", 0.03)])
def test_an_adapter_beside_packed_weights_is_that_of_the_unpacked_ones(weights, tolerance, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.models.packed.layers.SMALL", 0)
    inner = base_model("llama")
    folder = write_adapter(tmp_path / "a", inner, 1, target_modules=ALL, use_dora=True)
    rounded = copy.deepcopy(inner)
    for layer in [one for name, one in rounded.named_modules() if isinstance(one, torch.nn.Linear) and "lm_head" not in name]:
        shape = PackedShape(weights, *layer.weight.shape)
        layer.weight.copy_(torch.cat(list(unpacked(packed(layer.weight, weights), shape))))
    read_adapters(folder).merge_into(rounded)
    model = HuggingFace(inner).eval()
    pack_loaded(model, weights)
    assert any(isinstance(one, PackedLayer) for one in model.modules())
    adapters = BatchedLora(model, None)
    adapters.add("a", read_adapters(folder))
    ids_BL = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with adapters.rows(["a"]):
        found = model.hidden(ids_BL)
    wanted = HuggingFace(rounded).hidden(ids_BL)
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_a_kept_text_serves_only_requests_of_its_adapter(tmp_path):
    inner = base_model("llama")
    model, adapters = served_layers(inner)
    adapters.add("a", read_adapters(write_adapter(tmp_path / "a", inner, 1, target_modules=ALL)))
    one = BatchingEngine(
        LocalBackend(model, adapters=adapters), most_running=2, most_waiting=8, clock=iter(range(10**6)).__next__, kept_tokens=200
    )
    reused, texts = [], []
    for name in ("a", "", "a", ""):
        heard, asked = Heard(), list(range(20))
        request = job(asked, heard, 3, adapter=name)
        one.submit(request)
        finish(one)
        reused.append(request.reused)
        texts.append(heard.tokens)
    assert reused == [0, 0, 19, 19]
    assert texts[0] == texts[2]
    assert texts[1] == texts[3]


def test_adapters_that_cannot_be_served_are_refused_by_what_is_wrong(tmp_path):
    inner = base_model("llama")
    _, adapters = served_layers(inner)
    folder = write_adapter(tmp_path / "a", inner, 1, target_modules=ALL)
    config, weights = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")
    place = "base_model.model.model.layers.1.mlp.up_proj"

    def refused(words: str, settings: dict[str, Any] | None = None, **tensors: torch.Tensor) -> None:
        (folder / "adapter_config.json").write_text(json.dumps(config | (settings or {})))
        save_file(weights | {f"{place}.lora_{key}.weight": value for key, value in tensors.items()}, folder / "adapter_model.safetensors")
        with pytest.raises(ShoalError, match=words):
            adapters.add("a", read_adapters(folder))
        assert adapters.names == []
        assert adapters.nbytes == 0

    refused("init_lora_weights: pissa", {"init_lora_weights": "pissa"})
    refused("use_qalora", {"use_qalora": True})
    refused("only LoRA matrices", {"lora_bias": True})
    refused("alpha_pattern", {"alpha_pattern": {"(a+)+$": 1}})
    refused("alpha_pattern", {"alpha_pattern": [1]})
    refused("no configuration of LoRA", {"lora_alpha": float("inf")})
    refused("another shape", A=torch.zeros(2, 31), B=torch.zeros(64, 2))
    refused("do not fit each other", A=torch.zeros(2, 32), B=torch.zeros(64, 3))
    refused("not finite", A=torch.full((2, 32), float("nan")), B=torch.zeros(64, 2))
    refused("rank 2000", A=torch.zeros(2000, 32), B=torch.zeros(64, 2000))
    save_file(
        {"base_model.model.lm_head.lora_A.weight": torch.zeros(2, 32), "base_model.model.lm_head.lora_B.weight": torch.zeros(40, 2)},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ShoalError, match="lm_head, which is no linear layer"):
        adapters.add("a", read_adapters(folder))
