"""The step over a whole vector: narrow running means, weights that products read rounded, gradients that stay where they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.config.data_shapes import DataShapes
from shoal.config.load import ConfigError, resolve_data
from shoal.config.schema.strategy import OuterOptimizer
from shoal.engines import SingleEngine, single
from shoal.engines.learners.apply import AdoptWeights, OuterStep
from shoal.engines.optim.adam_state import GradientClip, MomentBuffer, rounded_to_fp8
from shoal.engines.optim.flat_adam import FlatAdam
from shoal.errors import ShoalError
from shoal.models import build
from shoal.tasks.language import LanguageModelling
from shoal.updates.contribution_policy import ContributionPolicy
from shoal.updates.layout import FlatNetwork, ParameterLayout
from shoal.worker.step_policies import PullPolicy
from shoal.worker.weights import WorkerWeights

KINDS = ["fp32", "bf16", "fp8"]


def engine(seed: int = 0, *, rounds: bool = True, kind: str = "gpt", **training: Any) -> SingleEngine:
    model: dict[str, Any] = {"kind": kind, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 8, "dropout": 0.0}
    settings = {"model": model, "training": {"precision": {"kind": "bf16"}, "device": "cpu"} | training}
    run = resolve_data(settings, name="test", dialect="shoal", environ={}).run
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single, "reads_rounded", lambda run, device: rounds)
        return SingleEngine(run, LanguageModelling(build(run, DataShapes(vocab_size=23))), torch.device("cpu"), 100, learns=True)


def batches(count: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(23, (count, 3, 9), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row[:, :-1], "labels": row[:, 1:].contiguous()} for row in ids]


def shadow_is_the_vector_rounded(made: SingleEngine) -> bool:
    network = made.networks["model"]
    assert network.shadow is not None
    return torch.equal(network.shadow, network.vector.to(torch.bfloat16))


# --- the step ------------------------------------------------------------------------------------------------


def stepped(kind: str, name: str, steps: int = 20, clip: float | None = None) -> tuple[Tensor, Tensor]:
    """Weights after steps along the same gradients: ours, and those of torch's optimizer in float64."""
    torch.manual_seed(0)
    ours, peer = nn.Linear(40, 70), nn.Linear(40, 70).double()
    peer.load_state_dict(ours.state_dict())
    network = FlatNetwork(ours)
    optimizer = FlatAdam(network, kind, decoupled=name == "AdamW", lr=0.01, weight_decay=0.1)
    reference = getattr(torch.optim, name)(peer.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(steps):
        for own, other in zip(ours.parameters(), peer.parameters(), strict=True):
            own.grad = torch.randn_like(own) + 0.5
            other.grad = own.grad.double()
        if clip is not None:
            optimizer.clip = GradientClip(optimizer.norm(), clip, skip=False)
            nn.utils.clip_grad_norm_(peer.parameters(), clip)
        optimizer.step()
        reference.step()
    return network.vector, torch.cat([one.detach().flatten() for one in peer.parameters()])


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_step_over_the_vector_is_that_of_torch(name: str, clip: float | None) -> None:
    found, expected = stepped("fp32", name, clip=clip)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "error"), [("bf16", 0.01), ("fp8", 0.15)])
def test_narrow_means_lead_where_wide_ones_do(kind: str, error: float) -> None:
    start, (found, expected) = stepped("fp32", "AdamW", steps=0)[0], stepped(kind, "AdamW", steps=60)
    assert float((found - expected).norm() / (expected - start).norm()) < error


def test_small_changes_add_up_though_each_is_less_than_a_digit() -> None:
    mean = MomentBuffer("bf16", ParameterLayout([("w", (4096,))]), torch.device("cpu"), root=True)
    mean.write(0, torch.ones(4096), seed=0)
    for step in range(300):
        mean.write(0, mean.read(0) * 0.999, seed=step)
    assert float(mean.read(0).mean()) == pytest.approx(0.999**300, rel=0.01)


def test_fp8_holds_sixteen_powers_of_two_and_never_loses_a_mean_of_squares() -> None:
    values = 10.0 ** -torch.linspace(0, 12, 2048)
    codes, scales = rounded_to_fp8(values[None], torch.zeros(1, 2048, dtype=torch.int64), at_least=True)
    found = (codes * scales)[0]
    assert bool((found > 0).all())
    large = values > 2e-4
    assert float((found[large] / values[large] - 1).abs().max()) <= 1 / 8
    again, same = rounded_to_fp8(found[None], torch.full((1, 2048), 0xFFFFF), at_least=True)
    assert torch.equal(again, codes)
    assert torch.equal(same, scales)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_takes_the_very_same_steps(kind: str) -> None:
    optimizer = {"name": "AdamW", "moments": kind}
    whole, first = engine(optimizer=optimizer), engine(optimizer=optimizer)
    data = batches(6)
    for batch in data:
        whole.step([batch])
    for batch in data[:3]:
        first.step([batch])
    second = engine(seed=1, optimizer=optimizer)
    second.load_weights({name: value.clone() for name, value in first.weights().items()})
    second.load_state_dict(first.state_dict())
    for batch in data[3:]:
        second.step([batch])
    assert torch.equal(second.vector, whole.vector)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_an_optimizer_with_wide_means_goes_on_with_narrow_ones_and_back(kind: str) -> None:
    narrow, wide = engine(optimizer={"moments": kind}), engine(rounds=False)
    assert isinstance(narrow.optimizers["model"], FlatAdam)
    assert not isinstance(wide.optimizers["model"], FlatAdam)
    for batch in batches(3):
        narrow.step([batch])
    state = narrow.state_dict()
    wide.load_state_dict(state)
    narrow.load_state_dict(wide.state_dict())
    again = narrow.state_dict()["optimizers"]["model"]
    for name, own in state["optimizers"]["model"]["moments"].items():
        for key, value in own.items():
            assert torch.equal(again["moments"][name][key], value), (name, key)
    assert float(again["shared"]["step"]) == 3


def test_a_gradient_that_is_not_finite_is_skipped_and_not_counted() -> None:
    made = engine(optimizer={"moments": "bf16"}, gradient_health={"enabled": True})
    made.step(batches(1))
    before, count = made.vector.clone(), float(made.optimizers["model"].state_dict()["state"][0]["step"])
    made.apply(torch.full_like(before, math.inf), 1.0)
    assert torch.equal(made.vector, before)
    assert float(made.optimizers["model"].state_dict()["state"][0]["step"]) == count
    assert made.health is not None
    assert made.health.skipped == 1


def test_narrow_means_are_refused_where_nobody_keeps_them() -> None:
    with pytest.raises(ConfigError, match="SGD keeps its means in fp32"):
        engine(optimizer={"name": "SGD", "moments": "bf16"})
    with pytest.raises(ConfigError, match="takes no `amsgrad`"):
        engine(optimizer={"moments": "fp8", "kwargs": {"amsgrad": True}})


def test_recordings_are_refused_where_there_is_no_gpu_and_where_passes_differ() -> None:
    with pytest.raises(ShoalError, match="computes on cpu"):
        engine(cuda_graph=True).step(batches(1))
    with pytest.raises(ConfigError, match="activations again"):
        engine(cuda_graph=True, gradient_checkpointing=True)


# --- the shadow ----------------------------------------------------------------------------------------------


def pulled(made: SingleEngine) -> None:
    codec = resolve_data({}, name="test", dialect="shoal", environ={}).run.updates.codec
    weights = WorkerWeights(made, codec, PullPolicy(), ContributionPolicy(takes_inner_steps=True))
    weights.base.normal_()
    weights.go_back()


def looked_ahead(made: SingleEngine) -> None:
    made.expect(torch.randn_like(made.vector))
    made.gradients(batches(1))


def outer(averages: bool) -> Callable[[SingleEngine], None]:
    def write(made: SingleEngine) -> None:
        OuterStep(OuterOptimizer(), averages=averages).learner(made, ())._step(torch.randn_like(made.vector), 0, 1.0)

    return write


WRITERS: dict[str, Callable[[SingleEngine], object]] = {
    "a step": lambda made: made.step(batches(1)),
    "a step of several batches": lambda made: made.step(batches(3)),
    "a gradient of others": lambda made: made.apply(torch.randn_like(made.vector), 1.0),
    "a pull": pulled,
    "look-ahead": looked_ahead,
    "the outer optimizer": outer(averages=False),
    "the mean of workers": outer(averages=True),
    "a relay": lambda made: AdoptWeights().learner(made, ()).begin(torch.randn_like(made.vector), torch.empty(0)),  # type: ignore[attr-defined]
    "a restored checkpoint": lambda made: made.load_weights({name: torch.randn_like(one) for name, one in made.weights().items()}),
    "an island": lambda made: made.load_wholes([torch.randn_like(one) for one in made.wholes()]),
}


@pytest.mark.parametrize("optimizer", [{"moments": "bf16"}, {"name": "SGD"}, {"name": "Muon"}], ids=["Adam", "SGD", "Muon"])
def test_after_every_writer_products_read_the_vector_rounded(optimizer: dict[str, str]) -> None:
    made = engine(optimizer=optimizer, clipping={"max_norm": 1.0})
    for name, write in WRITERS.items():
        before = made.vector.clone()
        write(made)
        assert shadow_is_the_vector_rounded(made), name
        if name != "look-ahead":  # it goes back
            assert not torch.equal(before, made.vector), name


def test_a_network_that_reads_rounded_weights_learns_what_the_others_learn() -> None:
    for kind in ("gpt", "moe"):
        rounded, plain = (engine(kind=kind, rounds=rounds, optimizer={"moments": "fp32"}) for rounds in (True, False))
        for batch in batches(8):
            found, expected = rounded.step([batch]), plain.step([batch])
        assert float(found.metrics["loss"]) == pytest.approx(float(expected.metrics["loss"]), rel=0.01)


def test_routers_and_norms_read_the_vector_itself() -> None:
    model = engine(kind="moe").task.players["model"]
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, kind in types.items() if kind == torch.float32} == {name for name in types if "norm" in name or "router" in name}


def test_gradients_of_several_batches_are_added_up_in_full() -> None:
    made, data = engine(), batches(4)
    total = torch.zeros_like(made.vector)
    for batch in data:
        made.gradients([batch])
        total += made.gradient / len(data)
    made.gradients(data)
    assert float((made.gradient - total).norm() / total.norm()) < 0.003  # one of bf16's own digits; added up in bf16 it is 0.006
    assert made.gradient.dtype == torch.float32


def test_checkpoints_and_finished_networks_have_all_digits() -> None:
    made = engine()
    made.step(batches(1))
    assert {value.dtype for value in made.weights().values()} == {torch.float32}
    kept = made.vector.clone()
    made.finish()
    parameters = [one.detach().flatten() for one in made.task.players["model"].parameters()]
    assert torch.equal(torch.cat(parameters), kept)


@pytest.mark.parametrize("clip", [None, 1e-3, 1e6])
@pytest.mark.parametrize("optimizer", [{"name": "AdamW"}, {"name": "SGD", "momentum": 0.9, "weight_decay": 0.01}, {"name": "Adagrad"}])
def test_a_received_gradient_is_stepped_along_without_a_copy_and_unchanged(optimizer: dict[str, Any], clip: float | None) -> None:
    clipping = {"clipping": {"max_norm": clip}} if clip else {}
    received, copied = (engine(optimizer=optimizer, **clipping) for _ in range(2))
    for seed in range(3):
        gradient = torch.randn(received.vector.numel(), generator=torch.Generator().manual_seed(seed))
        before = gradient.clone()
        received.gradient.fill_(7.0)
        copied.gradient.copy_(gradient)
        figures = received.apply(gradient, seed), copied.apply(copied.gradient, seed)
        assert figures[0] == figures[1]
        assert torch.equal(received.vector, copied.vector)
        assert torch.equal(gradient, before)
        assert bool((received.gradient == 7.0).all()) == (clip != 1e-3)
