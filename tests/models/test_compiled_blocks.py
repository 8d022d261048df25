"""Blocks of packed models in C against the same blocks in torch: padding, growing caches, several new tokens, and what is left to torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.config.schema import model as schema
from shoal.models.gpt import Gpt
from shoal.models.packed import compiled_blocks
from shoal.models.packed.compiled import library
from shoal.models.packed.model import PackedModel, kinds_of
from shoal.models.stages import without_weights
from shoal.models.transformer import PLAIN, Variant

LLAMA = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 96, "max_seq_len": 512}
LLAMA |= {"positions": "rotary", "norm": "rms", "feed_forward": "swiglu", "bias": False}

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler here")


def packed_llama(kind: str, variant: Variant = PLAIN, **settings) -> Gpt:
    torch.manual_seed(1)
    plain = Gpt(schema.Gpt(**LLAMA | settings), 50, variant)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(3.0)

    def make() -> Gpt:
        with without_weights():
            return Gpt(schema.Gpt(**LLAMA | settings), 50, variant)

    kinds = kinds_of(plain, kind, lambda name: kind if "blocks" in name else None)
    return PackedModel(make, plain.get_parameter, kinds).load(torch.device("cpu"))


def use_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where this machine has something faster, or is so busy that it seems so."""
    monkeypatch.setattr(compiled_blocks, "is_compiled", lambda shape, device: True)
    monkeypatch.setattr("shoal.models.packed.layers.way_for", compiled_way)
    monkeypatch.setattr("shoal.models.packed.products.way_for", compiled_way)


def compiled_way(shape, device):
    from shoal.models.packed import products

    return products._COMPILED_INT4 if shape.kind == "int4" else products._COMPILED_INT8


@torch.inference_mode()
def steps(model: Gpt, ids_BL: Tensor, cuts: list[int], mask_BL: Tensor | None = None) -> Tensor:
    """Hidden states of all tokens, read in pieces that end at these places."""
    cache, found = model.new_cache(0), []
    for start, end in zip([0, *cuts[:-1]], cuts, strict=True):
        found.append(model.hidden(ids_BL[:, start:end], cache=cache, attention_mask=None if mask_BL is None else mask_BL[:, :end]))
    return torch.cat(found, 1)


def both_ways(model: Gpt, monkeypatch: pytest.MonkeyPatch, *given) -> tuple[Tensor, Tensor, int]:
    """Hidden states by the library and by torch, and how many pieces the library computed."""
    computed, compute = [], compiled_blocks._compute
    monkeypatch.setattr(compiled_blocks, "_compute", lambda *args: computed.append(args) or compute(*args))
    found = steps(model, *given)
    model.packed_blocks = None
    return found, steps(model, *given), len(computed)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("cuts", [[5, 6, 7, 8], [40, 44, 45, 150, 151], [3, 20, 40]])
@pytest.mark.parametrize("pads", [False, True])
def test_the_library_computes_the_blocks_as_torch_does(kind, cuts, pads, monkeypatch):
    use_compiled(monkeypatch)
    model, ids = packed_llama(kind), torch.randint(0, 50, (3, cuts[-1]), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :1] = 0, 0
    found, wanted, computed = both_ways(model, monkeypatch, ids, cuts, mask if pads else None)
    real = mask.bool() if pads else torch.ones_like(mask).bool()
    assert (found - wanted)[real].abs().max() <= 3e-3 * wanted.abs().max()
    assert computed >= len(cuts) - 1  # and two to check a block


def test_heads_of_any_even_width_and_of_one_group(monkeypatch):
    use_compiled(monkeypatch)
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(3))
    for variant, settings in ((Variant(head_size=18), {}), (Variant(), {"num_kv_heads": 4}), (Variant(), {"num_kv_heads": 1})):
        found, wanted, computed = both_ways(packed_llama("int8", variant, **settings), monkeypatch, ids, [4, 8, 9])
        assert computed
        assert (found - wanted).abs().max() <= 3e-3 * wanted.abs().max()


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        (Variant(), {"qk_norm": "head"}),
        (Variant(), {"qk_norm": "width"}),
        (Variant(biased_heads=True), {}),
        (Variant(gelu_gate=True), {}),
        (Variant(one_plus_norms=True), {}),
        (Variant(), {"feed_forward": "gelu"}),
        (Variant(), {"norm": "layer"}),
        (Variant(), {"positions": "learned"}),
    ],
)
def test_blocks_of_other_kinds_are_left_to_torch(variant, settings, monkeypatch):
    use_compiled(monkeypatch)
    ids = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(3))
    found, wanted, computed = both_ways(packed_llama("int8", variant, **settings), monkeypatch, ids, [4, 5, 6])
    assert torch.equal(found, wanted)
    assert computed == 0


def test_a_layer_with_a_hook_is_left_to_torch(monkeypatch):
    use_compiled(monkeypatch)
    model, ids = packed_llama("int8"), torch.randint(0, 50, (1, 6), generator=torch.Generator().manual_seed(3))
    before = steps(model, ids, [4, 5, 6])
    model.blocks[2].feed_forward.down.register_forward_hook(lambda layer, given, found: found + 1)
    found, wanted, _ = both_ways(model, monkeypatch, ids, [4, 5, 6])
    assert torch.equal(found, wanted)
    assert not torch.equal(found, before)


def test_a_library_that_computes_something_else_is_not_used(monkeypatch):
    use_compiled(monkeypatch)
    model, compute = packed_llama("int8"), compiled_blocks._compute
    monkeypatch.setattr(compiled_blocks, "_compute", lambda *given: compute(*given) * 1.01)
    assert compiled_blocks._checked(list(model.blocks.children())) is None


def test_numbers_that_are_not_finite_stay_so(monkeypatch):
    use_compiled(monkeypatch)
    model, ids = packed_llama("int8"), torch.zeros(2, 1, dtype=torch.long)
    model.blocks[1].attention_norm.weight.data[3] = float("nan")
    with torch.inference_mode():
        assert not model.hidden(ids, cache=model.new_cache(0)).isfinite().any(-1).any()


def test_parts_of_a_model_have_blocks_of_their_own(monkeypatch):
    use_compiled(monkeypatch)
    model, ids = packed_llama("int4"), torch.randint(0, 50, (2, 4), generator=torch.Generator().manual_seed(3))
    parts = model.only(0, 1), model.only(1, 3)
    with torch.inference_mode():
        x = model.embed(ids)
        wanted = model.through(x, ids, cache=model.new_cache(0))
        for part in parts:
            x = part.through(x, ids, cache=part.new_cache(0))
    assert torch.equal(x, wanted)
