"""The single engine against a hand-written loop, schedules against formulas, and what it refuses."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from shoal.config import Run, load
from shoal.config.data_shapes import DataShapes
from shoal.config.load import resolve_data
from shoal.config.schema.training import GradientHealth, OptimizerName, Schedule, TorchOptimizer
from shoal.engines import SingleEngine
from shoal.engines.health import HealthMonitor
from shoal.engines.optim.learning_rate import learning_rate
from shoal.engines.optim.optimizers import arguments, build, step
from shoal.errors import ShoalError
from shoal.models import build as build_models
from shoal.tasks.classification import Classification
from shoal.tasks.language import LanguageModelling
from shoal.updates.layout import FlatNetwork


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batches(count: int, size: int = 4) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"image": torch.rand(size, 1, 2, 3, generator=generator), "label": torch.randint(3, (size,), generator=generator)}
        for _ in range(count)
    ]


def run_with(*settings: str) -> Run:
    return load("starter", overrides=[*settings], environ={})


def engine_for(run: Run, total: int = 10, seed: int = 0) -> SingleEngine:
    return SingleEngine(run, Classification({"model": network(seed)}), torch.device("cpu"), total)


def reference(optimizer: str, keywords: dict[str, Any], data: list[Any], clip: float | None = None) -> torch.Tensor:
    model = network()
    made = getattr(torch.optim, optimizer)(model.parameters(), **keywords)
    for batch in data:
        made.zero_grad()
        nn.functional.cross_entropy(model(batch["image"]), batch["label"]).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_every_optimizer_of_torch_that_takes_plain_gradients_is_there() -> None:
    """SparseAdam wants sparse gradients, and LBFGS computes the loss several times for a step: those cannot work here."""
    theirs = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)}
    assert theirs - {"Optimizer", "SparseAdam", "LBFGS"} == set(OptimizerName.__args__)


@pytest.mark.parametrize("name", [name for name in OptimizerName.__args__ if name not in ("Muon", "Adafactor")])
def test_every_optimizer_follows_torch(name: str) -> None:
    data = batches(5)
    engine = engine_for(run_with(f"training.optimizer.name={name}", "training.optimizer.learning_rate=0.01"))
    for batch in data:
        engine.step([batch])
    expected = reference(name, {"lr": 0.01}, data)
    assert torch.allclose(engine.networks["model"].vector, expected, atol=2e-6)


def test_adafactor_gets_its_shapes() -> None:
    data = batches(3)
    engine = engine_for(run_with("training.optimizer.name=Adafactor", "training.optimizer.learning_rate=0.01"))
    for batch in data:
        engine.step([batch])
    assert torch.allclose(engine.networks["model"].vector, reference("Adafactor", {"lr": 0.01}, data), atol=1e-6)


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    data = batches(3)
    engine = engine_for(run_with("training.optimizer.name=Muon", "training.optimizer.learning_rate=0.01"))
    model = network()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    made = [torch.optim.Muon(matrices, lr=0.01, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(others, lr=0.01)]
    for batch in data:
        engine.step([batch])
        model.zero_grad()
        nn.functional.cross_entropy(model(batch["image"]), batch["label"]).backward()
        for optimizer in made:
            optimizer.step()
    assert torch.allclose(engine.networks["model"].vector, torch.cat([p.detach().flatten() for p in model.parameters()]), atol=1e-5)


@pytest.mark.parametrize("length", [12, 128])
@pytest.mark.parametrize("tied", [True, False])
def test_muon_leaves_tables_of_words_to_adamw(tied: bool, length: int) -> None:
    model = {"kind": "gpt", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": length, "tied_embeddings": tied}
    run = resolve_data({"model": model, "training": {"optimizer": {"name": "Muon"}}}, name="test", dialect="shoal", environ={}).run
    network = FlatNetwork(build_models(run, DataShapes(vocab_size=61))["model"])
    optimizer = build(run.training.optimizer, network)
    muon, adamw = ({id(parameter) for parameter in group["params"]} for group in optimizer.param_groups)
    names = {id(parameter): name for name, parameter in network.network.named_parameters()}
    assert {names[key] for key in muon} == {name for name in names.values() if name.startswith("blocks") and not is_vector(network, name)}
    assert muon | adamw == set(names)


def is_vector(network: FlatNetwork, name: str) -> bool:
    return network.network.get_parameter(name).ndim == 1


def test_clipping_follows_torch() -> None:
    data = batches(5)
    settings = ["training.optimizer.name=SGD", "training.optimizer.learning_rate=0.5", "training.clipping.max_norm=0.1"]
    engine = engine_for(run_with(*settings))
    for batch in data:
        engine.step([batch])
    assert torch.allclose(engine.networks["model"].vector, reference("SGD", {"lr": 0.5}, data, clip=0.1), atol=1e-6)
    off = engine_for(run_with(*settings, "training.clipping.enabled=false"))
    for batch in data:
        off.step([batch])
    assert torch.allclose(off.networks["model"].vector, reference("SGD", {"lr": 0.5}, data), atol=1e-6)


def test_accumulation_equals_one_large_batch_though_the_parts_differ_in_size() -> None:
    (large,) = batches(1, size=7)
    parts = [{name: value[:5] for name, value in large.items()}, {name: value[5:] for name, value in large.items()}]
    one, several = engine_for(run_with()), engine_for(run_with())
    one.gradients([large])
    result = several.gradients(parts)
    assert torch.allclose(one.networks["model"].gradient, several.networks["model"].gradient, atol=1e-7)
    assert (result.weight, result.samples) == (7, 7)


def test_a_network_is_one_vector() -> None:
    model = network()
    flat = FlatNetwork(model)
    assert flat.vector.numel() == sum(p.numel() for p in model.parameters()) == flat.layout.size
    flat.load(torch.arange(flat.layout.size, dtype=torch.float32))
    assert model[1].weight[0, 0] == 0
    assert model[3].bias[-1] == flat.layout.size - 1
    flat.forget_gradients()
    model(torch.rand(2, 6)).sum().backward()
    own = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    flat.gather_gradients()
    assert torch.equal(flat.gradient, own)
    assert model[1].weight.grad.data_ptr() == flat.gradient.data_ptr()
    flat.forget_gradients()
    flat.gather_gradients()
    assert not flat.gradient.any(), "no gradient is a gradient of zero"


def test_bf16_and_fp16_stay_near_fp32() -> None:
    data = batches(8)
    exact = engine_for(run_with())
    for batch in data:
        exact.step([batch])
    for kind in ("bf16", "fp16"):
        engine = engine_for(run_with(f"training.precision.kind={kind}"))
        for batch in data:
            engine.step([batch])
        assert torch.allclose(engine.networks["model"].vector, exact.networks["model"].vector, atol=0.02)
        assert engine.networks["model"].vector.dtype == torch.float32


@pytest.mark.whole
def test_compile_gives_the_same_gradient() -> None:
    (batch,) = batches(1)
    plain, compiled = engine_for(run_with()), engine_for(run_with("training.compile=true"))
    plain.gradients([batch])
    compiled.gradients([batch])
    assert torch.allclose(plain.networks["model"].gradient, compiled.networks["model"].gradient, atol=1e-6)


@pytest.mark.whole
def test_an_evaluation_uses_what_is_compiled_for_training_steps() -> None:
    shapes, graphs = DataShapes(vocab_size=61), list[str]()
    model = {"kind": "gpt", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 8, "dropout": 0.0}
    run = resolve_data({"model": model}, name="test", dialect="shoal", environ={}).run
    made = [SingleEngine(run, LanguageModelling(build_models(run, shapes)), torch.device("cpu"), 10) for _ in range(2)]
    plain, compiled = made

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append("compiled")
        return graph

    task: Any = compiled.task
    task.compile()
    task.outputs = torch.compile(type(task).outputs.__get__(task), backend=keep, dynamic=False)
    ids = torch.arange(90).view(10, 9) % 61
    rows = [{"input_ids": part[:, :-1].contiguous(), "labels": part[:, 1:].contiguous()} for part in ids.split(4)]  # 4, 4 and 2
    for engine in made:
        engine.gradients(rows[:1])
    seen = len(graphs)
    assert compiled.evaluate(iter(rows)) == pytest.approx(plain.evaluate(iter(rows)), rel=1e-5)
    assert len(graphs) == seen > 0


# --- schedules ---------------------------------------------------------------------------------


def rates(schedule: Schedule, total: int = 10, peak: float = 1.0) -> list[float]:
    return [learning_rate(schedule, peak, step, total) for step in range(total)]


def test_schedules() -> None:
    assert rates(Schedule()) == [1.0] * 10
    assert rates(Schedule(warmup_steps=4))[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates(Schedule(warmup_steps=2, warmup="cosine"))[:3] == pytest.approx([0.5, 1.0, 1.0])
    cosine = rates(Schedule(kind="cosine", end_learning_rate=0.2))
    assert cosine == pytest.approx([0.2 + 0.4 * (1 + math.cos(math.pi * step / 10)) for step in range(10)])
    assert rates(Schedule(kind="linear")) == pytest.approx([1 - step / 10 for step in range(10)])
    assert rates(Schedule(kind="polynomial", power=2.0)) == pytest.approx([(1 - step / 10) ** 2 for step in range(10)])
    assert learning_rate(Schedule(kind="cosine", end_learning_rate=0.2), 1.0, 99, 10) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("schedule", "reference", "arguments"),
    [
        (
            Schedule(kind="cosine-restarts", warmup_steps=5, cycles=3),
            "get_cosine_with_hard_restarts_schedule_with_warmup",
            {"num_cycles": 3},
        ),
        (Schedule(kind="inverse-sqrt", warmup_steps=5), "get_inverse_sqrt_schedule", {}),
        (Schedule(kind="inverse-sqrt", warmup_steps=5, timescale=11), "get_inverse_sqrt_schedule", {"timescale": 11}),
        (Schedule(kind="inverse-sqrt"), "get_inverse_sqrt_schedule", {}),
        (Schedule(kind="wsd", warmup_steps=5), "get_wsd_schedule", {"num_decay_steps": 4, "decay_type": "linear"}),
        (
            Schedule(kind="wsd", warmup_steps=5, decay_steps=12, decay="1-sqrt"),
            "get_wsd_schedule",
            {"num_decay_steps": 12, "decay_type": "1-sqrt"},
        ),
        (
            Schedule(kind="wsd", decay_steps=40, decay="cosine", end_learning_rate=0.1),
            "get_wsd_schedule",
            {"num_decay_steps": 40, "decay_type": "cosine", "min_lr_ratio": 0.1},
        ),
    ],
)
def test_schedules_equal_those_of_transformers(schedule: Schedule, reference: str, arguments: dict[str, Any]) -> None:
    """Shoal's warm-up takes its first step with 1/warmup of the rate, that of Transformers with 0."""
    import transformers

    total, warmup = 40, schedule.warmup_steps
    given = {"num_warmup_steps": warmup} | ({} if schedule.kind == "inverse-sqrt" else {"num_training_steps": total}) | arguments
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = getattr(transformers, reference)(optimizer, **given)
    expected = [theirs.lr_lambdas[0](step + 1 if step < warmup else step) for step in range(total)]
    assert rates(schedule, total) == pytest.approx(expected, abs=1e-12)


def test_a_decay_longer_than_the_run_begins_after_the_warmup() -> None:
    found = rates(Schedule(kind="wsd", warmup_steps=2, decay_steps=100), total=6)
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_the_engine_follows_the_schedule() -> None:
    engine = engine_for(run_with("training.schedule.kind=linear", "training.optimizer.learning_rate=0.1"), total=4)
    seen = []
    for batch in batches(4):
        engine.step([batch])
        seen.append(engine.learning_rates()["learning_rate"])
    assert seen == pytest.approx([0.1, 0.075, 0.05, 0.025])


# --- health ------------------------------------------------------------------------------------


def test_the_clip_value_moves_and_explosions_slow_down() -> None:
    settings = GradientHealth(
        enabled=True, initial_clip_value=2.0, final_clip_value=1.0, warmup_steps=10, explosion_threshold=5.0, auto_reduce_lr=True
    )
    monitor = HealthMonitor(settings)
    assert [monitor.clip_limit(step, None) for step in (0, 5, 10, 99)] == [2.0, 1.5, 1.0, 1.0]
    assert monitor.observe(1.0)
    assert monitor.observe(6.0)
    assert not monitor.observe(float("nan"))
    assert monitor.metrics() == {"explosions": 1, "skipped_steps": 1, "lr_scale": 0.25}


def test_base_yaml_s_clip_schedule_counts_during_its_warm_up() -> None:
    """base.yaml has 2.0 to 0.5 over the warm-up beside `max_gradient_norm: 0.5`, which would hide the schedule if the smaller counted."""
    training = load("gpu/base").training
    monitor, norm = HealthMonitor(training.gradient_health), training.clipping.max_norm
    warmup = training.gradient_health.warmup_steps
    assert norm == 0.5
    assert [monitor.clip_limit(step, norm) for step in (0, warmup // 2, warmup, 2 * warmup)] == [2.0, 1.25, 0.5, 0.5]
    assert monitor.clip_limit(warmup, 0.1) == 0.1


def test_the_engine_clips_by_the_schedule_while_it_warms_up() -> None:
    health = ["enabled=true", "initial_clip_value=0.004", "final_clip_value=0.002", "warmup_steps=2"]
    engine = engine_for(run_with("training.clipping.max_norm=0.001", *(f"training.gradient_health.{part}" for part in health)))
    limits = []
    for batch in batches(4):
        limits.append(engine.clip_limit())
        engine.step([batch])
    assert limits == pytest.approx([0.004, 0.003, 0.001, 0.001])


def test_a_step_that_is_not_finite_is_skipped() -> None:
    engine = engine_for(run_with("training.gradient_health.enabled=true"))
    before = engine.networks["model"].vector.clone()
    (bad,) = batches(1)
    bad["image"][0] = float("nan")
    engine.step([bad])
    assert torch.equal(engine.networks["model"].vector, before)
    assert engine.health is not None
    assert engine.health.skipped == 1
    engine.step(batches(1))
    assert not torch.equal(engine.networks["model"].vector, before)


def test_a_run_of_bad_steps_gives_up() -> None:
    engine = engine_for(run_with("training.gradient_health.enabled=true"))
    (bad,) = batches(1)
    bad["image"][:] = float("inf")
    for _ in range(100):
        engine.step([bad])
    with pytest.raises(ShoalError, match="in a row"):
        engine.step([bad])


# --- refusals ----------------------------------------------------------------------------------


def test_settings_of_an_optimizer_become_its_keywords() -> None:
    assert arguments(TorchOptimizer(name="AdamW", kwargs={"betas": [0.9, 0.95]})) == {"lr": 1e-3, "betas": (0.9, 0.95)}
    assert arguments(TorchOptimizer(name="Adam", beta1=0.5, kwargs={"amsgrad": True})) == {
        "lr": 1e-3,
        "betas": (0.5, 0.999),
        "amsgrad": True,
    }


def test_unknown_networks_are_refused() -> None:
    with pytest.raises(ShoalError, match="no network `generator`"):
        engine_for(run_with("training.players.generator.learning_rate=0.1"))
    with pytest.raises(ShoalError, match="no blocks whose activations could be computed again"):
        engine_for(run_with("training.gradient_checkpointing=true"))


def test_per_player_settings_are_honoured() -> None:
    engine = engine_for(run_with("training.players.model.learning_rate=0.5", "training.players.model.name=SGD"))
    assert isinstance(engine.optimizers["model"], torch.optim.SGD)
    assert engine.chosen["model"].learning_rate == 0.5


# --- state -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon", "Adafactor"])
def test_state_continues_to_the_same_numbers(name: str) -> None:
    settings = run_with(f"training.optimizer.name={name}", "training.schedule.kind=cosine", "training.gradient_health.enabled=true")
    data = batches(6)
    whole = engine_for(settings)
    for batch in data:
        whole.step([batch])
    first = engine_for(settings)
    for batch in data[:3]:
        first.step([batch])
    second = engine_for(settings, seed=5)
    second.load_weights({key: value.detach().clone() for key, value in first.weights().items()})
    second.load_state_dict(first.state_dict())
    for batch in data[3:]:
        second.step([batch])
    assert torch.equal(whole.networks["model"].vector, second.networks["model"].vector)


def test_weights_of_another_model_are_refused() -> None:
    engine = engine_for(run_with())
    with pytest.raises(ShoalError, match="another model"):
        engine.load_weights({"model.x": torch.zeros(1)})


def test_gradients_by_sample_are_clipped_one_by_one() -> None:
    engine, data = engine_for(run_with()), batches(2)
    model = network().double()
    rows = []
    for image, label in ((image, label) for batch in data for image, label in zip(batch["image"], batch["label"], strict=True)):
        model.zero_grad()
        nn.functional.cross_entropy(model(image[None].double()), label[None]).backward()
        row = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]
        rows.append(row * min(1.0, 0.3 / float(row.norm())))
    assert any(float(row.norm()) > 0.299 for row in rows)
    result = engine.gradients_by_sample(data, 0.3)
    assert result.samples == 8
    assert torch.allclose(engine.gradient.double(), torch.stack(rows).mean(0), atol=1e-6)


STEP = """
import sys, torch
import shoal.runs.coordinator_setup
from shoal.engines.optim import optimizers
parameter = torch.nn.Parameter(torch.ones(3, 3))
parameter.grad = torch.ones(3, 3)
for name in ("AdamW", "SGD", "Muon"):
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1)
    optimizers.step(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.whole
def test_neither_a_step_nor_a_coordinator_imports_the_compiler_which_takes_seconds() -> None:
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Adagrad", "Muon"])
def test_a_step_is_the_step_of_torch(name: str) -> None:
    start, slope = torch.randn(4, 4), torch.randn(4, 4)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    first, second = (getattr(torch.optim, name)([one], lr=0.1) for one in (ours, theirs))
    for _ in range(3):
        ours.grad, theirs.grad = slope.clone(), slope.clone()
        step(first)
        second.step()
    assert torch.equal(ours, theirs)
