"""Proposed tokens save steps and change no text, whatever is proposed."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from shoal.config.schema import model as schema
from shoal.models.generation.decoding import LogitPenalties, TokenDraws, Warp
from shoal.models.gpt import Gpt
from shoal.models.packed import layers, products
from shoal.serve.backend import LocalBackend
from shoal.serve.batched_kv_caches import KvCaches
from shoal.serve.batching import generation_job
from shoal.serve.batching.backend_interface import ForwardBatch
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.batching.generation_job import Finished, GeneratedToken, GenerationJob
from shoal.serve.nodes.active_requests import ActiveRequest
from shoal.serve.speculation import NO_PROPOSAL, Proposal, Proposer, Speculation
from tests.serve.test_batching import Heard, finish, job, make_model
from tests.serve.test_nodes import make, split_evenly, spread

CHANCE = random.Random(5)
PROMPTS = [[CHANCE.randrange(6) for _ in range(length)] for length in (1, 3, 9, 30, 5, 20, 2)]
LENGTHS = (20, 2, 30, 12, 1, 30, 25)


def engine(model: torch.nn.Module, tokens: int | None, kept: int = 0) -> BatchingEngine:
    """`tokens`: see `serving.proposed_tokens`."""
    speculation = None if tokens == 0 else Speculation(tokens)
    clock = itertools.count().__next__
    return BatchingEngine(LocalBackend(model), most_running=3, most_waiting=20, clock=clock, kept_tokens=kept, speculation=speculation)


def written(one: BatchingEngine, **more: object) -> list[list[int]]:
    """The answers to the prompts, which come one after the other."""
    heard = [Heard() for _ in PROMPTS]
    for prompt, length, listener in zip(PROMPTS, LENGTHS, heard, strict=True):
        one.submit(job(prompt, listener, length, **more))
        one.step()
    finish(one)
    assert {listener.end for listener in heard} == {"length"}
    return [listener.tokens for listener in heard]


class Oracle(Proposer):
    """Knows the texts, and is wrong in every third token or so."""

    texts: list[list[int]]
    chance: random.Random

    def propose(self, most: int) -> Proposal:
        so_far = self._ids_N[: len(self)].tolist()
        text = next(text for text in self.texts if text[: len(so_far)] == so_far)
        right = text[len(so_far) : len(so_far) + max(0, self.chance.randrange(-2, most + 1))]
        return Proposal(tuple(token if self.chance.random() < 0.7 else 7 for token in right), 0.7, 2)


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> type[Oracle]:
    Oracle.texts, Oracle.chance = [], random.Random(2)
    monkeypatch.setattr(generation_job, "Proposer", Oracle)
    return Oracle


@pytest.mark.parametrize(("kind", "temperature"), [("learned", 0.0), ("rotary", 0.8), ("moe", 0.8), ("gpt2", 0.0), ("llama", 0.8)])
def test_texts_are_the_same_whatever_is_proposed(kind: str, temperature: float, oracle: type[Oracle]) -> None:
    model, warp = make_model(kind), Warp(temperature)
    plain = written(engine(model, 0), warp=warp)
    oracle.texts = [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)]
    one = engine(model, 6)
    assert written(one, warp=warp) == plain
    assert 0 < one.tokens_accepted < one.tokens_proposed
    assert one.tokens_written == sum(map(len, plain))
    assert not one.backend.caches.requests


@pytest.mark.parametrize("tokens", [1, 16, None])
def test_texts_with_penalties_and_a_prefix_cache_are_the_same(tokens: int | None) -> None:
    model, more = make_model("rotary"), {"warp": Warp(0.3), "penalties": LogitPenalties(1.2, 0.1, 0.1, {3: 1.0})}
    one = engine(model, tokens, kept=300)
    assert [written(one, **more), written(one, **more)] == [written(engine(model, 0), **more)] * 2
    assert one.tokens_reused > 40
    assert one.tokens_proposed > 0


def test_probabilities_come_with_each_token() -> None:
    model, found = make_model("learned"), list[list[object]]()
    for tokens in (0, 8):
        one = engine(model, tokens)
        found.append([])
        one.submit(job([1, 2, 1, 2, 1], lambda event: bool(found[-1].append(event)), 30, warp=Warp(0.0), top_logprobs=2))
        finish(one)
    for plain, other in zip(*found, strict=True):
        if isinstance(plain, Finished):
            assert other == plain
        else:
            assert isinstance(plain, GeneratedToken)
            assert isinstance(other, GeneratedToken)
            assert (other.token, other.logprob) == (plain.token, pytest.approx(plain.logprob))


@pytest.mark.parametrize("ending", ["end token", "stop word", "cancel"])
def test_a_text_that_ends_among_accepted_tokens_has_no_token_more(ending: str, oracle: type[Oracle]) -> None:
    """What is kept of it is what was written, so a longer prompt reuses just that."""
    model, prompt = make_model("rotary"), PROMPTS[3]
    plain = engine(model, 0)
    heard = Heard()
    plain.submit(job(prompt, heard, 30))
    finish(plain)
    text = heard.tokens
    end = next(i for i in range(4, 20) if text[i] not in text[:i])
    oracle.texts, oracle.chance = [prompt + text], SureChance()
    one, seen = engine(model, 16, kept=200), Heard()

    def on_event(event: object) -> bool:
        seen(event)
        if ending == "cancel" and len(seen.tokens) == end:
            one.cancel([0])
        return ending == "stop word" and len(seen.tokens) == end

    one.submit(job(prompt, on_event, 30, **({"eos_ids": frozenset({text[end]})} if ending == "end token" else {})))
    finish(one)
    if ending == "cancel":
        assert (seen.end, one.prefixes.tokens) == ("cancelled", 0)
        return
    assert (seen.tokens, seen.end) == (text[:end], "stop")
    assert one.prefixes.texts[0].ids in ((*prompt, *text[:end]), (*prompt, *text[: end - 1]))
    longer, again = [*prompt, *text[:end], 4, 4], [Heard(), Heard()]
    oracle.texts = []
    for which, server in enumerate((one, engine(model, 0))):
        server.scheduler.speculation = None
        server.submit(job(longer, again[which], 10))
        finish(server)
    assert again[0].tokens == again[1].tokens
    assert one.tokens_reused >= len(prompt) + end - 1


class SureChance(random.Random):
    """Always the largest number below the limit, and no mistakes."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return (start if stop is None else stop) - 1

    def random(self) -> float:
        return 0.0


def test_what_is_proposed_followed_the_longest_sequence_that_occurred_before() -> None:
    proposer = Proposer([1, 2, 3, 4, 9, 2, 3, 5, 0, 1, 2, 3])
    assert proposer.propose(3)[0] == (4, 9, 2)
    proposer.extend([5])
    assert proposer.propose(2)[0] == (0, 1)
    proposer.extend([6])
    assert proposer.propose(2) == NO_PROPOSAL
    assert Proposer([8, 7, 8, 7, 8]).propose(5).tokens == (7, 8, 7, 8, 7)
    assert [Proposer(ids).propose(4) for ids in ([], [1], [1, 1])] == [NO_PROPOSAL] * 3
    assert Proposer([4, 4, 4]).propose(2).tokens == (4, 4)


def test_what_was_wrong_is_proposed_with_less_hope_and_what_was_right_with_more() -> None:
    proposer = Proposer([1, 2, 1, 2, 1])
    first = proposer.propose(1)
    proposer.learn(first.match, 0, 1)
    after_a_mistake = proposer.propose(1)
    for _ in range(3):
        proposer.learn(first.match, 4, 4)
    assert after_a_mistake.accepted_share < first.accepted_share < proposer.propose(1).accepted_share


class PricedBackend(LocalBackend):
    """A model whose time is computed: a second for a step, and a price for each further token of a row."""

    price, now, steps = 0.0, 0.0, 0

    def _read(self, batch: ForwardBatch) -> torch.Tensor | None:
        type(self).steps += 1
        type(self).now += 1.0 + self.price * (len(batch.ids[0]) - 1) if batch.decodes else 0.0
        return super()._read(batch)


@pytest.mark.parametrize(("price", "least", "most"), [(0.02, 0.2, 0.6), (0.15, 0.3, 0.8), (2.0, 1.0, 1.1)])
def test_steps_verify_as_many_tokens_as_save_time(price: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that repeats itself takes less time where tokens are cheap, and hardly more where they are not."""
    monkeypatch.setattr(PricedBackend, "price", price)
    monkeypatch.setattr(PricedBackend, "now", 0.0)
    one = BatchingEngine(
        PricedBackend(make_model("rotary")),
        most_running=1,
        most_waiting=1,
        clock=lambda: PricedBackend.now,
        speculation=Speculation(None),
    )
    heard = Heard()
    one.submit(GenerationJob([1, 2, 3, 4], 59, TokenDraws(1, [1]), heard, Warp(0.0)))
    finish(one)
    assert least <= PricedBackend.now / len(heard.tokens) <= most


def test_rows_of_which_tokens_are_removed_stay_joined_until_too_many_are() -> None:
    """Each row attends to its own tokens alone, and copies of it have them in order."""
    model, chance = make_model("rotary"), random.Random(3)
    caches, texts = KvCaches(model.new_cache, True, torch.device("cpu")), {1: [5, 6, 7], 2: [1]}
    with torch.inference_mode():
        for number, text in texts.items():
            model.next_logits(torch.tensor([text]), caches.of_one(number, len(text)))
        for _ in range(40):
            new = torch.tensor([[chance.randrange(40) for _ in range(4)] for _ in texts])
            cache, mask_BS = caches.of_several((1, 2), 4)
            logits_BLV = model(new, cache=cache, attention_mask=mask_BS)
            for row, number in enumerate(texts):
                whole = torch.tensor([texts[number] + new[row].tolist()])
                torch.testing.assert_close(logits_BLV[row], model(whole)[0, -4:])
                texts[number] += new[row, : chance.choice([0, 1, 1]) if len(texts[number]) < 50 else 0].tolist()
                caches.rewind(number, len(texts[number]))
        caches.copy_prefix(3, 1, len(texts[1]) - 1)
        alone = model.next_logits(torch.tensor([texts[1][-1:]]), caches.of_one(3, 1))
        torch.testing.assert_close(alone, model(torch.tensor([texts[1]]))[:, -1])
    assert caches._joints[1].columns <= len(texts[1]) + len(texts[2]) + 70


def sampled(prompt: list[int], heard: Heard, tokens: int) -> GenerationJob:
    return GenerationJob(prompt, tokens, TokenDraws(3, prompt), heard, Warp(0.3))


REPEATING = [[1, 2, 3, 1, 2, 3, 1, 2], [8, 8, 8], [*range(10), *range(8)]]


@pytest.mark.parametrize("lost", [False, True])
def test_several_machines_verify_and_one_that_is_unplugged_changes_no_token(lost: bool, oracle: type[Oracle]) -> None:
    model, described = make("gpt")
    texts = []
    for prompt in REPEATING:
        plain, heard = engine(model, 0), Heard()
        plain.submit(sampled(prompt, heard, 40))
        finish(plain)
        texts.append(heard.tokens)
    oracle.texts = [prompt + text for prompt, text in zip(REPEATING, texts, strict=True)]
    with spread(model, described, ["pi1", "pi2"]) as (over_nodes, machines):
        split_evenly(over_nodes, 3)
        over_nodes.scheduler.speculation, heard_of = Speculation(5), [Heard() for _ in REPEATING]
        name = over_nodes.backend.placement.current.stages[1].name
        over_nodes.submit(*(sampled(prompt, one, 40) for prompt, one in zip(REPEATING, heard_of, strict=True)))
        while over_nodes.busy:
            over_nodes.step()
            if lost and name in machines.running and len(heard_of[0].tokens) > 15:
                machines.unplug(name, over_nodes.backend.node_server)
        assert (name in machines.running) is not lost
        assert [one.tokens for one in heard_of] == texts
        assert 0 < over_nodes.tokens_accepted < over_nodes.tokens_proposed


def test_inputs_that_are_reported_after_tokens_were_removed_are_kept_without_these() -> None:
    """A machine that replaces another one would else begin with tokens that are not of the text."""
    active = ActiveRequest(None, [1, 2, 3, 4, 5])
    active.keep(2, 0, torch.tensor([[1.0], [2.0], [3.0]]))
    active.keep(2, 3, torch.tensor([[4.0], [5.0]]))
    active.rewind(2)
    assert (active.ids, torch.cat(active.kept[2]).flatten().tolist()) == ([1, 2], [1.0, 2.0])


def test_the_kept_inputs_of_a_long_answer_are_few_pieces() -> None:
    active, states_LD = ActiveRequest(None), torch.arange(1000.0)[:, None]
    for position in range(1000):
        active.keep(2, position, states_LD[position : position + 1])
    assert len(active.kept[2]) <= 10
    kept = active.kept_input(2, 1000)
    assert kept is not None
    assert kept[0].equal(states_LD)


def test_tokens_of_one_answer_have_the_same_logits_alone_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, where products with weights in few bits do: such products make a large difference of the smallest one."""
    monkeypatch.setattr(layers, "way_for", lambda shape, device: products._INTEGERS)
    torch.manual_seed(0)
    settings = schema.Gpt(hidden_size=64, num_layers=3, num_heads=4, positions="rotary", norm="rms", bias=False, max_seq_len=64)
    model, ids_1L = Gpt(settings, 40).eval(), torch.randint(40, (1, 30))
    layers.pack_loaded(model, "int8")
    with torch.inference_mode():
        cache = model.new_cache(0)
        model.hidden(ids_1L[:, :24], cache=cache)
        together = model.hidden(ids_1L[:, 24:], cache=cache)
        cache.crop(24)
        single = torch.cat([model.hidden(ids_1L[:, i : i + 1], cache=cache) for i in range(24, 30)], 1)
    assert torch.equal(together, single)
