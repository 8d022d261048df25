"""The step and the experts on a GPU, against plain torch on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.config.data_shapes import DataShapes
from shoal.config.load import resolve_data
from shoal.engines import SingleEngine
from shoal.engines.optim.adam_state import GradientClip
from shoal.engines.optim.flat_adam import FlatAdam
from shoal.models import build
from shoal.models.layers.expert_layer import grouped_linear
from shoal.tasks.language import LanguageModelling
from shoal.updates.layout import FlatNetwork

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
KINDS = ["fp32", "bf16", "fp8"]


def engine(kind: str = "moe", device: str = "cuda", seed: int = 0, dropout: float = 0.0, **training: Any) -> SingleEngine:
    model: dict[str, Any] = {"kind": kind, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_seq_len": 32, "dropout": dropout}
    if kind == "moe":
        model["experts"] = {"count": 16, "per_token": 2}
    run = resolve_data({"model": model, "training": {"device": device} | training}, name="test", dialect="shoal", environ={}).run
    torch.manual_seed(seed)
    return SingleEngine(run, LanguageModelling(build(run, DataShapes(vocab_size=257))), torch.device(device), 100, learns=True)


def batches(count: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(257, (count, 4, 33), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in ids]


def networks(width: int) -> tuple[FlatNetwork, FlatNetwork]:
    """The same network on both devices; its linear layers read a shadow. Odd widths lie at places that are no multiples of 16 bytes."""
    made = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(width, 96), nn.LayerNorm(96), nn.Linear(96, 80, bias=False)).to(device)
        made.append(FlatNetwork(network))
        made[-1].cast_shadow({"0.weight", "2.weight"})
    return made[0], made[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [64, 61])
@pytest.mark.parametrize("decoupled", [True, False])
def test_the_kernel_steps_as_plain_torch_does(kind: str, width: int, decoupled: bool) -> None:
    cpu, gpu = networks(width)
    pair = [FlatAdam(network, kind, decoupled=decoupled, lr=0.01, weight_decay=0.1) for network in (cpu, gpu)]
    for step in range(4):
        for number, (own, other) in enumerate(zip(cpu.parameters, gpu.parameters, strict=True)):
            own.grad = None if number == 1 and step == 2 else (torch.randn(own.shape) * 10 ** (-4 * torch.rand(own.shape))).to(own.dtype)
            other.grad = None if own.grad is None else own.grad.cuda()
        norms = [one.norm() for one in pair]
        torch.testing.assert_close(norms[1].cpu(), norms[0])
        for one in pair:
            one.clip = GradientClip(norms[0].to(one.network.vector.device), 1.0, skip=True)
            one.step()
    apart = ~torch.isclose(gpu.vector.cpu(), cpu.vector, rtol=1e-4, atol=1e-5)
    assert float(apart.float().mean()) < (0.0001 if kind == "fp32" else 0.01)  # a sum in another order may round the other way
    assert gpu.shadow is not None
    assert torch.equal(gpu.shadow, gpu.vector.to(torch.bfloat16))
    for found, expected in zip(pair[1].wide_state().values(), pair[0].wide_state().values(), strict=True):
        same = torch.isclose(found.float().cpu(), expected.float(), rtol=1e-4, atol=1e-6 * float(expected.float().abs().max()))
        assert float((~same).float().mean()) < 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_changes_nothing(kind: str) -> None:
    _, network = networks(64)
    optimizer = FlatAdam(network, kind, decoupled=True, lr=0.01)
    for parameter in network.parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    before = [network.vector.clone(), *(value.clone() for value in optimizer.wide_state().values())]
    network.parameters[0].grad[0, 0] = float("nan")
    optimizer.clip = GradientClip(optimizer.norm(), 1.0, skip=True)
    optimizer.step()
    optimizer.uncount()
    for found, expected in zip([network.vector, *optimizer.wide_state().values()], before, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_on_a_gpu_resumes_exactly(kind: str, compiled: bool) -> None:
    training = {"precision": {"kind": "bf16"}, "optimizer": {"moments": kind}, "compile": compiled, "clipping": {"max_norm": 1.0}}
    data, model = batches(6), "gpt" if compiled else "moe"
    whole, first = engine(model, **training), engine(model, **training)
    for batch in data:
        whole.step([batch])
    for batch in data[:3]:
        first.step([batch])
    second = engine(model, seed=1, **training)
    second.load_weights({name: value.clone() for name, value in first.weights().items()})
    second.load_state_dict(first.state_dict())
    for batch in data[3:]:
        second.step([batch])
    assert torch.equal(second.vector, whole.vector)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_goes_on_where_a_gpu_stopped(kind: str) -> None:
    gpu = engine(precision={"kind": "bf16"}, optimizer={"moments": kind})
    for batch in batches(3):
        gpu.step([batch])
    cpu = engine(device="cpu", seed=1)
    cpu.load_weights({name: value.cpu() for name, value in gpu.weights().items()})
    cpu.load_state_dict(gpu.state_dict())
    for batch in batches(6)[3:]:
        found, expected = gpu.step([batch]), cpu.step([batch])
    assert float(found.metrics["loss"]) == pytest.approx(float(expected.metrics["loss"]), rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_mixture_on_a_gpu_follows_the_cpu(precision: str) -> None:
    cpu, gpu = engine(device="cpu"), engine(precision={"kind": precision})
    for batch in batches(1) * 12:
        expected, found = cpu.step([batch]), gpu.step([batch])
    assert float(found.metrics["loss"]) == pytest.approx(float(expected.metrics["loss"]), rel=0.03)
    assert float(found.metrics["layers/0/dropped"]) == pytest.approx(float(expected.metrics["layers/0/dropped"]), abs=0.05)


def test_gradients_of_a_mixture_are_those_of_the_cpu() -> None:
    cpu, gpu = engine(device="cpu"), engine()
    gpu.load_weights(cpu.weights())
    cpu.gradients(batches(2))
    gpu.gradients(batches(2))
    error = (gpu.gradient.cpu() - cpu.gradient).norm() / cpu.gradient.norm()
    assert float(error) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_products_without_a_kernel_of_their_own_are_one_batched_one(dtype: torch.dtype) -> None:
    x, weight, sizes = torch.randn(50, 32), torch.randn(4, 24, 32), torch.tensor([7, 0, 30, 5])
    expected = grouped_linear(x[:42], weight, sizes)
    found = grouped_linear(x.cuda().to(dtype), weight.cuda().to(dtype), sizes.cuda())
    torch.testing.assert_close(found[:42].float().cpu(), expected, rtol=0.01, atol=0.05)


@pytest.mark.parametrize("kind", ["gpt", "moe"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_recorded_step_is_the_step_that_was_recorded(kind: str, accumulation: int) -> None:
    training: dict[str, Any] = {"precision": {"kind": "bf16"}, "clipping": {"max_norm": 1.0}, "gradient_health": {"enabled": True}}
    made = [engine(kind, dropout=0.1, cuda_graph=records, **training) for records in (False, True)]
    data = batches(5 * accumulation)
    found = []
    for one in made:
        torch.manual_seed(1)
        steps = [one.step(data[i : i + accumulation]) for i in range(0, len(data), accumulation)]
        found.append([{name: float(value) for name, value in step.metrics.items()} for step in steps])
    assert found[1] == found[0]
    assert torch.equal(made[1].vector, made[0].vector)


def test_another_shape_of_batch_is_recorded_too() -> None:
    made = [engine("gpt", cuda_graph=records, precision={"kind": "bf16"}) for records in (False, True)]
    for batch in batches(3):
        for rows in (4, 2):
            expected, found = (one.step([{name: value[:rows] for name, value in batch.items()}]).metrics["loss"] for one in made)
            assert float(found) == float(expected)


def test_a_small_mixture_is_compiled() -> None:
    plain, compiled = (engine(precision={"kind": "bf16"}, compile=how) for how in (False, True))
    for batch in batches(1) * 8:
        expected, found = plain.step([batch]).metrics["loss"], compiled.step([batch]).metrics["loss"]
    assert float(found) == pytest.approx(float(expected), rel=0.02)
