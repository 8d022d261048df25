"""Parts of a mixture that can be switched on: each against the plain model, against differences, and with a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.config.schema import model as schema
from shoal.config.schema.model import CrossAttention, Experts, MixtureOfActivations, MixtureOfHeads, Retrieval
from shoal.config.schema.serving import Decoding
from shoal.errors import ShoalError
from shoal.models import SideTexts, generate
from shoal.models.layers.cross_attention import WithCrossAttention
from shoal.models.layers.mixture_of_activations import ACTIVATIONS, blend
from shoal.models.layers.mixture_of_heads import MixtureOfHeads as RoutedHeads
from shoal.models.moe import Moe
from shoal.models.transformer import LayerInputs

SMALL = schema.Moe(hidden_size=32, num_layers=3, num_heads=4, intermediate_size=24, max_seq_len=32).replace(
    experts=Experts(count=4, capacity_factor=None)
)
READING = {"cross_attention": CrossAttention(enabled=True), "retrieval": Retrieval(enabled=True, chunk_size=4, passage_tokens=6)}
HEADS = {"mixture_of_heads": MixtureOfHeads(enabled=True, active_share=0.75)}
BLENDED = {"mixture_of_activations": MixtureOfActivations(enabled=True)}


def model_of(**changes: Any) -> Moe:
    torch.manual_seed(0)
    return Moe(SMALL.replace(**changes), 50)


def opened(model: Moe) -> Moe:
    """With gates that let something through."""
    for part in model.modules():
        if isinstance(part, WithCrossAttention):
            part.gate.data.fill_(0.7)
    return model


def columns_of(ids: Tensor, chunk: int = 4, top: int = 2, length: int = 6) -> dict[str, Tensor]:
    """Passages that follow from the chunks before, as a finder's do."""
    used = max(1, (ids.shape[1] - 1) // chunk)
    starts = torch.arange(1, used + 1) * chunk
    keys = torch.stack([ids[:, max(0, int(start) - chunk) : int(start)].sum(1) for start in starts], dim=1)
    passages = (keys[:, :, None, None] * 7 + torch.arange(top * length).view(1, 1, top, length)) % 50
    complete = starts <= ids.shape[1] - 1
    passages = torch.where(complete[None, :, None, None], passages, torch.full_like(passages, -1))
    return {"passage_ids": passages.flatten(1, 2), "passage_from": starts[None, :, None].expand(len(ids), -1, top).flatten(1)}


def beside_for(model: Moe, ids: Tensor, features: dict[str, Any]) -> Any:
    return model.new_beside(**columns_of(ids)) if "retrieval" in features else None


# --- mixture of heads ------------------------------------------------------------------------------


def test_all_heads_with_uniform_gates_are_plain_attention() -> None:
    routed, plain = model_of(mixture_of_heads=MixtureOfHeads(enabled=True, active_share=1.0)).eval(), model_of().eval()
    plain.load_state_dict({name: value for name, value in routed.state_dict().items() if "attention.router" not in name})
    for part in routed.modules():
        if isinstance(part, RoutedHeads):
            part.router.weight.data.zero_()
    ids = torch.randint(0, 50, (2, 9))
    torch.testing.assert_close(routed(ids), plain(ids), rtol=0, atol=1e-6)


def test_a_token_uses_the_shared_heads_and_a_share_of_the_others() -> None:
    part = next(one for one in model_of(**HEADS).modules() if isinstance(one, RoutedHeads))
    weighed, _ = part.weigh(torch.ones(2, 4, 5, 8), torch.randn(2, 5, 32), LayerInputs(None, None, True, torch.zeros(2, 5)))
    gates = weighed[..., 0]
    assert (gates[:, 0] == 1).all()
    assert ((gates != 0).sum(1) == 3).all()
    torch.testing.assert_close(gates[:, 1:].sum(1), torch.full((2, 5), 2.0))
    with pytest.raises(ShoalError, match="leave none to choose"):
        model_of(mixture_of_heads=MixtureOfHeads(enabled=True, active_share=0.25))


def test_the_heads_loss_is_one_where_they_are_used_alike_and_reaches_the_router() -> None:
    model = model_of(**HEADS)
    ids = torch.randint(0, 50, (2, 9))
    beside = model.new_beside(counted_BL=torch.ones(2, 9, dtype=torch.bool))
    model(ids, beside=beside)
    loss = next(one for one in beside.losses if one.name == "head_balance")
    assert 0.9 < float(loss.value.detach()) < 2
    loss.value.backward()  # type: ignore[no-untyped-call]
    part = next(one for one in model.modules() if isinstance(one, RoutedHeads))
    assert part.router.weight.grad is not None
    assert part.router.weight.grad.abs().sum() > 0


# --- mixture of activations ------------------------------------------------------------------------


def test_a_blend_has_the_values_and_gradients_of_four_activations() -> None:
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(7, 4, dtype=torch.float64).softmax(-1).requires_grad_()
    plain = sum(activation(x) * gates[:, number : number + 1] for number, activation in enumerate(ACTIVATIONS))
    assert isinstance(plain, Tensor)
    torch.testing.assert_close(blend(x, gates), plain)
    assert torch.autograd.gradcheck(blend, (x, gates))


def test_a_blend_keeps_its_input_and_nothing_else() -> None:
    kept: list[int] = []
    x, gates = torch.randn(64, 32, requires_grad=True), torch.rand(64, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]
        blend(x, gates)
    assert sorted(kept) == [64 * 4, 64 * 32]


# --- cross-attention -------------------------------------------------------------------------------


def test_a_closed_gate_is_the_model_without_cross_attention_to_the_bit() -> None:
    reading, plain = model_of(**READING).eval(), model_of().eval()
    own = {name.replace("attention.own.", "attention."): value for name, value in reading.state_dict().items()}
    plain.load_state_dict({name: value for name, value in own.items() if name in plain.state_dict()})
    ids = torch.randint(0, 50, (2, 13))
    logits = reading(ids, beside=reading.new_beside(**columns_of(ids)))
    assert torch.equal(logits, plain(ids))
    assert not torch.equal(opened(reading)(ids, beside=reading.new_beside(**columns_of(ids))), plain(ids))


def test_an_item_without_context_is_plain_beside_one_that_has_some() -> None:
    model = opened(model_of(cross_attention=CrossAttention(enabled=True))).eval()
    ids = torch.randint(0, 50, (2, 9))
    context = torch.randint(0, 50, (2, 1, 5))
    context[1] = -1
    logits, plain = model(ids, beside=model.new_beside(context_ids=context)), model(ids)
    torch.testing.assert_close(logits[1], plain[1], rtol=0, atol=1e-6)
    assert (logits[0] - plain[0]).abs().max() > 1e-3
    padded = torch.cat([context, torch.full((2, 1, 3), -1)], dim=2)
    torch.testing.assert_close(model(ids, beside=model.new_beside(context_ids=padded)), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("features", [READING, HEADS, BLENDED, {**READING, **HEADS, **BLENDED}])
def test_changing_a_token_leaves_earlier_logits_unchanged(features: dict[str, Any]) -> None:
    model = opened(model_of(**features)).eval()
    ids = torch.randint(0, 50, (1, 17))
    for place in (3, 4, 8, 11, 15):
        other = ids.clone()
        other[0, place] = (other[0, place] + 1) % 50
        first, second = (model(one, beside=beside_for(model, one, features)) for one in (ids, other))
        torch.testing.assert_close(first[:, :place], second[:, :place], rtol=0, atol=1e-5)
        assert (first[:, place:] - second[:, place:]).abs().max() > 1e-4


def beside_of(features: dict[str, Any]) -> SideTexts | None:
    return SideTexts(lambda rows, texts, starts: columns_of(torch.tensor(texts)), 4) if "retrieval" in features else None


@pytest.mark.parametrize("features", [READING, HEADS, BLENDED, {**READING, **HEADS, **BLENDED}])
def test_what_is_written_with_a_cache_is_what_the_whole_text_gives(features: dict[str, Any]) -> None:
    model = opened(model_of(**features)).eval()
    prompt = torch.randint(0, 50, (2, 6))
    written = torch.stack(
        list(generate(model, prompt, max_new_tokens=14, decoding=Decoding(active="greedy"), beside=beside_of(features))), dim=1
    )
    ids = torch.cat([prompt, written], dim=1)
    for length in range(6, 20):
        seen = ids[:, :length]
        with torch.no_grad():
            logits = model(seen, beside=beside_for(model, seen, features))
        assert torch.equal(logits[:, -1].argmax(-1), ids[:, length]), length


@pytest.mark.whole
def test_reading_learns_to_copy_what_only_the_context_says() -> None:
    """The gate opens, and the loss falls far below what is possible without reading."""
    torch.manual_seed(1)
    model = model_of(num_layers=2, cross_attention=CrossAttention(enabled=True, every_layers=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss: Callable[[Tensor, Tensor], Tensor] = lambda logits, wanted: F.cross_entropy(logits[:, -1], wanted)  # noqa: E731
    for _ in range(60):
        secret = torch.randint(0, 10, (32, 1, 1))
        ids = torch.randint(10, 50, (32, 3))
        value = loss(model(ids, beside=model.new_beside(context_ids=secret)), secret.flatten())
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float(value.detach()) < 1.0, "without reading it is log 10 = 2.3"
