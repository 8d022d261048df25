"""LoRA beside Shoal's own layers: the losses, gradients, updates, files and exports that transformers and peft give."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.config.data_shapes import DataShapes
from shoal.config.load import resolve_data
from shoal.engines import SingleEngine
from shoal.errors import ShoalError
from shoal.models import build
from shoal.models.huggingface.adapted_gpt import AdaptedGpt
from shoal.models.huggingface.as_gpt import weights_for
from shoal.models.huggingface.model import HuggingFace
from shoal.runs.monitoring.throughput import operations_per_token
from shoal.tasks.language import LanguageModelling

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs the Python package peft: pip install peft")
LLAMA = {"num_key_value_heads": 2, "tie_word_embeddings": True}
NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.arange(48).view(4, 12) % 50
BATCH = {"input_ids": IDS, "labels": (IDS + 1) % 50}


def written(kind: str, folder: Path, **settings: Any) -> Path:
    """A small model whose weights are far from their initial ones."""
    torch.manual_seed(2)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes, **none, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def run_of(folder: Path, layers: str, lora: dict[str, Any], load: str = "fp32", precision: str = "fp32", **training: Any) -> Any:
    settings = {
        "model": {"kind": "huggingface", "pretrained": str(folder), "layers": layers, "lora": {"rank": 3, **lora}, "load": load},
        "training": {"device": "cpu", "precision": {"kind": precision}, "optimizer": {"name": "SGD", "learning_rate": 0.1}, **training},
    }
    return resolve_data(settings, name="test", dialect="shoal", environ={}).run


def network_of(folder: Path, layers: str, lora: dict[str, Any] | None = None, load: str = "fp32", precision: str = "fp32") -> Any:
    return build(run_of(folder, layers, lora or {}, load, precision), DataShapes(vocab_size=50))["model"]


def moved(network: Any) -> Any:
    """The network with adapters that change something."""
    with torch.no_grad():
        for name, value in network.named_parameters():
            if value.requires_grad:
                value.add_(0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))))
    return network


def gradients(network: Any) -> dict[str, Tensor]:
    F.cross_entropy(network(IDS).flatten(0, 1), BATCH["labels"].flatten()).backward()
    return {name: value.grad for name, value in network.named_parameters() if value.grad is not None}


@pytest.mark.parametrize(
    ("kind", "settings", "lora"),
    [
        ("llama", LLAMA, {"rslora": True, "target_modules": ALL}),
        ("qwen3", {"num_key_value_heads": 2, "head_dim": 16}, {"target_modules": ["k_proj", "up_proj", "o_proj"]}),
        ("gpt2", NO_DROPOUT, {"target_modules": ["c_attn", "c_fc", "c_proj"]}),
    ],
)
def test_losses_and_gradients_are_those_of_transformers_and_peft(tmp_path, kind, settings, lora):
    written(kind, tmp_path, **settings)
    own, theirs = (moved(network_of(tmp_path, layers, lora)) for layers in ("auto", "original"))
    assert isinstance(own, AdaptedGpt)
    assert isinstance(theirs, HuggingFace)
    torch.testing.assert_close(own(IDS), theirs(IDS), atol=2e-5, rtol=1e-5)
    found, expected = gradients(own), gradients(theirs)
    assert list(found) == list(expected), "the same adapters in the same order, and nothing else"
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], atol=1e-5 * float(expected[name].abs().max()), rtol=1e-5)
    with own.without_adapters(), theirs.without_adapters():
        torch.testing.assert_close(own(IDS), theirs(IDS), atol=2e-5, rtol=1e-5)


def test_dropout_of_adapters_draws_what_peft_draws(tmp_path):
    written("llama", tmp_path, **LLAMA)
    found = []
    for layers in ("auto", "original"):
        network = moved(network_of(tmp_path, layers, {"dropout": 0.3, "target_modules": ALL}))
        torch.manual_seed(5)
        found.append((network.train()(IDS), network.eval()(IDS)))
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=1e-5)
    assert not torch.allclose(*found[0])


def test_steps_are_the_same_and_leave_frozen_weights(tmp_path):
    written("llama", tmp_path, **LLAMA)
    losses, vectors, engines = {}, {}, {}
    for layers in ("auto", "original"):
        run = run_of(tmp_path, layers, {}, gradient_checkpointing=True)
        engine = SingleEngine(run, LanguageModelling(build(run, DataShapes(vocab_size=50))), torch.device("cpu"), 10)
        network: Any = engine.task.players["model"]
        frozen = {name: value.clone() for name, value in network.named_parameters() if not value.requires_grad}
        losses[layers] = [float(engine.step([BATCH]).metrics["loss"]) for _ in range(3)]
        vectors[layers], engines[layers] = engine.vector.clone(), engine
        assert all(torch.equal(value, frozen[name]) for name, value in network.named_parameters() if name in frozen)
        assert all(value.grad is None for value in network.parameters() if not value.requires_grad)
    assert losses["auto"] == pytest.approx(losses["original"], rel=1e-5)
    assert losses["auto"][-1] < losses["auto"][0]
    torch.testing.assert_close(vectors["auto"], vectors["original"], atol=1e-6, rtol=1e-4)
    for one, other in (("auto", "original"), ("original", "auto")):  # as a checkpoint that goes on with another engine
        engines[one].load_weights({name: value.clone() for name, value in engines[other].weights().items()})
        assert torch.equal(engines[one].vector, engines[other].vector)


@pytest.mark.parametrize(
    ("kind", "settings", "load"), [("qwen2", {"num_key_value_heads": 2}, "nf4"), ("llama", LLAMA, "bf16"), ("gpt2", NO_DROPOUT, "int8")]
)
def test_weights_in_few_bits_are_the_same_bits(tmp_path, kind, settings, load):
    written(kind, tmp_path, **settings)
    own, theirs = (moved(network_of(tmp_path, layers, {}, load, precision="bf16")) for layers in ("auto", "original"))
    assert isinstance(own, AdaptedGpt)
    torch.testing.assert_close(own(IDS), theirs(IDS), atol=2e-5, rtol=1e-5)
    found, expected = gradients(own), gradients(theirs)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], atol=1e-4 * float(expected[name].abs().max()), rtol=1e-4)
    assert sum(value.nbytes for value in own.parameters()) == sum(value.nbytes for value in theirs.parameters())
    for one, other in ((own, theirs), (theirs, own)):
        named = weights_for(one, dict(other.named_parameters()))
        assert named.keys() == dict(one.named_parameters()).keys()
        assert all(torch.equal(named[name], value) for name, value in one.named_parameters())


@pytest.mark.parametrize("load", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_token_takes_as_many_operations_as_in_the_original_layers(tmp_path, tied, load):
    folder = written("llama", tmp_path, num_key_value_heads=2, tie_word_embeddings=tied)
    run = run_of(folder, "own", {}, load, precision="bf16")
    own, original = (operations_per_token(run, network_of(folder, layers, load=load, precision="bf16")) for layers in ("own", "original"))
    assert own == original > 0


def test_a_token_takes_as_many_operations_without_adapters_in_either_layers(tmp_path):
    folder, settings = written("llama", tmp_path, num_key_value_heads=2), {"data": {"sequence_length": 32}}
    found = []
    for layers in ("own", "original"):
        model = {"model": {"kind": "huggingface", "pretrained": str(folder), "layers": layers}}
        run = resolve_data(model | settings, name="test", dialect="shoal", environ={}).run
        found.append(operations_per_token(run, build(run, DataShapes(vocab_size=50))["model"]))
    assert found[0] == found[1] > 0


def test_the_model_of_peft_comes_back_whole(tmp_path):
    written("llama", tmp_path, **LLAMA)
    own, theirs = (moved(network_of(tmp_path, layers, {}, "nf4", precision="bf16")) for layers in ("auto", "original"))
    back = copy.deepcopy(own).as_huggingface()
    expected = theirs.state_dict()
    assert back.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in back.state_dict().items())
    back.save(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(again(IDS).logits, theirs.eval()(IDS), atol=1e-4, rtol=1e-4)


def test_a_network_without_data_has_the_same_shapes(tmp_path):
    run = run_of(written("llama", tmp_path, max_position_embeddings=177), "auto", {}, "nf4", "bf16")  # a configuration not met before
    shapes = DataShapes(vocab_size=50)
    empty, whole = (build(run, shapes, device)["model"] for device in ("meta", "cpu"))
    assert isinstance(empty, AdaptedGpt)
    assert [(name, value.shape, value.dtype) for name, value in empty.named_parameters()] == [
        (name, value.shape, value.dtype) for name, value in whole.named_parameters()
    ]
    assert whole(IDS).isfinite().all()


@pytest.mark.parametrize(
    ("lora", "training", "reason"),
    [
        ({"dora": True}, {}, "DoRA needs the norms"),
        ({"target_modules": ["embed_tokens"]}, {}, "an adapter is beside model.embed_tokens"),
        ({}, {"precision": "nvfp4", "allow_emulation": True}, "nvfp4 replaces single linear layers"),
    ],
)
def test_layers_that_are_kept_say_why(tmp_path, lora, training, reason):
    written("llama", tmp_path, tie_word_embeddings=False)
    run = run_of(tmp_path, "auto", lora, **training)
    engine = SingleEngine(run, LanguageModelling(build(run, DataShapes(vocab_size=50))), torch.device("cpu"), 10)
    assert isinstance(engine.task.players["model"], HuggingFace)
    assert [note for note in engine.notes if note.startswith("the layers of transformers are kept") and reason in note]


def test_own_layers_that_cannot_have_the_adapters_are_refused(tmp_path):
    written("llama", tmp_path, tie_word_embeddings=False)
    with pytest.raises(ShoalError, match=r"model\.layers: .*: an adapter is beside model.embed_tokens.* set it to auto"):
        network_of(tmp_path, "own", {"target_modules": ["embed_tokens"]})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("load", ["fp32", "bf16", "int8", "nf4"])
def test_a_gpu_learns_as_a_cpu_in_bf16(tmp_path, load):
    written("llama", tmp_path, **LLAMA)
    losses, given = {}, {}
    for device in ("cpu", "cuda"):
        run = run_of(tmp_path, "own", {"target_modules": ALL}, load, precision="bf16")
        engine = SingleEngine(run, LanguageModelling(build(run, DataShapes(vocab_size=50))), torch.device(device), 10, learns=True)
        losses[device] = [float(engine.step([BATCH]).metrics["loss"]) for _ in range(6)]
        given[device] = engine.vector.cpu()
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.01)
    assert losses["cuda"][-1] < 0.95 * losses["cuda"][0]
    torch.testing.assert_close(given["cuda"], given["cpu"], atol=0.03, rtol=0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_of_a_gpu_give_the_bits_of_plain_torch():
    from shoal.models.huggingface.frozen_weights import restored, stored
    from shoal.models.kernels.swiglu import plain_swiglu

    weight = torch.randn(96, 200, generator=torch.Generator().manual_seed(1))
    for kind in ("int8", "nf4"):
        codes, scales = stored(weight, kind)
        for dtype in (torch.float32, torch.bfloat16):
            expected = restored(codes, scales, kind, (96, 200), dtype)
            assert torch.equal(restored(codes.cuda(), scales.cuda(), kind, (96, 200), dtype).cpu(), expected)
    inner = torch.randn(3, 70, 2 * 1100, device="cuda").bfloat16().requires_grad_()
    wide = inner.detach().double().requires_grad_()
    slope = torch.randn(3, 70, 1100, device="cuda").bfloat16()
    plain_swiglu(inner).backward(slope)
    (F.silu(wide[..., :1100]) * wide[..., 1100:]).backward(slope.double())
    torch.testing.assert_close(inner.grad.double(), wide.grad, atol=1e-6, rtol=2**-8)
