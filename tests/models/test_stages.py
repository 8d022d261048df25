"""A model in pieces computes what it computes whole, to the bit, and its pieces have the whole model's names."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.gpt import Gpt
from shoal.models.lstm import Lstm
from shoal.models.moe import Moe
from shoal.models.split_model import layer_count, make_ends, make_stage
from shoal.models.stages import load_tensors, required_tensors, without_weights
from shoal.models.transformer import SideChannel

VOCABULARY = 40
BOUNDS = ([0, 4], [0, 3, 4], [0, 1, 2, 4], [0, 1, 2, 3, 4])
SIZES = {"hidden_size": 24, "num_layers": 4, "num_heads": 4, "max_seq_len": 64}
OWN = {
    "learned": lambda: Gpt(schema.Gpt(**SIZES, tied_embeddings=True), VOCABULARY),
    "rotary": lambda: Gpt(
        schema.Gpt(**SIZES, positions="rotary", norm="rms", bias=False, num_kv_heads=2, tied_embeddings=False), VOCABULARY
    ),
    "switch": lambda: moe("switch"),
    "hash": lambda: moe("hash"),
    "sigmoid-bias": lambda: moe("sigmoid-bias"),
    "dense first layers": lambda: moe("switch", dense_layers=1, shared_size=16, shared_gate=True, intermediate_size=12),
}
FAMILIES = {
    "gpt2": {},
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 24},
    "bloom": {},
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
}


def moe(router: str, **experts) -> Moe:
    chosen = schema.Experts(count=4, per_token=2, router=router, z_loss_weight=0.1, **experts)
    return Moe(schema.Moe(**SIZES, experts=chosen), VOCABULARY)


def hugging_face(kind: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    from shoal.models.huggingface.model import HuggingFace

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "max_position_embeddings": 64}
    config = transformers.AutoConfig.for_model(kind, **sizes, **ends, **FAMILIES[kind])
    return HuggingFace(transformers.AutoModelForCausalLM.from_config(config))


def make(kind: str) -> torch.nn.Module:
    torch.manual_seed(1)
    model = OWN[kind]() if kind in OWN else hugging_face(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def cut_into_stages(model, bounds):
    return [make_stage(model, first, last) for first, last in pairwise(bounds)]


def logits(stages, ends, ids, caches=None, past=0, mask=None):
    x_BLD = ends.embed(ids, past, mask)
    for i, stage in enumerate(stages):
        x_BLD = stage.through(x_BLD, ids, cache=caches[i] if caches else None, attention_mask=mask)
    return ends.logits(x_BLD)


LESS_LIKELY = ("qwen3", "opt", "bloom")


@torch.no_grad()
@pytest.mark.parametrize("kind", [pytest.param(one, marks=[pytest.mark.long] if one in LESS_LIKELY else []) for one in (*OWN, *FAMILIES)])
def test_a_model_in_pieces_gives_the_logits_of_the_whole_to_the_bit(kind):
    model, ids = make(kind), torch.randint(0, VOCABULARY, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    for bounds in BOUNDS:
        stages, ends = cut_into_stages(model, bounds), make_ends(model)
        assert [(stage.first, stage.last) for stage in stages] == list(pairwise(bounds))
        assert torch.equal(logits(stages, ends, ids), model(ids))
        assert torch.equal(logits(stages, ends, ids, mask=mask), model(ids, attention_mask=mask))
        caches, whole = [stage.new_cache(4) for stage in stages], model.new_cache(4)
        for past, piece in ((0, ids[:, :5]), (5, ids[:, 5:8]), (8, ids[:, 8:])):
            assert torch.equal(logits(stages, ends, piece, caches, past), model(piece, cache=whole))


@pytest.mark.parametrize("kind", ["learned", "rotary", "hash", "gpt2", "llama", "qwen2"])
def test_pieces_have_the_names_of_the_whole_model_and_can_be_filled_from_it(kind):
    model, ids = make(kind), torch.randint(0, VOCABULARY, (1, 6))
    with without_weights():
        bones = OWN[kind]() if kind in OWN else hugging_face(kind)
    assert all(parameter.is_meta for parameter in bones.parameters())
    pieces = [make_stage(bones, 0, 1), make_stage(bones, 1, 4), make_ends(bones)]
    names = [name for piece in pieces for name in required_tensors(piece)]
    whole = model.state_dict()
    assert len(names) == len(set(names))
    assert {whole[name].data_ptr() for name in names} == {tensor.data_ptr() for tensor in whole.values()}
    for piece in pieces:
        load_tensors(piece.eval(), {name: whole[name] for name in required_tensors(piece)})
    *stages, ends = pieces
    with torch.no_grad():
        assert torch.equal(logits(stages, ends, ids), model(ids))
    with pytest.raises(ShoalError, match="is missing"):
        load_tensors(make_stage(bones, 0, 1), {})


@pytest.mark.parametrize("kind", ["learned", "rotary", "gpt2", "llama"])
def test_the_two_ends_can_be_apart_and_together_have_all_their_names(kind):
    model, ids = make(kind), torch.randint(0, VOCABULARY, (1, 6))
    entry, exit = make_ends(model, after=False), make_ends(model, before=False)
    both = set(make_ends(model).state_dict())
    assert set(entry.state_dict()) | set(exit.state_dict()) == both
    assert len(entry.state_dict()) < len(both)
    x_BLD = entry.embed(ids)
    for stage in cut_into_stages(model, [0, 2, 4]):
        x_BLD = stage.through(x_BLD, ids)
    assert torch.equal(exit.logits(x_BLD), model(ids))


@pytest.mark.parametrize("kind", ["learned", "switch", "sigmoid-bias", "gpt2", "llama"])
def test_gradients_through_pieces_are_those_of_the_whole_model(kind):
    model, ids = make(kind), torch.randint(0, VOCABULARY, (2, 8))
    counted = torch.ones(2, 8, dtype=torch.bool)
    besides = [SideChannel(counted) for _ in range(3)] if kind in OWN else [None] * 3
    given = {"beside": besides[0]} if kind in OWN else {}
    whole = model(ids, **given).square().mean() + auxiliary(besides[:1])
    whole.backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    ends, stages = make_ends(model), cut_into_stages(model, [0, 1, 4])
    x_BLD = ends.embed(ids)
    for stage, beside in zip(stages, besides[1:], strict=True):
        x_BLD = stage.through(x_BLD, ids, beside=beside)
    loss = ends.logits(x_BLD).square().mean() + auxiliary(besides[1:])
    loss.backward()
    torch.testing.assert_close(loss, whole)
    after = {name: parameter.grad for piece in (*stages, ends) for name, parameter in piece.named_parameters()}
    assert after.keys() == before.keys()
    for name, gradient in before.items():
        torch.testing.assert_close(after[name], gradient)
    if kind in OWN:
        figures = besides[1].figures | besides[2].figures
        assert figures.keys() == besides[0].figures.keys()


def auxiliary(besides):
    losses = [one for beside in besides if beside is not None for one in beside.losses]
    return sum(one.weight * one.value for one in losses)


def test_a_model_that_differs_in_pieces_is_refused_by_name(monkeypatch):
    transformers = pytest.importorskip("transformers")
    from shoal.models.huggingface.model import HuggingFace

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=24, n_layer=4, n_head=4, scale_attn_by_inverse_layer_idx=True, eos_token_id=None, bos_token_id=None
    )
    model = HuggingFace(transformers.AutoModelForCausalLM.from_config(config))
    with pytest.raises(ShoalError, match="GPT2LMHeadModel does not compute the same in pieces"):
        make_stage(model, 0, 2)


def test_what_cannot_be_cut_says_so():
    with pytest.raises(ShoalError, match="Lstm cannot be cut"):
        layer_count(Lstm(schema.Lstm(hidden_size=8, num_layers=2), VOCABULARY))
    with pytest.raises(ShoalError, match="the layers 0 to 4: the model has 4"):
        make_stage(make("learned"), 0, 5)
