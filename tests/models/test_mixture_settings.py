"""Mixtures as other architectures have them: shared and fine-grained experts, scores, gates, dense first layers, normalised heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config.schema import model as schema
from shoal.engines.pipeline.split import numbers_used
from shoal.models.gpt import Attention, FeedForward, Gpt
from shoal.models.layers.expert_layer import ExpertLayer
from shoal.models.moe import Moe
from shoal.models.routers import build_router
from shoal.models.transformer import PLAIN, LayerInputs
from shoal.scheduling.memory_estimate import numbers_kept

SIZES = {"hidden_size": 16, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 12, "intermediate_size": 24}


def shaken(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 + (parameter.dim() == 1))
    return module


def written_feed_forward(layer: Any, x: Tensor) -> Tensor:
    gate, content = layer.up(x).chunk(2)
    return layer.down(F.silu(gate) * content)


@pytest.mark.parametrize("gated", [False, True])
def test_a_shared_expert_adds_its_output_times_its_gate(gated):
    experts = schema.Experts(count=6, per_token=3, intermediate_size=8, shared_size=20, shared_gate=gated, capacity_factor=None)
    layer: Any = shaken(ExpertLayer(schema.Moe(**SIZES, experts=experts), 31)).double()
    assert layer.up.shape == (6, 16, 16)
    assert layer.shared.up.weight.shape == (40, 16)
    x_BLD, ids = torch.randn(2, 5, 16, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.long)
    found = layer(x_BLD, LayerInputs(None, None, True, ids))[0].flatten(0, 1)
    routes = layer.router(x_BLD.flatten(0, 1), ids.flatten())
    for token, x in enumerate(x_BLD.flatten(0, 1)):
        wanted = written_feed_forward(layer.shared, x) * (layer.shared_gate(x).sigmoid() if gated else 1)
        for expert, weight in zip(routes.experts_TK[token].tolist(), routes.gates_TK[token], strict=True):
            gate, content = (layer.up[expert] @ x).chunk(2)
            wanted = wanted + weight * (layer.down[expert] @ (F.silu(gate) * content))
        torch.testing.assert_close(found[token], wanted)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalises", [None, False, True])
def test_gates_are_scores_that_add_up_to_one_where_they_are_normalised(scores, normalises):
    settings = schema.Experts(count=6, per_token=2, scores=scores, normalise_gates=normalises)
    router: Any = shaken(build_router(settings, 16, 31))
    x_TD = torch.randn(7, 16)
    routes = router(x_TD, torch.zeros(7, dtype=torch.long))
    logits_TE = x_TD @ router.weight.T
    values_TE = logits_TE.softmax(1) if scores == "softmax" else logits_TE.sigmoid()
    best = values_TE.topk(2, dim=1)
    assert torch.equal(routes.experts_TK, best.indices)
    wanted = best.values if normalises is False else best.values / best.values.sum(1, keepdim=True)
    torch.testing.assert_close(routes.gates_TK, wanted)
    torch.testing.assert_close(routes.probabilities_TE.sum(1), torch.ones(7))


def test_the_router_with_biases_has_gates_that_are_not_normalised():
    router: Any = shaken(build_router(schema.Experts(count=6, per_token=2, router="sigmoid-bias", normalise_gates=False), 16, 31))
    x_TD = torch.randn(7, 16)
    routes = router(x_TD, torch.zeros(7, dtype=torch.long))
    torch.testing.assert_close(routes.gates_TK, (x_TD @ router.weight.T).sigmoid().gather(1, routes.experts_TK))


def test_heads_are_normalised_one_by_one_or_together():
    x_BLD = torch.randn(2, 5, 16)
    for kind in ("head", "width"):
        layer: Any = shaken(Attention(schema.Gpt(**SIZES, bias=False, qk_norm=kind), 0.0, PLAIN))
        query, key, value = layer._heads(x_BLD, None)
        plain = layer.query_key_value(x_BLD)
        for found, first, last, norm in ((query, 0, 16, layer.query_norm), (key, 16, 24, layer.key_norm)):
            rows = plain[..., first:last].unflatten(-1, (-1, 4))
            axes = (-1,) if kind == "head" else (-2, -1)
            wanted = rows / (rows.square().mean(axes, keepdim=True) + layer.query_norm.eps).sqrt()
            wanted = wanted * (norm.weight if kind == "head" else norm.weight.view(-1, 4))
            torch.testing.assert_close(found.transpose(1, 2), wanted)
        torch.testing.assert_close(value.transpose(1, 2).flatten(2), plain[..., 24:])


@pytest.mark.parametrize("qk_norm", ["head", "width"])
def test_a_mixture_with_dense_first_layers_decodes_as_it_reads(qk_norm):
    experts = schema.Experts(count=8, per_token=3, intermediate_size=8, shared_size=16, shared_gate=True, dense_layers=1)
    model: Any = shaken(Moe(schema.Moe(**SIZES, qk_norm=qk_norm, experts=experts), 31)).eval()
    assert [type(block.feed_forward) for block in model.blocks] == [FeedForward, ExpertLayer, ExpertLayer]
    ids_BL = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole, cache = model(ids_BL), model.new_cache(12)
        steps = [model.next_logits(part, cache) for part in (ids_BL[:, :6], ids_BL[:, 6:7], ids_BL[:, 7:])]
    for found, place in zip(steps, (5, 6, 8), strict=True):
        torch.testing.assert_close(found, whole[:, place], rtol=1e-4, atol=1e-5)


def test_losses_and_figures_are_of_the_layers_with_experts_alone():
    experts = schema.Experts(count=4, dense_layers=2, z_loss_weight=0.1)
    model: Any = shaken(Moe(schema.Moe(**SIZES, experts=experts), 31))
    ids_BL = torch.randint(31, (2, 9))
    beside = model.new_beside(counted_BL=torch.ones_like(ids_BL, dtype=torch.bool))
    model(ids_BL, beside=beside)
    values = {loss.name: loss.value for loss in beside.losses}
    assert {name.split("/")[1] for name in beside.figures} == {"2"}
    torch.testing.assert_close(values["z_loss"], beside.figures["layers/2/z_loss"])
    torch.testing.assert_close(values["balance"], beside.figures["layers/2/balance"])
    model.loads.end_step()
    assert {name.split("/")[1] for name in (*model.loads.figures(), *model.loads.details())} == {"2"}


def fine_grained() -> schema.Moe:
    experts = schema.Experts(count=8, per_token=2, intermediate_size=8, shared_size=12, shared_gate=True, dense_layers=1)
    return schema.Moe(**SIZES, qk_norm="width", experts=experts)


def test_parameters_and_those_that_a_token_uses_are_counted_exactly():
    settings = fine_grained()
    model = Moe(settings, 31)
    attention = 16 * (16 + 2 * 8) + 16 * 16 + (16 + 8) + 2 * 16
    dense, one_expert, beside = 3 * 16 * 24, 3 * 16 * 8, 8 * 16 + 3 * 16 * 12 + 16
    whole = 31 * 16 + 16 + 3 * attention + dense + 2 * (8 * one_expert + beside)
    assert sum(one.numel() for one in model.parameters()) == whole
    assert sum(used for _, used in numbers_used(model)) == whole - 2 * 6 * one_expert


@pytest.mark.parametrize("settings", [fine_grained(), schema.Moe(**SIZES), schema.Gpt(**SIZES)], ids=["fine", "moe", "gpt"])
def test_the_estimate_of_activations_is_close_to_what_a_block_keeps(settings):
    kind: Any = Moe if isinstance(settings, schema.Moe) else Gpt
    settings, ids_BL = settings.replace(hidden_size=32, max_seq_len=32), torch.randint(31, (4, 32))
    if isinstance(settings, schema.Moe):
        settings = settings.replace(experts=settings.experts.replace(dense_layers=0, capacity_factor=None))
    counts = []
    for layers in (2, 3):
        model, kept = kind(settings.replace(num_layers=layers), 31), dict[int, int]()
        own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}

        def keep(value: Tensor, own: set[int] = own, kept: dict[int, int] = kept) -> Tensor:
            storage = value.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            hidden = model.hidden(ids_BL, beside=model.new_beside(counted_BL=torch.ones_like(ids_BL, dtype=torch.bool)))
        counts.append(sum(kept.values()))
        del hidden
    assert (counts[1] - counts[0]) / (4 * ids_BL.numel()) == pytest.approx(numbers_kept(settings), rel=0.2)
