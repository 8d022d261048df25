"""Packed weights when serving: opened as `serving.weights` says; over several machines what is sent, kept and planned is packed, and a
machine that dies changes no token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.config.load import parse_override
from shoal.errors import ShoalError
from shoal.models.packed import layers
from shoal.models.packed.layers import PackedLinear, byte_count
from shoal.models.packed.model import PackedModel, kinds_of
from shoal.serve.load_model import open_served
from shoal.serve.nodes.model_description import model_maker
from shoal.serve.nodes.placement import SERVER_NODE
from shoal.serve.nodes.weights import PackedStore, RemoteWeights
from tests.serve.test_nodes import LENGTHS, PROMPTS, Heard, alone, finish, job, make, split_evenly, spread

CPU = torch.device("cpu")


def packed_gpt(kind: str) -> tuple[PackedModel, dict]:
    plain, described = make("gpt")
    kinds = kinds_of(plain, kind, lambda name: None)
    return PackedModel(model_maker(described, plain.get_parameter, CPU)[0], plain.get_parameter, kinds), described | {"weights": kinds}


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_machine_that_is_unplugged_changes_no_token_of_a_packed_model(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    model, described = packed_gpt(kind)
    given = {"packed": model, "tensors": PackedStore(model)}
    with spread(model.make(), described, ["pi1", "pi2"], served=given) as (engine, machines):
        split_evenly(engine, 3)
        backend = engine.backend
        layer_bytes = byte_count(model.load(CPU).blocks[0])
        assert {size.weight_bytes for size in backend.placement.planner.sizes} == {layer_bytes}
        lost = next(stage.name for stage in backend.placement.current.stages if stage.name != SERVER_NODE)
        heard = [Heard() for _ in PROMPTS]
        for prompt, length, one in zip(PROMPTS, LENGTHS, heard, strict=True):
            engine.submit(job(prompt, one, length))

        def pull() -> None:
            if lost in machines.running and len(heard[2].tokens) >= 8:
                machines.unplug(lost, backend.node_server)

        finish(engine, pull)
        assert lost not in machines.running
        assert [one.tokens for one in heard] == alone(model.load(CPU), PROMPTS, LENGTHS)
    kept = sum(file.stat().st_size for file in (tmp_path / "shoal" / "tensors").iterdir())
    assert 0 < kept <= 6 * layer_bytes


def test_packed_bytes_are_sent_as_they_are(monkeypatch, tmp_path):
    monkeypatch.setattr(layers, "SMALL", 0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    model, _ = packed_gpt("int4")
    fetched, name = RemoteWeights(PackedStore(model).answer), "blocks.0.feed_forward.up.weight"
    assert torch.equal(fetched.get(name), model.get(name))
    assert fetched.received_bytes == model.shapes[name].nbytes


def saved_folder(folder: Path, kind: str, dtype: torch.dtype) -> None:
    """A small random model of transformers with a tokenizer of words."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    torch.manual_seed(6)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.AutoConfig.for_model(kind, **sizes, head_dim=16, vocab_size=64, max_position_embeddings=64)
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0")).save(str(folder / "tokenizer.json"))


def opened(folder: Path, weights: str, nodes: int = 1):
    return open_served([str(folder)], [parse_override("training.device=cpu"), parse_override(f"serving.weights={weights}")], print, nodes)


IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@torch.inference_mode()
def test_a_folder_is_held_as_the_setting_says(tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "SMALL", 0)
    saved_folder(tmp_path / "m", "llama", torch.bfloat16)
    exact = opened(tmp_path / "m", "fp32").model
    assert {one.dtype for one in exact.parameters()} == {torch.float32}
    for weights, kind, most in (("auto", "bf16", 0.03), ("bf16", "bf16", 0.03), ("int8", "int8", 0.05), ("int4", "int4", 0.4)):
        model = opened(tmp_path / "m", weights).model
        assert model.blocks[1].feed_forward.up.shape.kind == kind
        assert (model(IDS) - exact(IDS)).abs().max() <= most * exact(IDS).abs().max()
    spread_out = opened(tmp_path / "m", "auto", 2)
    assert spread_out.described["weights"]["blocks.0.attention.output.weight"] == "bf16"
    assert all(one.is_meta for one in spread_out.model.parameters())
    assert spread_out.tensors.get("blocks.0.attention.output.weight").nbytes == 2 * 32 * 32


@torch.inference_mode()
def test_a_model_that_only_transformers_computes_is_packed_where_it_is_whole(tmp_path):
    saved_folder(tmp_path / "m", "gemma2", torch.bfloat16)
    stored, exact, packed = (opened(tmp_path / "m", weights).model for weights in ("auto", "fp32", "int8"))
    assert [{one.dtype for one in model.parameters()} for model in (stored, exact)] == [{torch.bfloat16}, {torch.float32}]
    assert sum(isinstance(one, PackedLinear) for one in packed.modules()) == 14
    assert (packed(IDS) - exact(IDS)).abs().max() <= 0.05 * exact(IDS).abs().max()
    assert opened(tmp_path / "m", "bf16", 2).tensors.get("inner.model.norm.weight").dtype == torch.bfloat16
    with pytest.raises(ShoalError, match="packed on one machine only"):
        opened(tmp_path / "m", "int4", 2)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_mixture_of_experts_is_refused_in_int8_and_int4(nodes, tmp_path):
    saved_folder(tmp_path / "m", "mixtral", torch.bfloat16)
    for weights in ("int8", "int4"):
        with pytest.raises(ShoalError, match=f"mixture of experts, which are not packed as {weights}"):
            opened(tmp_path / "m", weights, nodes)
    assert opened(tmp_path / "m", "bf16").model.blocks[0].attention.output.weight.dtype == torch.bfloat16
