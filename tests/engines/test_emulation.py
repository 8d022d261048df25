"""fp8 and nvfp4 in emulation: rounding against torchao's reference, gradients against exact ones, and whole steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.config import load
from shoal.config.schema.training import Fp8
from shoal.engines import SingleEngine
from shoal.engines.precision import emulation, fp8, nvfp4
from shoal.engines.precision.fp8 import LARGEST, ScaleHistory, codes_of
from shoal.errors import ShoalError
from shoal.models.gpt import Gpt
from shoal.models.moe import Moe
from shoal.tasks.language import LanguageModelling

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::SyntaxWarning")


def spread_out(*shape: int) -> Tensor:
    """Numbers of many magnitudes, ties and zeros among them."""
    torch.manual_seed(0)
    values = torch.randn(*shape) * torch.exp(3 * torch.randn(shape[0], 1))
    values[0] = torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.25, -5.0, 0.0, -0.0, 0.5, 1.0, 3.0, 4.0]).repeat(
        shape[1] // 16
    )
    return values


def reference(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """torchao's numbers, scales and scale of the whole."""
    formats = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    whole = formats.per_tensor_amax_to_scale(x.abs().max())
    scales, packed = formats.nvfp4_quantize(x, per_tensor_scale=whole)
    return kernels.f4_unpacked_to_f32(kernels.unpack_uint4(packed)), scales, whole


def same_bits(one: Tensor, other: Tensor) -> bool:
    kind = torch.uint8 if one.element_size() == 1 else torch.int32
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def test_nvfp4_has_the_bits_of_the_reference() -> None:
    x = spread_out(64, 160)
    for ours, theirs in zip(nvfp4.quantise(x), reference(x), strict=True):
        assert same_bits(ours, theirs.view_as(ours))


def test_square_blocks_have_the_bits_of_the_reference_and_are_the_same_transposed() -> None:
    x = torch.randn(64, 64)
    x.view(64, 4, 16)[..., 0] = x.abs().unflatten(1, (4, 16)).amax(2).unflatten(0, (4, 16)).amax(1).repeat_interleave(16, 0)
    ours, theirs = nvfp4.quantise(x, square=True), reference(x)
    assert same_bits(ours.numbers, theirs[0])
    assert same_bits(ours.scales.repeat_interleave(16, 0), theirs[1].view(64, 4))
    y = torch.randn(40, 24)
    assert torch.equal(nvfp4.rounded(y, square=True).T, nvfp4.rounded(y.T, square=True))


def test_rounding_by_chance_has_the_right_mean_and_only_neighbours() -> None:
    torch.manual_seed(0)
    row = torch.tensor([[0.1, 0.6, 1.1, 1.9, 2.2, 3.7, 4.5, 6.0] * 2])
    many = row.repeat(20_000, 1)
    drawn = nvfp4.rounded(many, stochastic=True)
    assert torch.allclose(drawn.mean(0), row[0], atol=0.03)
    assert set(drawn[:, 6].tolist()) == {4.0, 6.0}


def test_mixed_rows_leave_the_product_as_it_was() -> None:
    x, y = torch.randn(37, 5), torch.randn(37, 7)
    assert torch.allclose(nvfp4.turned(x).T @ nvfp4.turned(y), x.T @ y, atol=1e-4)


def test_zeros_stay_zeros() -> None:
    assert not nvfp4.rounded(torch.zeros(3, 20), square=True).any()


def rows_of(**settings: int) -> ScaleHistory:
    return ScaleHistory(Fp8(**settings), torch.device("cpu"))


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_a_rounded_product_has_about_the_slopes_of_the_exact_one(kind: str) -> None:
    """The direction is right within what the format holds; over many draws the error of nvfp4's slopes averages out."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 48, requires_grad=True), torch.randn(32, 48, requires_grad=True)
    slope = torch.randn(64, 32)
    exact = [x @ weight.T, slope @ weight, slope.T @ x]
    product = emulation.rounded_product(x, weight, rows_of() if kind == "fp8" else emulation.BlockScaledFormat(), "one")
    found = [product, *torch.autograd.grad(product, (x, weight), slope)]
    for ours, right in zip(found, exact, strict=True):
        error = float(((ours - right).norm() / right.norm()).detach())
        assert 0 < error < (0.08 if kind == "fp8" else 0.25)


def test_the_scale_of_a_weight_holds_for_its_interval_and_survives() -> None:
    rows, small, large = rows_of(interval=3), torch.full((2, 2), 1.0), torch.full((2, 2), 100.0)
    rows.keep("one", small)
    seen = []
    for step in range(4):
        if step == 2:
            other = rows_of(interval=3)
            other.keep("one", small)
            other.load_state_dict(rows.state_dict())
            rows = other
        rows.begin_step(step)
        seen.append([float(one.max()) for one in rows.forward(large, small if step == 0 else large, "one")])
    assert [weight for _, weight in seen] == pytest.approx([1.0, 1.0, 1.0, 100.0])
    assert [x for x, _ in seen] == pytest.approx([100.0] * 4), "rows of the input have scales of their own in every step"


def test_every_row_has_a_scale_and_the_margin_leaves_powers_of_two_free() -> None:
    x = torch.tensor([[1000.0, 1.0], [0.001, 0.001], [0.0, 0.0]])
    rounded, _ = rows_of().forward(x, x, "one")
    assert torch.allclose(rounded, x, rtol=0.07)
    scale = x.abs().amax(1) / LARGEST
    assert float(codes_of(x, scale).float().max()) == 448.0
    assert float(codes_of(x, 4 * scale).float().max()) == 112.0
    assert torch.equal(rows_of(margin=2).forward(x, x, "one")[0], codes_of(x, 4 * scale).float() * 4 * scale[:, None])


def test_the_gradient_of_a_weight_in_fp8_is_that_of_bf16() -> None:
    x, weight = torch.randn(8, 16), torch.randn(4, 16, requires_grad=True)
    slope = torch.randn(8, 4)
    (found,) = torch.autograd.grad(emulation.rounded_product(x, weight, rows_of(), "one"), weight, slope)
    torch.testing.assert_close(found, slope.bfloat16().float().T @ x.bfloat16().float())


def test_experts_keep_their_scales_in_the_places_of_their_layer() -> None:
    rows, weight = rows_of(interval=2), torch.randn(3, 4, 8, requires_grad=True)
    emulation.grouped(rows, "experts", weight)(torch.randn(5, 8), weight, torch.tensor([2, 0, 3]), None).sum().backward()
    assert torch.allclose(rows.kept["experts"][[0, 2]], weight.detach().abs().amax(2)[[0, 2]] / LARGEST)
    assert not rows.kept["experts"][1].any(), "nobody visits the second expert"


def test_fp8_training_needs_a_gpu_that_has_it_and_a_coordinator_evaluates_in_bf16() -> None:
    training = load("demo-gpt", overrides=["training.precision.kind=fp8"], environ={}).training
    with pytest.raises(ShoalError, match="needs a GPU of the Hopper generation"):
        fp8.check(training, torch.device("cpu"))
    fp8.check(training.replace(allow_emulation=True), torch.device("cpu"))
    engine = tiny("gpt", "training.precision.kind=fp8")
    assert engine.scales is None


def test_matrices_of_odd_sizes_are_refused_in_real_fp8() -> None:
    with pytest.raises(ShoalError, match="one of 24 × 20"):
        fp8.Fp8Linear(nn.Linear(20, 24), rows_of(), "one")


def test_emulation_is_labelled() -> None:
    from shoal.config.load import ConfigFile, resolve

    loaded = resolve([ConfigFile("gpu/tiny"), ConfigFile("research/quantization_nvfp4")], environ={})
    assert loaded.ok
    assert any(problem.code == "emulated" for problem in loaded.problems)


def tiny(kind: str, *more: str) -> SingleEngine:
    sizes = ["hidden_size=32", "num_layers=3", "num_heads=2", "max_seq_len=16", "vocab_size=20"]
    run = load(
        "starter",
        overrides=[f"model.kind={kind}", *(f"model.{one}" for one in sizes), "task.kind=language-modelling", "data.source.name=zen", *more],
        environ={},
    )
    torch.manual_seed(0)
    model: nn.Module = (Gpt if kind == "gpt" else Moe)(run.model, 20)  # type: ignore[arg-type]
    return SingleEngine(run, LanguageModelling({"model": model}), torch.device("cpu"), 100)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("kind", "precision"), [("gpt", "fp8"), ("gpt", "nvfp4"), ("moe", "fp16"), ("moe", "bf16"), ("moe", "fp8"), ("moe", "nvfp4")]
)
def test_every_precision_learns_a_little_text(kind: str, precision: str) -> None:
    allowed = "training.allow_emulation=true"
    engine = tiny(kind, f"training.precision.kind={precision}", allowed, "training.optimizer.learning_rate=0.01")
    names = list(engine.weights())
    ids = torch.arange(64).view(4, 16) % 5
    batch = {"input_ids": ids, "labels": (ids + 1) % 5}
    first = float(engine.step([batch]).metrics["loss"])
    for _ in range(7):
        last = float(engine.step([batch]).metrics["loss"])
    assert last < 0.85 * first
    assert engine.finite()
    assert names == list(tiny(kind).weights()), "the parameters have the same names in every precision"


def test_the_last_block_the_output_and_the_router_are_not_rounded() -> None:
    engine = tiny("moe", "training.precision.kind=nvfp4", "model.tied_embeddings=false")
    model = engine.task.players["model"]
    assert isinstance(model, Moe)
    rounded = [any(isinstance(one, emulation.EmulatedLinear) for one in block.modules()) for block in model.blocks]
    assert rounded == [True, True, False]
    assert type(model.output) is nn.Linear
    with pytest.raises(ShoalError, match="its last block of 1 stays in bf16"):
        tiny("gpt", "model.num_layers=1", "training.precision.kind=nvfp4")


def test_an_expert_that_nobody_visits_gets_exactly_no_gradient() -> None:
    weight = torch.randn(3, 8, 16, requires_grad=True)
    product = emulation.grouped(emulation.BlockScaledFormat(), "experts", weight)
    product(torch.randn(5, 16), weight, torch.tensor([2, 0, 3]), None).square().sum().backward()
    assert weight.grad is not None
    assert not weight.grad[1].any()
    assert weight.grad[0].any()
