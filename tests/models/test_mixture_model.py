"""Mixtures of experts: who visits whom, what is lost, what is balanced, and what the router learns."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.config.load import resolve_data
from shoal.config.schema import model as schema
from shoal.engines import SingleEngine
from shoal.models.compile_rules import exclude_from_compilation
from shoal.models.layers.expert_layer import ExpertLayer, grouped_linear
from shoal.models.moe import Moe
from shoal.models.routers import Routes, build_router
from shoal.models.step_state import step_states
from shoal.models.transformer import LayerInputs
from shoal.tasks.language import LanguageModelling

ROUTERS = ["switch", "gshard", "hash", "stochastic", "sigmoid-bias"]
SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 12, "intermediate_size": 8}


def mixture(vocab_size: int = 31, *, noise: float = 0.2, bias: bool = False, **experts: Any) -> Moe:
    """A small mixture with weights large enough that its choices are not all alike."""
    torch.manual_seed(0)
    model = Moe(schema.Moe(**SIZES, bias=bias, experts=schema.Experts(**{"count": 4} | experts)), vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return model


def tokens(rows: int = 3, length: int = 12) -> Tensor:
    return torch.randint(31, (rows, length), generator=torch.Generator().manual_seed(1))


def told_of(model: Moe, ids: Tensor, counted: Tensor | None = None) -> Any:
    beside = model.new_beside(counted_BL=torch.ones_like(ids, dtype=torch.bool) if counted is None else counted)
    model(ids, beside=beside)
    return beside


def loss_of(model: Moe, ids: Tensor) -> Tensor:
    beside = model.new_beside(counted_BL=torch.ones_like(ids, dtype=torch.bool))
    own = F.cross_entropy(model(ids, beside=beside)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return own + sum(weight * value for _, weight, value in beside.losses)


# --- the experts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("feed_forward", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_the_sum_of_its_experts_by_their_gates(feed_forward, bias):
    settings = schema.Moe(**SIZES, feed_forward=feed_forward, bias=bias, experts=schema.Experts(count=4, capacity_factor=None))
    layer = ExpertLayer(settings, 31).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x, ids = torch.randn(2, 5, 16, dtype=torch.float64), torch.randint(31, (2, 5))
    routes = layer.router(x.flatten(0, 1), ids.flatten())
    wanted = torch.zeros(10, 16, dtype=torch.float64)
    for token in range(10):
        for expert, gate in zip(routes.experts_TK[token].tolist(), routes.gates_TK[token], strict=True):
            inner = layer.up[expert] @ x.flatten(0, 1)[token] + (layer.up_bias[expert] if bias else 0)
            inner = F.silu(inner[:8]) * inner[8:] if feed_forward == "swiglu" else F.gelu(inner, approximate="tanh")
            wanted[token] += gate * (layer.down[expert] @ inner + (layer.down_bias[expert] if bias else 0))
    torch.testing.assert_close(layer(x, LayerInputs(None, None, True, ids))[0].flatten(0, 1), wanted)


def test_grouped_products_and_the_loop_agree_and_give_idle_experts_no_gradient():
    x, weight = torch.randn(10, 8), torch.randn(4, 16, 8)
    sizes = torch.tensor([3, 0, 7, 0])
    slopes = []
    for dtype in (torch.float32, torch.float64):
        own = weight.to(dtype).detach().clone().requires_grad_()
        grouped_linear(x.to(dtype), own, sizes).square().sum().backward()
        assert own.grad is not None
        slopes.append(own.grad)
    torch.testing.assert_close(slopes[0].double(), slopes[1], rtol=1e-5, atol=1e-4)
    assert not slopes[0][[1, 3]].any()
    assert not slopes[1][[1, 3]].any()


@pytest.mark.parametrize("kind", ["switch", "hash", "sigmoid-bias"])
def test_gradients_are_those_of_differences_in_float64(kind):
    model = mixture(router=kind, capacity_factor=None, aux_loss_weight=0.3, z_loss_weight=0.2).double()
    ids = tokens(2, 6)
    loss_of(model, ids).backward()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        assert parameter.grad is not None
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        values = []
        for step in (1e-6, -1e-6):
            model.loads.begin_step()
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
                values.append(float(loss_of(model, ids)))
                parameter.sub_(direction, alpha=step)
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(float((parameter.grad * direction).sum()), rel=1e-4, abs=1e-7)


def test_a_compiled_model_has_grouped_products_in_32_bits_too():
    """torch's compiler knows the shapes of those in bfloat16 only."""
    exclude_from_compilation()
    x_RD, weight_END, sizes_E = torch.randn(6, 8), torch.randn(3, 4, 8), torch.tensor([1, 0, 5])
    compiled = torch.compile(grouped_linear, backend="eager")
    assert torch.equal(compiled(x_RD, weight_END, sizes_E), grouped_linear(x_RD, weight_END, sizes_E))


def test_capacity_is_the_share_of_an_expert_times_the_factor_and_drops_are_counted():
    settings = schema.Moe(**SIZES, experts=schema.Experts(count=4, per_token=1, capacity_factor=1.1))
    layer = ExpertLayer(settings, 31)
    routes = Routes(torch.zeros(10, 1, dtype=torch.long), torch.ones(10, 1))
    counted = torch.tensor([False] * 4 + [True] * 6)
    assignment = layer.assign(routes, counted)
    assert assignment.sizes_E.tolist() == [math.ceil(1.1 * 10 / 4), 0, 0, 0]
    assert assignment.tokens_R.tolist() == [4, 5, 6], "tokens that count come first"
    assert float(assignment.dropped) == 3
    assert float(layer.statistics(routes, assignment, counted)["dropped"]) == 0.5
    assert layer.eval().assign(routes, counted).sizes_E.tolist() == [10, 0, 0, 0], "nothing is dropped when nothing is learned"


def test_what_finds_no_room_adds_nothing_to_the_stream():
    layer = ExpertLayer(schema.Moe(**SIZES, experts=schema.Experts(count=4, per_token=1, capacity_factor=0.4, router="hash")), 31)
    layer.router.table_VK.zero_()
    out, _ = layer(torch.randn(1, 10, 16), LayerInputs(None, None, True, torch.zeros(1, 10, dtype=torch.long)))
    assert out[0].any(1).tolist() == [True] + [False] * 9


# --- the model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ROUTERS)
def test_cached_and_uncached_logits_are_the_same_and_no_token_sees_later_ones(kind):
    model, ids = mixture(router=kind).eval(), tokens()
    with torch.no_grad():
        whole, cache = model(ids), model.new_cache(12)
        steps = torch.cat([model(ids[:, at : at + 1], cache=cache) for at in range(12)], dim=1)
        torch.testing.assert_close(whole, steps)
        other = ids.clone()
        other[:, 7] = (ids[:, 7] + 1) % 31
        torch.testing.assert_close(model(other)[:, :7], whole[:, :7])
        assert not torch.allclose(model(other)[:, 7], whole[:, 7])


@pytest.mark.parametrize("kind", ROUTERS)
def test_recomputation_takes_the_same_routes_and_counts_nothing_twice(kind):
    found = []
    for recompute in (False, True):
        model = mixture(router=kind, capacity_factor=1.0)
        model.gradient_checkpointing(recompute)
        torch.manual_seed(5)
        loss_of(model, tokens()).backward()
        found.append([model.loads.load_LE, *(parameter.grad for parameter in model.parameters())])
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)
    assert found[0][0].sum(1).tolist() == [72.0, 72.0]


@pytest.mark.parametrize("kind", ROUTERS)
def test_recomputation_stays_in_the_mode_of_the_first_pass(kind):
    """Feedback tasks compute a loss in evaluation mode, which drops no token, and take its gradient in training mode."""
    found = []
    for recompute in (False, True):
        model = mixture(router=kind, capacity_factor=0.5).eval()
        model.gradient_checkpointing(recompute)
        loss = loss_of(model, tokens())
        model.train()
        loss.backward()
        assert all(part.training for part in model.modules())
        found.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


# --- routers -------------------------------------------------------------------------------------------


def balance(model: Moe, ids: Tensor) -> float:
    return next(value.item() for name, _, value in told_of(model, ids).losses if name == "balance")


def test_the_balance_loss_is_one_when_balanced_and_largest_when_collapsed():
    model = mixture(router="switch", noise=0.0)
    for block in model.blocks:
        block.feed_forward.router.weight.data.zero_()
    loads = torch.full((2, 4), 18.0)
    assert float(4 * (model.loads.shares(loads, False, learning=False) / 4).sum(1).mean()) == 1.0
    collapsed = torch.tensor([[36.0, 36.0, 0.0, 0.0]] * 2)
    chosen = torch.tensor([0.5, 0.5, 0.0, 0.0])
    assert float(4 * (model.loads.shares(collapsed, False, learning=False) * chosen).sum(1).mean()) == 4 / 2
    assert balance(model, tokens()) == pytest.approx(1.0), "equal probabilities, whatever is chosen"


def test_a_collapsed_router_has_the_balance_loss_of_experts_over_choices():
    model = mixture(router="switch", per_token=1, capacity_factor=None)
    for block in model.blocks:
        block.feed_forward_norm.weight.data.zero_()
        block.feed_forward.router.logits = lambda x: torch.tensor([50.0, 0.0, 0.0, 0.0]).expand(len(x), 4)
    assert balance(model, tokens()) == pytest.approx(4.0)


def test_tokens_that_do_not_count_are_not_balanced():
    model, ids = mixture(router="switch", capacity_factor=None), tokens(2)
    counted = torch.zeros_like(ids, dtype=torch.bool)
    counted[0] = True
    model.eval()
    both, first = told_of(model, ids, counted).losses[0].value, told_of(model, ids[:1]).losses[0].value
    torch.testing.assert_close(both, first)


def test_gates_are_the_probability_of_one_and_the_shares_of_several():
    x = torch.randn(20, 16)
    for per_token in (1, 3):
        switch = build_router(schema.Experts(count=4, per_token=per_token), 16, 31)
        routes = switch(x, torch.zeros(20, dtype=torch.long))
        probabilities = F.linear(x, switch.weight).softmax(1).topk(per_token).values
        torch.testing.assert_close(routes.gates_TK, probabilities if per_token == 1 else probabilities / probabilities.sum(1, keepdim=True))


def test_routers_compute_in_32_bits_also_under_autocast():
    switch = build_router(schema.Experts(count=4), 16, 31)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routes = switch(torch.randn(5, 16, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.long))
    assert {routes.gates_TK.dtype, routes.logits_TE.dtype} == {torch.float32}


def scores_of(kind: str, logits: Tensor, tokens: int, **settings: Any) -> Any:
    """A router that gives every token the same logits."""
    made = build_router(schema.Experts(count=len(logits), router=kind, **settings), 1, 31)
    made.weight.data = logits.view(-1, 1)
    return made, torch.ones(tokens, 1), torch.zeros(tokens, dtype=torch.long)


def test_gshard_visits_the_second_expert_with_twice_its_gate():
    torch.manual_seed(0)
    made, x, ids = scores_of("gshard", torch.tensor([0.9, 0.1, 1e-9]).log(), 20_000)
    routes = made(x, ids)
    share = float(routes.taken_TK[:, 1].float().mean())
    assert abs(share - 0.2) < 3 * math.sqrt(0.2 * 0.8 / 20_000)
    assert routes.taken_TK[:, 0].all()
    torch.testing.assert_close(routes.gates_TK[:, 0], torch.full((20_000,), 0.9))
    assert made.eval()(x, ids).taken_TK is None, "when nothing is learned, nothing is left to chance"


def test_skipped_second_experts_take_no_room_and_are_not_computed():
    layer = ExpertLayer(schema.Moe(**SIZES, experts=schema.Experts(count=4, router="gshard", capacity_factor=1.0)), 31)
    experts = torch.tensor([[0, 1]] * 4)
    taken = torch.tensor([[True, False]] * 3 + [[True, True]])
    assignment = layer.assign(Routes(experts, torch.full((4, 2), 0.5), taken), torch.ones(4, dtype=torch.bool))
    assert assignment.sizes_E.tolist() == [2, 1, 0, 0]
    assert assignment.tokens_R.tolist() == [0, 1, 3]


def test_stochastic_draws_without_putting_back_by_probability():
    torch.manual_seed(0)
    p, count = torch.tensor([0.5, 0.3, 0.15, 0.05]), 40_000
    made, x, ids = scores_of("stochastic", p.log(), count)
    routes = made(x, ids)
    for first in range(4):
        for second in range(4):
            wanted = 0.0 if first == second else float(p[first] * p[second] / (1 - p[first]))
            found = float(((routes.experts_TK[:, 0] == first) & (routes.experts_TK[:, 1] == second)).float().mean())
            assert abs(found - wanted) <= 4 * math.sqrt(wanted * (1 - wanted) / count)
    clean = p[routes.experts_TK]
    torch.testing.assert_close(routes.gates_TK, clean / clean.sum(1, keepdim=True))
    assert (made.eval()(x, ids).experts_TK == torch.tensor([0, 1])).all()


def test_hash_gives_each_token_id_its_own_different_experts():
    made = build_router(schema.Experts(count=4, per_token=3, router="hash"), 16, 31)
    ids = torch.arange(31)
    routes = made(torch.randn(31, 16), ids)
    assert all(len(set(row)) == 3 for row in routes.experts_TK.tolist())
    assert torch.equal(routes.experts_TK, made(torch.randn(31, 16), ids).experts_TK)
    assert (routes.gates_TK == 1 / 3).all()
    assert "table_VK" in made.state_dict()


def test_biases_choose_and_scores_are_the_gates():
    made, x, ids = scores_of("sigmoid-bias", torch.tensor([2.0, 1.0, 0.0, -1.0]), 3)
    made.bias_E.copy_(torch.tensor([-1.0, 0.0, 0.0, 0.9]))
    routes = made(x, ids)
    assert (routes.experts_TK == torch.tensor([3, 1])).all()
    scores = torch.tensor([-1.0, 1.0]).sigmoid()
    torch.testing.assert_close(routes.gates_TK[0], scores / scores.sum())


# --- with an engine ------------------------------------------------------------------------------------


def engine_of(build_router: str = "switch", optimizer: dict[str, Any] | None = None, **experts: Any) -> SingleEngine:
    data = {
        "model": {"kind": "moe", **SIZES, "experts": {"count": 4, "router": build_router, **experts}},
        "training": {"batch_size": 3, "optimizer": optimizer or {"learning_rate": 0.01}},
    }
    run = resolve_data(data, name="test", dialect="shoal", environ={}).run
    return SingleEngine(run, LanguageModelling({"model": mixture(router=build_router, **experts)}), torch.device("cpu"), 100)


def batch(seed: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(31, (3, 13), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


@pytest.mark.whole
@pytest.mark.parametrize("kind", ROUTERS)
def test_every_router_learns(kind):
    torch.manual_seed(0)
    engine = engine_of(kind)
    losses = [float(engine.step([batch()]).metrics["loss"]) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_router_of_one_expert_a_token_learns_from_the_loss_alone():
    engine = engine_of(per_token=1, aux_loss_weight=0.0)
    before = engine.task.players["model"].blocks[0].feed_forward.router.weight.clone()
    engine.step([batch()])
    assert not torch.equal(before, engine.task.players["model"].blocks[0].feed_forward.router.weight)


def test_the_loads_of_a_step_are_those_of_all_its_batches():
    engine = engine_of(capacity_factor=None)
    engine.step([batch(1), batch(2)])
    assert engine.task.players["model"].loads.load_LE.sum(1).tolist() == [144.0, 144.0]
    engine.step([batch(1)])
    assert engine.task.players["model"].loads.load_LE.sum(1).tolist() == [72.0, 72.0]


def test_biases_move_once_a_step_towards_the_experts_with_few_tokens_and_are_saved():
    engine = engine_of("sigmoid-bias", bias_step=0.25)
    engine.step([batch(1), batch(2)])
    model = engine.task.players["model"]
    for block, load_E in zip(model.blocks, model.loads.load_LE, strict=True):
        assert torch.equal(block.feed_forward.router.bias_E, 0.25 * torch.sign(load_E.mean() - load_E))
    again = engine_of("sigmoid-bias", bias_step=0.25)
    again.load_weights(engine.weights())
    assert torch.equal(again.buffers, engine.buffers)
    assert engine.buffers.any()
    for _ in range(20):
        engine.step([batch()])
    assert float(engine.buffers.abs().max()) <= 1.0


def test_workers_report_how_far_biases_would_move_and_the_coordinator_moves_them():
    worker, coordinator = engine_of("sigmoid-bias", bias_step=0.25), engine_of("sigmoid-bias", bias_step=0.25)
    worker.gradients([batch()])
    assert not worker.buffers.any(), "a worker that only takes gradients leaves the weights to the coordinator"
    report = worker.take_report()
    assert set(report.unique().tolist()) <= {-0.25, 0.0, 0.25}
    assert not worker.take_report().any(), "nothing is reported twice"
    coordinator.follow_report(report)
    coordinator.follow_report(torch.full_like(report, float("nan")))
    assert torch.equal(coordinator.buffers, report)
    coordinator.follow_report(torch.full_like(report, 1e30))
    assert float(coordinator.buffers.max()) == 1.0, "a claim does not lead out of bounds"
    worker.load_buffers(coordinator.buffers)
    assert torch.equal(worker.buffers, coordinator.buffers)


def test_muon_steps_each_experts_matrix_and_its_state_is_saved_with_the_stack():
    muon = {"name": "Muon", "learning_rate": 0.1, "weight_decay": 0.0, "kwargs": {"momentum": 0.9, "nesterov": False}}
    engine, again = engine_of(optimizer=muon, capacity_factor=None), engine_of(optimizer=muon, capacity_factor=None)
    stack = engine.task.players["model"].blocks[0].feed_forward.up
    before = stack.detach().clone()
    engine.step([batch()])
    slope = stack.grad
    assert slope is not None
    for expert in range(4):
        alone = torch.nn.Parameter(before[expert].clone())
        alone.grad = slope[expert].clone()
        torch.optim.Muon([alone], lr=0.1, weight_decay=0.0, momentum=0.9, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
        torch.testing.assert_close(stack[expert], alone, rtol=1e-2, atol=1e-3)
    again.load_weights(engine.weights())
    again.load_state_dict(copy.deepcopy(engine.state_dict()))
    engine.step([batch(2)])
    again.step([batch(2)])
    assert torch.equal(engine.vector, again.vector)


def test_a_batch_that_only_fills_a_place_is_not_counted():
    engine = engine_of(capacity_factor=None)
    empty = {name: value[:0] for name, value in batch().items()}
    engine.step([batch()])
    engine.step([batch(), empty])
    assert engine.task.players["model"].loads.load_LE.sum(1).tolist() == [72.0, 72.0]


def test_the_layers_of_a_stage_count_in_the_order_of_the_whole() -> None:
    """A pipeline adds up the loads of each stage by their places in this order."""
    settings = schema.Moe(hidden_size=16, num_layers=2, num_heads=4, max_seq_len=16, mixture_of_heads=schema.MixtureOfHeads(enabled=True))
    whole = Moe(settings, 31)
    counted = [one.load_LE.shape[1] for one in step_states(whole)]
    assert len(set(counted)) == 2, "heads and experts are not as many"
    assert [one.load_LE.shape[1] for one in step_states(whole.only(1, 2))] == counted
