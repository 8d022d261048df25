"""Frozen weights in few bits: the bits of bitsandbytes, the products and gradients of the restored weights, and exports of both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config.schema import Run
from shoal.config.schema import model as schema
from shoal.config.schema.data import Data
from shoal.errors import ShoalError
from shoal.models import build
from shoal.models.huggingface import frozen_weights, merged_weights
from shoal.models.huggingface import model as huggingface_model
from shoal.models.huggingface.frozen_weights import NF4, FrozenEmbedding, FrozenLinear, restored, stored
from shoal.tasks import chunked_logprobs
from shoal.updates.layout import ParameterLayout

transformers = pytest.importorskip("transformers")
KINDS = ("bf16", "int8", "nf4")


def matrix(rows: int = 24, columns: int = 50) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def frozen(weight: Tensor, kind: str, bias: Tensor | None = None) -> FrozenLinear:
    codes, scales = stored(weight, kind)
    return FrozenLinear(nn.Parameter(codes, requires_grad=False), scales, bias, kind, (weight.shape[0], weight.shape[1]))


# --- bits ---------------------------------------------------------------------------------------------------------------


def test_nf4_takes_the_nearest_value_of_its_table_in_blocks_of_64() -> None:
    weight = matrix(6, 50) * 3
    weight[0] = 0.0
    found = restored(*stored(weight, "nf4"), "nf4", (6, 50), torch.float64)
    blocks = F.pad(weight.double().flatten(), (0, 20)).view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    table = torch.tensor(NF4, dtype=torch.float64)
    nearest = table[((blocks / scales)[..., None] - table).abs().argmin(-1)] * scales
    torch.testing.assert_close(found, nearest.flatten()[:300].view(6, 50), rtol=1e-7, atol=0.0)


def test_int8_is_within_half_a_step_of_each_row() -> None:
    weight = torch.cat([matrix(), torch.zeros(1, 50)])
    found = restored(*stored(weight, "int8"), "int8", (25, 50), torch.float32)
    assert ((found - weight).abs() <= weight.abs().amax(1, keepdim=True) / 254 * (1 + 1e-5)).all()
    assert torch.equal(found[-1], weight[-1])


def test_bits_are_those_of_bitsandbytes() -> None:
    theirs = pytest.importorskip("bitsandbytes").functional
    weight = matrix(96, 130)
    packed, state = theirs.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    codes, scales = stored(weight, "nf4")
    assert torch.equal(packed.flatten(), codes)
    assert torch.equal(state.absmax, scales)
    assert torch.equal(theirs.dequantize_4bit(packed, state), restored(codes, scales, "nf4", (96, 130), torch.float32))
    rounded, largest, _ = theirs.int8_vectorwise_quant(weight.half())
    codes, scales = stored(weight.half(), "int8")
    assert torch.equal(rounded, codes)
    torch.testing.assert_close(largest / 127, scales)


@pytest.mark.parametrize("kind", KINDS)
def test_products_and_gradients_are_those_of_the_restored_weight(kind: str) -> None:
    layer = frozen(matrix(), kind, bias=torch.randn(24))
    plain = nn.functional.linear
    x, y = (torch.randn(3, 5, 50, generator=torch.Generator().manual_seed(2)).requires_grad_() for _ in range(2))
    slope = torch.randn(3, 5, 24)
    layer(x).backward(slope)
    plain(y, layer.weight, layer.bias).backward(slope)
    assert torch.equal(layer(x), plain(y, layer.weight, layer.bias))
    assert torch.equal(x.grad, y.grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert torch.equal(layer(x), plain(y, layer.weight, layer.bias))


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_matrix_is_restored_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = frozen(matrix(300, 50), kind, bias=torch.randn(300))
    x, y = (torch.randn(3, 5, 50, generator=torch.Generator().manual_seed(2)).requires_grad_() for _ in range(2))
    slope = torch.randn(3, 5, 300)
    expected = layer(x)
    expected.backward(slope)
    restored_shapes, restore = list[Any](), frozen_weights.restored
    monkeypatch.setattr(frozen_weights, "_MOST_RESTORED", 100 * 50)
    monkeypatch.setattr(frozen_weights, "restored", lambda *given: (restored_shapes.append(given[3]), restore(*given))[1])
    found = layer(y)
    found.backward(slope)
    assert restored_shapes == [(64, 50)] * 4 + [(44, 50)] + [(64, 50)] * 4 + [(44, 50)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-5, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = layer(y)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), expected, rtol=0.05, atol=0.1)


def test_int8_is_restored_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scales = stored(matrix(300, 50), "int8")
    expected = (codes.double() * scales.double().unsqueeze(1)).float()
    monkeypatch.setattr(frozen_weights, "_WEIGHTS_AT_A_TIME", 64 * 50)
    taken, multiply = list[int](), torch.mul
    monkeypatch.setattr(torch, "mul", lambda one, other, out: (taken.append(len(one)), multiply(one, other, out=out))[1])
    found = frozen_weights.restored(codes, scales, "int8", (300, 50), torch.float32)
    assert taken == [64, 64, 64, 64, 44], "torch copies the codes that it multiplies"
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_restored_in_the_same_memory(kind: str) -> None:
    layer, x = frozen(matrix(96, 64), kind), torch.randn(2, 64, requires_grad=True)
    with torch.inference_mode():
        expected = F.linear(x, layer.weight)
        torch.testing.assert_close(layer(x), expected)
    places = set[int]()
    for other in (layer, frozen(matrix(96, 64), kind), layer):
        for _, weight in frozen_weights._restored_rows(other.codes, other.scales, kind, other.shape, torch.float32):
            places.add(weight.data_ptr())
    assert len(places) == 1
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(2, -1))


def test_an_output_matrix_of_few_bits_is_cast_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = matrix(7, 50), matrix(300, 50).bfloat16(), torch.tensor([0, 299, 17, 64, 5, 128, 200])
    monkeypatch.setattr(chunked_logprobs, "_CAST", 64 * 50)
    monkeypatch.setattr(chunked_logprobs, "_LOGITS_AT_ONCE", 3 * 300)
    x, y = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    found, expected = chunked_logprobs.cross_entropy_of(x, weight, labels), F.cross_entropy(y @ weight.float().T, labels)
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(chunked_logprobs.cross_entropy_of(x, weight, labels), expected)


def test_no_restored_weight_is_kept_for_the_backward_pass() -> None:
    layer, kept = frozen(matrix(64, 64), "nf4"), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda value: (kept.append(value), value)[1], lambda value: value):
        layer(torch.randn(2, 64, requires_grad=True))
    assert sum(value.nbytes for value in kept) == 64 * 64 // 2 + 4 * 64


# --- models -------------------------------------------------------------------------------------------------------------


def config_of(kind: str) -> Any:
    if kind == "gpt2":
        sizes = {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
        return transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "max_position_embeddings": 32}
    if kind == "mixtral":
        return transformers.MixtralConfig(num_local_experts=4, **shape)
    return transformers.LlamaConfig(tie_word_embeddings=kind == "tied", eos_token_id=None, **shape)


def written(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.to(dtype).save_pretrained(folder)
    return folder


def built(shapes: Any, folder: Path, load: str, **lora: Any) -> Any:
    settings = schema.HuggingFace(pretrained=str(folder), load=load, layers="original", lora=schema.Lora(rank=3, **lora))
    return build(Run(model=settings, data=Data(sequence_length=32), seed=1), shapes(vocab_size=40))["model"]


def prompt() -> Tensor:
    return torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(3))


def gradients(model: Any, recomputed: bool = False) -> dict[str, Tensor]:
    model.train().gradient_checkpointing(recomputed)
    model.zero_grad()
    F.cross_entropy(model(prompt())[:, :-1].flatten(0, 1), prompt()[:, 1:].flatten()).backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.requires_grad}


def with_restored_weights(shapes: Any, folder: Path, model: Any, **lora: Any) -> Any:
    """The same model in float32, with the weights that a model in few bits computes with."""
    pytest.importorskip("peft")
    plain = built(shapes, folder, "fp32", **lora)
    layers = dict(model.named_modules())
    with torch.no_grad():
        for name, layer in plain.named_modules():
            own = layers[name]
            if isinstance(own, FrozenLinear | FrozenEmbedding):
                layer.weight.copy_(own.weight.t() if isinstance(own, FrozenLinear) and own.turned else own.weight)
        given = dict(model.named_parameters())
        for name, parameter in plain.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(given[name])
    return plain


def moved(model: Any) -> Any:
    """The model with adapters that change something."""
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(5)))
    return model


@pytest.mark.parametrize("kind", ["gpt2", "llama", "tied"])
@pytest.mark.parametrize("load", KINDS)
def test_adapters_learn_as_beside_the_restored_weights_in_float32(shapes: Any, tmp_path: Path, kind: str, load: str) -> None:
    pytest.importorskip("peft")
    folder, lora = written(kind, tmp_path), {"dora": load == "nf4", "rslora": load == "int8"}
    model = moved(built(shapes, folder, load, **lora))
    plain = with_restored_weights(shapes, folder, model, **lora)
    torch.testing.assert_close(model.eval()(prompt()), plain.eval()(prompt()), rtol=1e-5, atol=1e-5)
    expected = gradients(plain)
    for recomputed in (False, True):
        found = gradients(model, recomputed)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "tied"])
def test_only_adapters_are_in_updates_and_frozen_weights_take_few_bytes(shapes: Any, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("peft")
    folder = written(kind, tmp_path)
    sizes = {}
    for load in ("fp32", *KINDS):
        model = built(shapes, folder, load)
        layout = ParameterLayout((name, tuple(value.shape)) for name, value in model.named_parameters() if value.requires_grad)
        assert all("lora_" in slot.name for slot in layout.slots)
        sizes[load] = sum(value.nbytes for value in model.parameters() if not value.requires_grad)
        assert not any(value.dtype == torch.uint8 for value in model.buffers())
        again = built(shapes, folder, load).named_parameters()
        assert all(value.equal(dict(model.named_parameters())[name]) for name, value in again if not value.requires_grad)
    assert sizes["nf4"] < sizes["int8"] < sizes["bf16"] < 0.6 * sizes["fp32"]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "tied"])
@pytest.mark.parametrize("dora", [False, True])
def test_exports_are_the_restored_weights_with_adapters_and_adapters_alone(
    shapes: Any, tmp_path: Path, kind: str, dora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    folder = written(kind, tmp_path / "start")
    model = moved(built(shapes, folder, "nf4", dora=dora))
    plain = with_restored_weights(shapes, folder, model, dora=dora).inner.eval()
    with torch.no_grad():
        expected = plain(prompt()).logits
    model.save_adapters(tmp_path / "adapters")
    base = plain.unload()
    torch.testing.assert_close(peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()(prompt()).logits, expected)
    monkeypatch.setattr(huggingface_model, "_MERGED_FILE", 4000)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.save(tmp_path / "whole")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 2
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not report["missing_keys"]
    assert again.dtype == torch.float32
    torch.testing.assert_close(again.eval()(prompt()).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_are_read_in_their_own_type(shapes: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("peft")
    folder = written("llama", tmp_path, dtype)
    model = built(shapes, folder, "int8")
    assert {value.dtype for value in model.parameters()} == {torch.float32, torch.bfloat16, torch.int8}
    original = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.layers[0].mlp.up_proj.weight
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp.up_proj"))
    assert torch.equal(layer.weight, restored(*stored(original.detach(), "int8"), "int8", (24, 16), torch.float32))


def test_a_weight_is_computed_when_an_operation_needs_its_values() -> None:
    reads = list[int]()
    unread = merged_weights.UnreadTensor.like(torch.Size([2, 3]), lambda: (reads.append(1), torch.ones(2, 3))[1])
    assert (unread.shape, unread.dtype, unread.numel(), unread.untyped_storage().nbytes()) == ((2, 3), torch.float32, 6, 24)
    assert not reads
    assert torch.equal(unread.contiguous(), torch.ones(2, 3))
    assert torch.equal(torch.cat([unread, unread]), torch.ones(4, 3))
    assert len(reads) == 3


def test_pages_of_a_replaced_weight_are_given_back(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux says how much of a mapped file is resident")
    (tmp_path / "weights").write_bytes(torch.ones(8 << 20).numpy().tobytes())
    both = torch.from_file(str(tmp_path / "weights"), size=8 << 20)
    weight = both[100:].view(-1, 4)
    replaced, before = weight.to(torch.bfloat16), resident()
    frozen_weights._drop_pages(weight, replaced)
    assert before - resident() > 25 << 10
    assert bool((both == 1).all())
    frozen_weights._drop_pages(replaced, replaced)
    assert bool((replaced == 1).all())


def resident() -> int:
    """Resident memory in KiB, pages of files included."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))


def test_a_model_whose_weights_are_no_linear_layers_is_refused(shapes: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    with pytest.raises(ShoalError, match=r"model.load: MixtralForCausalLM .* has weights outside of linear layers, such as .*experts"):
        built(shapes, written("mixtral", tmp_path), "nf4")
