"""Packed matrices: what the bytes give, products with them against the unpacked matrix in float64, and models that are made of them."""

from __future__ import annotations

import pytest
import torch

from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.gpt import Gpt
from shoal.models.packed import compiled, layers, products
from shoal.models.packed.formats import KINDS, PackedShape, kind_for, packed, unpacked
from shoal.models.packed.layers import PackedLinear, arranged, byte_count, checked_kinds, number_count, pack_linear_layers
from shoal.models.packed.model import PackedModel, joint_kind, kinds_of
from shoal.models.stages import without_weights

ROUNDING = {"fp16": 2**-11, "bf16": 2**-8, "int8": 2**-7, "int4": 2**-2.5}
"""Most by which a packed number may differ, of the largest of its row."""
CPU = torch.device("cpu")


def matrix(rows: int = 64, columns: int = 96) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 1, rows)[:, None]


def unpacked_whole(raw: torch.Tensor, shape: PackedShape) -> torch.Tensor:
    return torch.cat(list(unpacked(raw, shape)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_number_is_near_what_was_packed(kind, monkeypatch):
    monkeypatch.setattr("shoal.models.packed.formats._AT_A_TIME", 1000)  # several blocks of rows
    weight, shape = matrix(), PackedShape(kind, 64, 96)
    raw = packed(weight, kind)
    assert (raw.dtype, raw.shape) == (torch.uint8, (shape.nbytes,))
    found = unpacked_whole(raw, shape)
    assert ((found - weight).abs() <= ROUNDING[kind] * weight.abs().amax(1, keepdim=True)).all()


def test_int4_gives_back_what_sixteen_even_steps_can_say():
    steps = torch.arange(32).remainder(16) * 0.25 - 2.0
    weight = torch.stack([steps, steps.flip(0) + 1, torch.full((32,), 3.0)])
    assert torch.equal(unpacked_whole(packed(weight, "int4"), PackedShape("int4", 3, 32)), weight)


SHAPES = {"fp16": (64, 96), "bf16": (64, 96), "int8": (7, 94), "int4": (20, 96)}
"""Rows that are no multiple of what kernels compute together, and columns that are none, where the kind has any."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 65])
def test_every_way_computes_the_product_with_the_unpacked_matrix(kind, rows):
    for size in (SHAPES[kind], (64, 96)):
        shape, x = PackedShape(kind, *size), torch.randn(rows, size[1], generator=torch.Generator().manual_seed(2))
        raw = packed(matrix(*size), kind)
        weight = unpacked_whole(raw, shape).double()
        wanted = x.double() @ weight.t()
        for way in [products.UNPACKED, *filter(lambda way: products._is_right(way, x, raw, shape), products._ways(shape))]:
            error = (way.multiply(x, way.arranged(raw, shape), shape).double() - wanted).abs() / (x.norm(dim=1).max() * weight.norm(dim=1))
            exact = kind == "int8" or way.multiply is compiled.multiply_compiled
            assert error.max() <= (1e-4 if exact else 2**-8)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_compiled_product_is_used_where_there_is_a_compiler(kind):
    if compiled.library() is None:
        pytest.skip("no C compiler here")
    shape = PackedShape(kind, 64, 2080)
    raw, x = packed(matrix(64, 2080), kind), torch.randn(3, 2080, generator=torch.Generator().manual_seed(3)) * 1e3
    way = products._COMPILED_INT8 if kind == "int8" else products._COMPILED_INT4
    assert products._is_right(way, x, raw, shape)
    arranged_bytes = way.arranged(raw, shape)
    alone = torch.cat([way.multiply(row[None], arranged_bytes, shape) for row in x])
    assert torch.equal(way.multiply(x, arranged_bytes, shape), alone)
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    assert way.multiply(x, arranged_bytes, shape).isfinite().all(1).tolist() == [False, False, True]


def test_the_compiled_product_sums_the_largest_numbers_without_overflow():
    if compiled.library() is None:
        pytest.skip("no C compiler here")
    x, weight = torch.full((2, 10_000), 3.0), torch.full((4, 10_000), 2.0)
    found = compiled.multiply_compiled(x, packed(weight, "int8"), PackedShape("int8", 4, 10_000))
    assert found.sub(60_000).abs().max() <= 60


def test_without_a_compiler_torch_computes_the_products(monkeypatch):
    monkeypatch.setattr(compiled, "library", lambda: None)
    shape = PackedShape("int4", 48, 64)
    assert products._fastest.__wrapped__(shape, 1) != products._COMPILED_INT4


def test_a_compiler_that_fails_leaves_no_library(tmp_path):
    place = tmp_path / "made.so"
    assert compiled._compiled(place, "false", ()) is None
    assert list(tmp_path.iterdir()) == []


def test_a_way_that_computes_something_else_here_is_not_used():
    shape, raw, x = PackedShape("int8", 64, 96), packed(matrix(), "int8"), matrix(4)
    saturating = products.UNPACKED._replace(multiply=lambda *given: products.UNPACKED.multiply(*given).clamp(-1, 1))
    lacking = products.UNPACKED._replace(multiply=lambda *_: (_ for _ in ()).throw(RuntimeError("no kernel")))
    ways = (products.UNPACKED, saturating, lacking)
    assert [products._is_right(way, x, raw, shape) for way in ways] == [True, False, False]


def small_gpt(**settings) -> Gpt:
    torch.manual_seed(4)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 32, "positions": "rotary"}
    model = Gpt(schema.Gpt(**sizes | settings), 40)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model.eval()


def packed_gpt(model: Gpt, kind: str, **settings) -> PackedModel:
    def make() -> Gpt:
        with without_weights():
            return small_gpt(**settings)

    return PackedModel(make, model.get_parameter, kinds_of(model, kind, lambda name: None))


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_computes_what_its_unpacked_weights_give(kind, tied, monkeypatch):
    monkeypatch.setattr(layers, "SMALL", 0)
    plain = small_gpt(tied_embeddings=tied)
    source = packed_gpt(plain, kind, tied_embeddings=tied)
    model = source.load(CPU)
    with torch.no_grad():
        for name, shape in source.shapes.items():
            plain.get_parameter(name).copy_(unpacked_whole(source.get(name), shape))
    ids, cache = torch.randint(0, 40, (3, 7), generator=torch.Generator().manual_seed(5)), model.new_cache(0)
    with torch.inference_mode():
        wanted, found = plain(ids), model(ids)
        steps = torch.stack([model.next_logits(ids[:, i : i + 1], cache) for i in range(7)], 1)
    assert (found - wanted).abs().max() <= (2e-3 if kind == "int8" else 0.05) * wanted.abs().max()
    assert (steps - found).abs().max() <= (2e-3 if kind == "int8" else 0.05) * wanted.abs().max()
    assert number_count(model) == sum(one.numel() for one in plain.parameters())
    assert byte_count(model) < {"bf16": 0.6, "int8": 0.4, "int4": 0.35}[kind] * byte_count(plain)


def test_tables_and_small_matrices_have_eight_bits_where_others_have_four(monkeypatch):
    assert set(kinds_of(small_gpt(), "int4", lambda name: None).values()) == {"int8"}
    assert set(kinds_of(small_gpt(), "int4", lambda name: "int4").values()) == {"int4"}, "codes that are there stay"
    monkeypatch.setattr(layers, "SMALL", 0)
    kinds = kinds_of(small_gpt(tied_embeddings=False), "int4", lambda name: None)
    assert {name for name, kind in kinds.items() if kind == "int8"} == {"token_embedding.weight", "output.weight"}
    assert kind_for("int4", 48) == "int8"
    assert kinds_of(small_gpt(), "fp32", lambda name: None) == {}


def test_what_is_stored_in_half_precision_stays_so():
    kinds = kinds_of(small_gpt(), "auto", lambda name: "bf16" if "feed_forward" in name else None)
    assert set(kinds.values()) == {"bf16"}
    assert len(kinds) == 4
    assert [joint_kind(one) for one in ({"int4"}, {"int4", "int8"}, {"int4", None}, {"fp16", "bf16"})] == ["int4", "int8", None, None]


def test_bytes_of_another_size_are_refused():
    shapes = {"a": PackedShape("int8", 2, 32)}
    with pytest.raises(ShoalError, match="the tensor a is not 68 bytes of int8"):
        arranged(lambda name: torch.zeros(67, dtype=torch.uint8), shapes, CPU)("a")
    with pytest.raises(ShoalError, match="kinds of packed weights"):
        checked_kinds({"a": "int3"})


def test_a_layer_keeps_its_bias_and_the_type_of_its_input():
    shape, bias = PackedShape("int8", 64, 96), torch.nn.Parameter(torch.arange(64.0), requires_grad=False)
    layer = PackedLinear(shape, bias)
    layer.weight = torch.nn.Parameter(packed(matrix(), "int8"), requires_grad=False)
    assert torch.equal(layer(torch.zeros(2, 3, 96, dtype=torch.bfloat16)), bias.bfloat16().expand(2, 3, 64))


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_models_are_packed_but_for_their_output_matrix(tied):
    model, ids = small_gpt(tied_embeddings=tied).eval(), torch.randint(0, 40, (3, 7), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        wanted, weight = model(ids), model.output_weight.clone()
        assert pack_linear_layers(model, "auto") == 0
        assert pack_linear_layers(model, "int8") == sum(one.numbers for one in shapes_of(model))
        assert (model(ids) - wanted).abs().max() <= 0.05 * wanted.abs().max()
        assert torch.equal(model.output_weight, weight), "losses read it"
    assert all(isinstance(one, PackedLinear) for name, one in model.named_modules() if name.endswith(("up", "query_key_value")))


def shapes_of(model: Gpt) -> list[PackedShape]:
    return [one.shape for one in model.modules() if isinstance(one, PackedLinear)]
