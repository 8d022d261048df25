"""Real fp8 on a GPU of the Hopper generation, against its emulation on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_cuda_step import batches, engine
from torch import Tensor

from shoal.config.schema.training import Fp8
from shoal.engines import emulation, fp8
from shoal.engines.fp8 import LARGEST, Rows, codes_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not fp8.is_real(torch.device("cuda")), reason="needs a GPU of the Hopper generation"
)
PRECISION = {"kind": "fp8"}


def spread_out(*shape: int) -> Tensor:
    return (torch.randn(shape) * torch.exp(2 * torch.randn((*shape[:-1], 1)))).bfloat16()


def both(**settings: int) -> tuple[Rows, Rows]:
    return Rows(Fp8(**settings), torch.device("cpu")), Rows(Fp8(**settings), torch.device("cuda"))


@pytest.mark.parametrize(("height", "width"), [(48, 64), (160, 3072), (33, 6144)])
@pytest.mark.parametrize("head_room", [1.0, 4.0])
def test_the_kernels_round_as_plain_torch_does(height: int, width: int, head_room: float) -> None:
    from shoal.engines import fp8_kernels

    x = torch.stack([spread_out(height, width) for _ in range(3)])
    for kernel, turned in ((fp8_kernels.by_rows, x), (fp8_kernels.by_columns, x.transpose(1, 2))):
        codes, scales = kernel(x.cuda(), None, None, head_room)
        expected = turned.float().abs().amax(2) * head_room / LARGEST
        torch.testing.assert_close(scales.cpu(), expected)
        same = codes.cpu().float() == codes_of(turned.float().flatten(0, 1), expected.flatten()).float().view(turned.shape)
        assert float(same.float().mean()) > 0.99  # a quotient halfway between two numbers may be rounded to either


def test_a_linear_layer_has_the_products_of_its_emulation() -> None:
    cpu, gpu = both(margin=1)
    x, weight, slope = spread_out(40, 96).float(), spread_out(64, 96).float(), torch.randn(40, 64).bfloat16().float()
    found = []
    for rows, device in ((cpu, "cpu"), (gpu, "cuda")):
        layer = torch.nn.Linear(96, 64, bias=False, device=device)
        layer.weight.data.copy_(weight)
        made = emulation.EmulatedLinear(layer, rows, "one") if device == "cpu" else fp8.Fp8Linear(layer, rows, "one")
        own = x.to(device).requires_grad_()
        y = made(own)
        y.backward(slope.to(y))
        found.append([y.detach(), own.grad, layer.weight.grad])
    for real, emulated in zip(found[1], found[0], strict=True):
        assert float((real.cpu().float() - emulated).norm() / emulated.norm()) < 0.01


@pytest.mark.parametrize("sizes", [[10, 0, 25, 5], [12, 8, 9, 11]])
def test_experts_have_the_products_of_their_emulation(sizes: list[int]) -> None:
    x, weight, slope = spread_out(40, 64).float(), spread_out(4, 32, 64).float(), torch.randn(40, 32).bfloat16().float()
    found = []
    for rows, device in zip(both(), ("cpu", "cuda"), strict=True):
        own, matrices = x.to(device).requires_grad_(), weight.to(device).requires_grad_()
        product = emulation.grouped(rows, "one") if device == "cpu" else fp8.grouped(rows, "one", matrices)
        y = product(own, matrices, torch.tensor(sizes, device=device), None)
        y.backward(slope.to(y))
        found.append([y.detach(), own.grad, matrices.grad])
    for real, emulated in zip(found[1], found[0], strict=True):
        assert float((real.cpu().float() - emulated).norm() / emulated.norm()) < 0.01


def test_scales_of_weights_hold_for_their_interval() -> None:
    _, rows = both(interval=3)
    small = torch.full((16, 16), 1.0, device="cuda", dtype=torch.bfloat16)
    rows.keep("one", small)
    seen = []
    for step in range(4):
        rows.begin_step(step)
        fp8.product(rows, "one", small, small if step == 0 else 100 * small, None)
        seen.append([float(rows.kept[f"one.{kind}"].max()) * LARGEST for kind in ("rows", "columns")])
    assert [one for pair in seen for one in pair] == pytest.approx([1.0] * 6 + [100.0] * 2)


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
