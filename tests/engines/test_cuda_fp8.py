"""Real fp8 on a GPU of the Hopper generation, against its emulation on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config.schema.training import Fp8
from shoal.engines.precision import emulation, fp8
from shoal.engines.precision.fp8 import LARGEST, ScaleHistory, codes_of
from shoal.errors import ShoalError
from shoal.models.layers.expert_layer import ExpertAssignment
from tests.engines.test_cuda_step import batches, engine

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not fp8.is_real(torch.device("cuda")), reason="needs a GPU of the Hopper generation"
)
PRECISION = {"kind": "fp8"}


def spread_out(*shape: int) -> Tensor:
    return (torch.randn(shape) * torch.exp(2 * torch.randn((*shape[:-1], 1)))).bfloat16()


def both(**settings: int) -> tuple[ScaleHistory, ScaleHistory]:
    return ScaleHistory(Fp8(**settings), torch.device("cpu")), ScaleHistory(Fp8(**settings), torch.device("cuda"))


def are_alike(found: Tensor, expected: Tensor, error: float = 0.01) -> bool:
    return float((found.cpu().float() - expected.cpu().float()).norm() / expected.float().norm().cpu()) < error


@pytest.mark.parametrize(("height", "width"), [(48, 64), (160, 3072), (33, 6144)])
@pytest.mark.parametrize("head_room", [1.0, 4.0])
def test_the_kernels_round_as_plain_torch_does(height: int, width: int, head_room: float) -> None:
    from shoal.engines.precision import fp8_kernels

    x = torch.stack([spread_out(height, width) for _ in range(3)])
    expected = x.float().abs().amax(2) * head_room / LARGEST
    codes, turned, scales = fp8_kernels.weight(x.cuda(), None, None, head_room)
    others, other_scales = fp8_kernels.rows(x.flatten(0, 1).cuda(), None, None, head_room)
    plain = codes_of(x.float().flatten(0, 1), expected.flatten()).float().view(x.shape)
    for one in (codes, turned.transpose(1, 2), others.view(x.shape)):
        assert float((one.cpu().float() == plain).float().mean()) > 0.99  # a quotient halfway between two numbers may be rounded to either
    torch.testing.assert_close(scales.cpu(), expected)
    torch.testing.assert_close(other_scales.cpu(), expected.flatten())


def slopes(device: str, rows: ScaleHistory, x: Tensor, weight: Tensor, slope: Tensor, sizes: list[int] | None) -> list[Tensor]:
    """A product and its gradients: real on the GPU, emulated on the CPU."""
    own, matrix = (value.to(device).requires_grad_() for value in (x.clone(), weight.clone()))
    if sizes is not None:
        product = emulation.grouped(rows, "one", matrix) if device == "cpu" else fp8.grouped(rows, "one", matrix)
        y = product(own, matrix, torch.tensor(sizes, device=device), None)
    elif device == "cpu":
        y = emulation.rounded_product(own, matrix, rows, "one")
    else:
        y = fp8.product(rows, "one", own.bfloat16(), matrix.bfloat16(), None)
    return [y.detach(), *torch.autograd.grad(y, (own, matrix), slope.to(y))]


@pytest.mark.parametrize("sizes", [None, [10, 0, 25, 5], [12, 8, 9, 11]])
def test_products_are_those_of_their_emulation(sizes: list[int] | None) -> None:
    weight = spread_out(64, 96) if sizes is None else spread_out(4, 64, 96)
    given = (spread_out(40, 96).float(), weight.float(), torch.randn(40, 64).bfloat16().float())
    emulated, real = (slopes(device, rows, *given, sizes) for device, rows in zip(("cpu", "cuda"), both(margin=1), strict=True))
    for found, expected in zip(real, emulated, strict=True):
        assert are_alike(found, expected)


def test_the_whole_of_experts_is_that_of_their_parts() -> None:
    made = [engine(precision=PRECISION).task.players["model"].blocks[0].feed_forward for _ in range(2)]  # type: ignore[index]
    parts = made[1]
    parts.whole = None
    parts.grouped_products.update({key: fp8.grouped(both()[1], key, getattr(parts, key)) for key in parts.stacks})
    sizes, slope = torch.tensor([3, 0, *[2] * 13, 5], device="cuda"), torch.randn(40, 64, device="cuda").bfloat16()
    assignment = ExpertAssignment(*[sizes] * 4, sizes, sizes, (torch.arange(40, device="cuda") < sizes.sum())[:, None])
    slope[int(sizes.sum()) :] = 0.0
    found = []
    for layer in made:
        x, gates = spread_out(40, 64).cuda().requires_grad_(), torch.linspace(0.1, 1.0, 40, device="cuda").requires_grad_()
        x.data.copy_(torch.linspace(-2, 2, 40 * 64).view(40, 64).sin())
        y = layer.experts(x, gates, assignment.sizes_E, assignment.real_R1)
        found.append([y.detach(), *torch.autograd.grad(y, (x, gates, layer.up, layer.down), slope)])
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        rows = slice(int(sizes.sum())) if number < 3 else slice(None)  # behind them is anything
        assert are_alike(one[rows], other[rows], 0.02)


def test_kernels_that_mix_bytes_up_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.engines.precision import fp8_kernels

    fp8.check_kernels(torch.device("cuda"))
    fp8.check_kernels.cache_clear()
    right = fp8_kernels.weight
    monkeypatch.setattr(fp8_kernels, "weight", lambda *given: (right(*given)[0], right(*given)[1].flip(-1), right(*given)[2]))
    with pytest.raises(ShoalError, match="products in fp8 are wrong"):
        fp8.check_kernels(torch.device("cuda"))


def test_scales_of_weights_hold_for_their_interval() -> None:
    _, rows = both(interval=3)
    small = torch.full((16, 16), 1.0, device="cuda", dtype=torch.bfloat16)
    rows.keep("one", small)
    seen = []
    for step in range(4):
        rows.begin_step(step)
        fp8.product(rows, "one", small, small if step == 0 else 100 * small, None)
        seen.append(float(rows.kept["one"].max()) * LARGEST)
    assert seen == pytest.approx([1.0, 1.0, 1.0, 100.0])


@pytest.mark.parametrize("kind", ["gpt", "moe"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_in_fp8_learns_as_one_in_bf16_does(kind: str, compiled: bool) -> None:
    plain, rounded = engine(kind, precision={"kind": "bf16"}), engine(kind, precision=PRECISION, compile=compiled)
    for batch in batches(1) * 15:
        expected, found = plain.step([batch]).metrics["loss"], rounded.step([batch]).metrics["loss"]
    assert float(found) == pytest.approx(float(expected), rel=0.03)


@pytest.mark.parametrize("interval", [1, 3])
def test_a_recorded_step_in_fp8_is_the_step_and_resumes_exactly(interval: int) -> None:
    training: dict[str, Any] = {"precision": {**PRECISION, "interval": interval}, "clipping": {"max_norm": 1.0}}
    data = batches(7)
    plain, recorded, first = engine(**training), engine(cuda_graph=True, **training), engine(cuda_graph=True, **training)
    for batch in data:
        assert float(plain.step([batch]).metrics["loss"]) == float(recorded.step([batch]).metrics["loss"])
    for batch in data[:4]:
        first.step([batch])
    second = engine(seed=1, cuda_graph=True, **training)
    second.load_weights({name: value.clone() for name, value in first.weights().items()})
    second.load_state_dict(first.state_dict())
    for batch in data[4:]:
        second.step([batch])
    assert torch.equal(second.vector, recorded.vector)
