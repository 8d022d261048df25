"""A backend with paged caches, which chooses tokens itself and starts a step before the last one is read, writes what others write."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from shoal.models.generation.decoding import LogitPenalties, Warp
from shoal.serve.api.embedding import HiddenStateMean
from shoal.serve.backend import LocalBackend
from shoal.serve.batching import batch_scheduler
from shoal.serve.batching.backend_interface import Backend
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.batching.token_logprobs import PromptLogprobs
from shoal.serve.paged_backend import PagedBackend
from tests.serve.test_batching import VOCABULARY, Heard, finish, job, make_model

WARPS = (Warp(1.0), Warp(0.0), Warp(0.8, top_k=7), Warp(1.2, top_p=0.8), Warp(1.0, 9, 0.9, 0.01))
PENALTIES = LogitPenalties(1.3, 0.4, 0.2, {3: 2.0, 5: -100.0})


def engine(backend: Backend, running: int = 3, kept: int = 200) -> BatchingEngine:
    return BatchingEngine(backend, most_running=running, most_waiting=100, clock=itertools.count().__next__, kept_tokens=kept)


def paged(model: torch.nn.Module, running: int = 3, kept: int = 200) -> BatchingEngine:
    return engine(PagedBackend(model, most_running=running, kept_tokens=kept), running, kept)


class Listening(Heard):
    """Also hears the log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[float, list[int]]] = []

    def __call__(self, heard) -> bool:
        if getattr(heard, "logprob", None) is not None:
            self.told.append((heard.logprob, [one.token for one in heard.others]))
        return super().__call__(heard)


def written(one: BatchingEngine, **more) -> list[Listening]:
    """What requests write that come one after the other, some with a beginning that was read before."""
    chance, heard = random.Random(5), [Listening() for _ in range(9)]
    beginning = [chance.randrange(VOCABULARY) for _ in range(30)]
    for i, listener in enumerate(heard):
        prompt = [*beginning[: 30 if i % 3 == 0 else 0], *(chance.randrange(VOCABULARY) for _ in range(1 + i))]
        settings = {"penalties": PENALTIES} if i % 4 == 1 else {}
        if i % 4 == 2:
            settings = {"top_logprobs": 3}
        one.submit(job(prompt, listener, 1 if i == 4 else 15, warp=WARPS[i % len(WARPS)], **settings, **more))
        one.step()
    finish(one)
    return heard


@pytest.mark.parametrize("kind", ["learned", "rotary", "moe"])
def test_pages_change_no_token_and_no_probability(kind):
    model = make_model(kind)
    expected, found = written(engine(LocalBackend(model))), written(paged(model))
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.end for one in found] == [one.end for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert [likely for _, likely in ours.told] == [likely for _, likely in theirs.told]
        assert [p for p, _ in ours.told] == pytest.approx([p for p, _ in theirs.told], abs=1e-5)
    assert any(one.told for one in found)


SCORED = [[5, 6], [*range(1, 31)], [8], [3, 1, 4, 1, 5, 9, 2, 6]]


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_the_tokens_of_prompts_have_the_probabilities_of_a_plain_backend(tokens, monkeypatch):
    """Chunks of 12 tokens, beside a request that decodes, which is heard as if it were alone."""
    monkeypatch.setattr(batch_scheduler, "_NUMBERS_AT_ONCE", 12 * VOCABULARY)
    monkeypatch.setattr(PagedBackend, "smallest_chunk", 4)
    model, found = make_model("rotary"), []
    for one in (engine(LocalBackend(model)), paged(model)):
        collectors, heard = [PromptLogprobs(ids, 2) for ids in SCORED], [Listening() for _ in range(5)]
        one.submit(job([7, 7], heard[4], 25))
        one.step()
        for ids, collector, listener in zip(SCORED, collectors, heard, strict=False):
            one.submit(job(ids, listener, tokens, collector=collector, top_logprobs=2))
        finish(one)
        found.append((collectors, heard))
    (plain, theirs), (ours, mine) = found
    assert [one.tokens for one in mine] == [one.tokens for one in theirs]
    assert [len(one.tokens) for one in mine] == [tokens] * 4 + [25]
    for expected, collector in zip(plain, ours, strict=True):
        assert [one.token for one in collector.found] == [one.token for one in expected.found]
        assert [one.logprob for one in collector.found[1:]] == pytest.approx([one.logprob for one in expected.found[1:]], abs=1e-5)
        assert [[other.token for other in one.others] for one in collector.found] == [
            [other.token for other in one.others] for one in expected.found
        ]


def test_paged_caches_give_the_embeddings_of_a_plain_backend():
    model, found = make_model("learned"), []
    for one in (engine(LocalBackend(model)), paged(model)):
        means = [HiddenStateMean(pooling) for pooling in ("mean", "last")]
        one.submit(*(job([*range(30)], Heard(), 0, collector=mean) for mean in means))
        finish(one)
        found.append([mean.embedding() for mean in means])
    assert found[1] == [pytest.approx(vector, abs=1e-6) for vector in found[0]]


def test_damaged_weights_end_a_request_for_probabilities():
    model, heard = make_model("learned"), Heard()
    with torch.no_grad():
        model.token_embedding.weight[7] = torch.nan
    model.output = torch.nn.Linear(24, VOCABULARY, bias=False).double()
    one = paged(model)
    one.submit(job([1, 7, 2], heard, 3, collector=PromptLogprobs([1, 7, 2], 1)))
    finish(one)
    assert (heard.end, heard.tokens) == ("not_finite", [])


def test_a_token_that_ends_texts_ends_them_where_it_would():
    model = make_model("rotary")
    ends = frozenset({written(engine(LocalBackend(model)))[1].tokens[3]})
    expected, one = written(engine(LocalBackend(model)), eos_ids=ends), paged(model)
    found = written(one, eos_ids=ends)
    assert [heard.tokens for heard in found] == [heard.tokens for heard in expected]
    assert {"stop", "length"} == {heard.end for heard in found}
    assert one.tokens_reused == 0 or one.prefixes.texts


def test_a_beginning_that_was_read_before_is_shared():
    model, prompt = make_model("rotary"), list(range(30))
    one, first, second = paged(model), Heard(), Heard()
    one.submit(job(prompt, first, 12))
    finish(one)
    one.submit(job([*prompt, 7, 8], second, 12))
    finish(one)
    assert one.tokens_reused == 30
    plain = Heard()
    fresh = paged(model, kept=0)
    fresh.submit(job([*prompt, 7, 8], plain, 12))
    finish(fresh)
    assert second.tokens == plain.tokens


def test_every_page_is_free_again_when_all_texts_are_forgotten():
    model = make_model("learned")
    one = paged(model)
    pool = one.backend.decoder.pool
    whole = pool.free
    written(one)
    numbers = one.submit(job([1, 2], Heard(), 50), job([3], Heard(), 50))
    one.step()
    one.cancel(numbers)
    finish(one)
    while (number := one.prefixes.forget_oldest()) is not None:
        one.backend.release(number)
    assert pool.free == whole


def test_a_request_waits_for_pages_and_kept_texts_make_way():
    model = make_model("learned")
    one = paged(model, running=2, kept=64)
    taken = one.backend.decoder.pool.take(one.backend.decoder.pool.free - 2)
    heard = [Heard() for _ in range(4)]
    for i, listener in enumerate(heard):
        one.submit(job([i + 1] * 20, listener, 40))
    one.step()
    assert len(one.running) == 2, "each needs a page"
    finish(one)
    assert [len(listener.tokens) for listener in heard] == [40] * 4
    one.backend.decoder.pool.give_back(taken)


def test_damaged_weights_end_the_requests_that_read_them():
    model = make_model("learned")
    said: list[str] = []
    one = paged(model)
    one._warn = said.append
    with torch.no_grad():
        model.token_embedding.weight[7] = torch.nan
    model.output = torch.nn.Linear(24, VOCABULARY, bias=False).double()
    bad, good = Heard(), Heard()
    one.submit(job([1, 7], bad, 5), job([1, 2, 3], good, 1))
    finish(one)
    assert (bad.end, good.end) == ("not_finite", "length")
    assert "not finite" in said[0]
