"""The memory: bounded, kept by importance, recalled by likeness, causal, replayed, the same again after a break."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.config.schema import model as schema
from shoal.config.schema.model import EpisodicMemory, Experts
from shoal.config.schema.serving import Decoding
from shoal.models import generate
from shoal.models.layers.cross_attention import WithCrossAttention
from shoal.models.layers.episodic_memory import EpisodicMemory as Memory
from shoal.models.moe import Moe
from shoal.models.step_state import step_states
from shoal.tasks.language import LanguageModelling

SMALL = schema.Moe(hidden_size=32, num_layers=4, num_heads=4, intermediate_size=24, max_seq_len=32).replace(
    experts=Experts(count=4, capacity_factor=None)
)


def model_of(**changes: Any) -> Moe:
    torch.manual_seed(0)
    memory = EpisodicMemory(**{"enabled": True, "capacity": 6, "chunk_size": 4, "top_k": 2, "vectors": 2, "replay_rate": 0.5, **changes})
    return Moe(SMALL.replace(episodic_memory=memory), 50)


def memory_of(model: Moe) -> Memory:
    memory: Memory = model.memory
    return memory


def opened(model: Moe) -> Moe:
    for part in model.modules():
        if isinstance(part, WithCrossAttention):
            part.gate.data.fill_(0.7)
    return model


def batch_of(rows: int = 4, length: int = 16, seed: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(0, 50, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}


def step(model: Moe, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What an engine does with a batch, without an optimizer."""
    task = LanguageModelling({"model": model.train()})
    for one in step_states(model):
        one.begin_step()
    (loss,) = task.losses(batch)
    loss.value.backward()  # type: ignore[no-untyped-call]
    memory_of(model).end_step()
    return loss.metrics


def filled(**changes: Any) -> Moe:
    model = opened(model_of(**changes))
    for seed in range(3):
        step(model, batch_of(seed=seed))
    return model


def test_it_fills_up_and_keeps_the_most_important() -> None:
    memory = memory_of(filled(replay_rate=0.0))
    assert (memory.importance_N > 0).all()
    least = memory.importance_N.min()
    place = memory._choose_slot(float(least) / 2, -1, torch.full((32,), 7))
    assert place is None
    assert memory._choose_slot(float(least) * 2, -1, torch.full((32,), 7)) == int(memory.importance_N.argmin())
    assert memory._choose_slot(0.001, -1, memory.ids_NT[3].long()) == 3, "a sequence that is there stays where it is"


def test_importance_is_loss_times_the_gradients_norm() -> None:
    model = model_of(replay_rate=0.0)
    batch = batch_of(rows=2)
    batch["labels"][1] = -100
    step(model, batch)
    memory = memory_of(model)
    assert float(memory.importance_N.max()) > 0
    assert torch.equal(memory.ids_NT[int(memory.importance_N.argmax()), :16].long(), batch["input_ids"][0])
    assert not memory.vectors_NVD.requires_grad


def test_changing_a_token_leaves_earlier_logits_unchanged() -> None:
    model = filled().eval()
    ids = batch_of(rows=1, seed=9)["input_ids"]
    for place in (3, 4, 7, 11):
        other = ids.clone()
        other[0, place] = (other[0, place] + 1) % 50
        first, second = model(ids), model(other)
        torch.testing.assert_close(first[:, :place], second[:, :place], rtol=0, atol=1e-5)
    memory_of(model).reading = False
    assert (model(ids) - first).abs().max() > 1e-4, "something was recalled"
    torch.testing.assert_close(model(ids)[:, :4], first[:, :4], rtol=0, atol=1e-6)


def test_a_sequence_never_recalls_itself() -> None:
    model = opened(model_of(capacity=1, replay_rate=0.0))
    step(model, batch_of(rows=1))
    own = batch_of(rows=1)["input_ids"]
    model.eval()
    memory = memory_of(model)
    with_memory, other = model(own), model(own.flip(1))
    memory.reading = False
    assert torch.equal(with_memory, model(own))
    assert not torch.equal(other, model(own.flip(1)))


def test_decoding_with_a_cache_equals_the_whole_text_and_stores_no_episode() -> None:
    model = filled().eval()
    before = {name: value.clone() for name, value in memory_of(model).state_dict().items()}
    prompt = batch_of(rows=2, length=6, seed=8)["input_ids"]
    written = torch.stack(list(generate(model, prompt, max_new_tokens=14, decoding=Decoding(active="greedy"))), dim=1)
    ids = torch.cat([prompt, written], dim=1)
    for length in range(6, 20):
        with torch.no_grad():
            assert torch.equal(model(ids[:, :length])[:, -1].argmax(-1), ids[:, length]), length
    assert all(torch.equal(value, before[name]) for name, value in memory_of(model).state_dict().items())


def test_sequences_are_replayed_at_the_rate_and_scored_anew() -> None:
    model = filled(replay_rate=0.5)
    batch = batch_of(rows=4, length=12, seed=5)
    batch["passage_ids"] = torch.ones(4, 2, 3, dtype=torch.int64)
    batch["passage_from"] = torch.full((4, 2), 4)
    mixed, slots = memory_of(model).mixed(batch)
    assert mixed["input_ids"].shape == (6, 16)
    assert (slots[4:] >= 0).all()
    assert torch.equal(mixed["input_ids"][:4, :12], batch["input_ids"])
    assert (mixed["labels"][:4, 12:] == -100).all()
    assert (mixed["passage_ids"][4:] == -1).all()
    metrics = step(model, batch_of(seed=6))
    assert float(metrics["replayed"]) == 2
    assert float(metrics["replay_loss"]) > 0


def test_its_state_makes_the_next_steps_the_same_again() -> None:
    first = filled()
    second = model_of()
    second.load_state_dict(first.state_dict())
    told = []
    for model in (first, second):
        model.zero_grad()
        torch.manual_seed(3)
        told.append([step(model, batch_of(seed=seed)) for seed in (10, 11)])
    for one, other in zip(*told, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


def test_two_processes_write_down_the_same() -> None:
    """Each sees its own sequences; what `total` adds up is in both."""
    models = [model_of(replay_rate=0.0) for _ in range(2)]
    chosen = []
    for rank, model in enumerate(models):
        memory = memory_of(model)
        memory.rank, memory.ranks = rank, 2
        memory.begin_step()
        (loss,) = LanguageModelling({"model": model.train()}).losses(batch_of(rows=2, seed=rank))
        loss.value.backward()  # type: ignore[no-untyped-call]
        chosen.append(memory._chosen())
    for model in models:
        together = iter([torch.stack(both) for both in zip(*chosen, strict=True)])
        memory_of(model).total = lambda values, together=together: next(together)  # type: ignore[misc]
        memory_of(model).end_step()
    first, second = (memory_of(model).state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert int((first["importance_N"] > 0).sum()) == 4


def test_the_loss_without_memory_is_told_beside_the_loss_with_it() -> None:
    model = filled().eval()
    judged = LanguageModelling({"model": model}).evaluate([batch_of(seed=20)])
    assert judged["loss"] != judged["loss_without_memory"]
    memory_of(model).reading = False
    assert LanguageModelling({"model": model}).evaluate([batch_of(seed=20)])["loss_without_memory"] == judged["loss_without_memory"]


def told(model: Moe) -> Tensor:
    (rows,) = memory_of(model).take_movement()
    return rows


def reporting(model: Moe) -> Moe:
    memory_of(model).reports = True
    return model


def test_workers_tell_of_their_most_important_new_sequences_once() -> None:
    model = reporting(model_of(replay_rate=0.0))
    for seed in range(3):
        step(model, batch_of(seed=seed))
    rows = told(model)
    assert (rows[:, 0] > 0).all()
    assert torch.equal(rows[:, 0], rows[:, 0].sort(descending=True).values)
    assert (told(model)[:, 0] == -1).all()


def test_a_coordinator_remembers_what_it_is_told_and_hands_it_on() -> None:
    worker, coordinator, other = (reporting(model_of(replay_rate=0.0)) for _ in range(3))
    step(worker, batch_of())
    memory_of(coordinator).apply_movement([told(worker)])
    (rows,) = memory_of(coordinator).state()
    memory_of(other).received_WR.copy_(rows)
    memory_of(other).on_state_loaded()
    kept_by = [{tuple(ids.tolist()) for ids in memory_of(model).ids_NT[:4]} for model in (worker, coordinator, other)]
    assert kept_by[0] == kept_by[1] == kept_by[2]
    recalled = opened(coordinator).eval()
    judged = LanguageModelling({"model": recalled}).evaluate([batch_of(seed=20)])
    assert judged["loss"] != judged["loss_without_memory"]


def test_claims_that_no_sequence_can_be_are_not_remembered() -> None:
    worker, coordinator = reporting(model_of(replay_rate=0.0)), reporting(model_of())
    step(worker, batch_of())
    rows = told(worker)
    rows[0, 1], rows[1, 33], rows[2, 1], rows[3, 0] = 50.0, -1.0, 0.5, 1e30
    rows[3, -4:] = 1e30
    memory = memory_of(coordinator)
    memory.apply_movement([rows])
    assert int((memory.importance_N > 0).sum()) == 1
    assert float(memory.importance_N.max()) == 100.0
    assert float(memory.vectors_NVD.max()) <= 32**0.5


def test_a_replayed_token_counts_by_its_weight() -> None:
    """The gradient is that of a mean in which each of its tokens counts so often, padding not at all."""
    found = []
    for weight in (1.0, 3.0):
        model = filled(replay_rate=0.5, replay_weight=weight)
        model.zero_grad()
        torch.manual_seed(3)
        step(model, batch_of(seed=6))
        found.append(model.token_embedding.weight.grad.clone())
    model = filled(replay_rate=0.5)
    model.zero_grad()
    for one in step_states(model):
        one.begin_step()
    torch.manual_seed(3)
    mixed, _ = memory_of(model).mixed(batch_of(seed=6))
    weights = torch.tensor([1.0] * 4 + [3.0] * 2)[:, None] * (mixed["labels"] != -100)
    beside = LanguageModelling({"model": model}).beside_tokens(mixed)["beside"]
    losses = torch.nn.functional.cross_entropy(model(mixed["input_ids"], beside=beside).transpose(1, 2), mixed["labels"], reduction="none")
    total = (losses * weights).sum() / weights.sum() + sum(weight * value for _, weight, value in beside.losses)
    total.backward()
    torch.testing.assert_close(model.token_embedding.weight.grad, found[1], rtol=1e-4, atol=1e-7)
    assert not torch.allclose(found[0], found[1])
