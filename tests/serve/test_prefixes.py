"""Prompts that begin like a text of before are read from there on, and every token is what it would have been."""

from __future__ import annotations

import itertools

import httpx
import pytest

from shoal.serve.backend import ForwardBatch, LocalBackend
from shoal.serve.batched_kv_caches import SHORTEST, PrefixCache
from shoal.serve.batching.batching_engine import BatchingEngine
from tests.serve.test_batching import Heard, alone, finish, job, make_model
from tests.serve.test_nodes import alone as alone_whole
from tests.serve.test_nodes import make, split_evenly, spread
from tests.support.processes import HANG_S
from tests.support.small_service import running, small_served

BEGINNING = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]


def keeping(model, tokens: int = 200) -> BatchingEngine:
    return BatchingEngine(LocalBackend(model), most_running=3, most_waiting=20, clock=itertools.count().__next__, kept_tokens=tokens)


def asked(engine: BatchingEngine, prompt: list[int], tokens: int = 8) -> list[int]:
    heard = Heard()
    engine.submit(job(prompt, heard, tokens))
    finish(engine)
    return heard.tokens


@pytest.mark.parametrize("kind", ["learned", "rotary", "moe", "gpt2", "llama"])
def test_a_prompt_that_goes_on_from_an_answer_reads_only_what_is_new(kind: str) -> None:
    model = make_model(kind)
    engine = keeping(model)
    first = asked(engine, BEGINNING)
    longer = [*BEGINNING, *first, 7, 7]
    assert asked(engine, longer) == alone(model, longer, 8)
    assert engine.tokens_reused == len(BEGINNING) + len(first) - 1, "the last token that was written was never read"
    assert engine.tokens_read == len(BEGINNING) + 3


def test_prompts_that_share_a_beginning_run_together_beside_a_stranger() -> None:
    model = make_model("rotary")
    engine = keeping(model)
    asked(engine, [*BEGINNING, 1])
    prompts = [[*BEGINNING, 2, 2], [*BEGINNING, 2, 3, 4], [8, 8, 8]]
    heard = [Heard() for _ in prompts]
    engine.submit(*(job(prompt, one, 10) for prompt, one in zip(prompts, heard, strict=True)))
    finish(engine)
    assert [one.tokens for one in heard] == [alone(model, prompt, 10) for prompt in prompts]
    assert engine.tokens_reused == 2 * len(BEGINNING)


def test_what_is_kept_is_bounded_and_all_else_is_freed() -> None:
    engine = keeping(make_model("learned"), 60)
    for first in range(6):
        asked(engine, [first, *BEGINNING], 5)
        assert engine.prefixes.tokens <= 60
        assert engine.backend.caches.requests == set(engine.prefixes.texts)
    assert len(engine.prefixes.texts) == 2


def test_a_request_that_was_cancelled_keeps_nothing() -> None:
    engine, heard = keeping(make_model("learned")), Heard()
    numbers = engine.submit(job(BEGINNING, heard, 30))
    for _ in range(4):
        engine.step()
    engine.cancel(numbers)
    finish(engine)
    assert not engine.backend.caches.requests


@pytest.mark.parametrize("kind", ["lstm", "rotary"])
def test_nothing_is_kept_of_a_model_that_cannot_forget_or_where_nobody_wants_it(kind: str) -> None:
    engine = keeping(make_model(kind), 200 if kind == "lstm" else 0)
    asked(engine, BEGINNING)
    assert not engine.backend.caches.requests


def test_a_longer_text_takes_the_place_of_its_beginning() -> None:
    prefixes = PrefixCache(100)
    text = tuple(range(40))
    assert prefixes.add(1, text[:20]) == []
    assert prefixes.add(2, text) == [1]
    assert prefixes.add(3, text[:30]) == [3], "the longer one has all of it"
    assert prefixes.longest([*text[:25], 99]) == (2, 25)
    assert prefixes.longest(text) == (2, 39), "the last token of a prompt is read"
    assert prefixes.longest(text[: SHORTEST - 1]) is None
    assert prefixes.add(4, range(100, 170)) == [2]


@pytest.mark.parametrize(("spare", "lost"), [(True, 1), (False, 1), (False, None)])
def test_several_machines_share_beginnings_also_after_one_was_lost(spare: bool, lost: int | None) -> None:
    model, described = make("gpt")
    with spread(model, described, ["pi1", "pi2", "pi3"] if spare else ["pi1", "pi2"]) as (engine, machines):
        split_evenly(engine, 3)
        engine.prefixes.most_tokens = 500
        first = asked(engine, BEGINNING)
        if lost is not None:
            machines.unplug(engine.backend.placement.current.stages[lost].name, engine.backend.node_server)
        longer, started, start = [*BEGINNING, *first, 7, 7], list[ForwardBatch](), engine.backend.start
        engine.backend.start = lambda work: started.append(work) or start(work)
        assert [asked(engine, longer)] == alone_whole(model, [longer], [8])
        assert started[0].ids == ((first[-1], 7, 7),)
        assert engine.tokens_reused == len(BEGINNING) + len(first) - 1
        assert not engine.backend.requests.active


def test_a_beginning_that_was_shared_survives_the_loss_of_a_machine_in_mid_sentence() -> None:
    model, described = make("gpt")
    with spread(model, described, ["pi1", "pi2", "pi3"]) as (engine, machines):
        split_evenly(engine, 3)
        engine.prefixes.most_tokens = 500
        asked(engine, BEGINNING)
        heard, longer, name = Heard(), [*BEGINNING, 7, 7], engine.backend.placement.current.stages[1].name
        engine.submit(job(longer, heard, 12))
        while engine.busy:
            engine.step()
            if name in machines.running and len(heard.tokens) >= 4:
                machines.unplug(name, engine.backend.node_server)
        assert [heard.tokens] == alone_whole(model, [longer], [12])


def test_layers_that_are_dropped_take_the_kept_texts_with_them() -> None:
    model, described = make("gpt")
    with spread(model, described, ["pi1"]) as (engine, _):
        split_evenly(engine, 2)
        engine.prefixes.most_tokens = 500
        asked(engine, BEGINNING)
        backend = engine.backend
        with backend._changed:
            backend.placement.nodes["pi1"].layer_s = 0.2
            backend.placement.use_route(backend.placement.plan())
            backend.requests.drop_unused()
        assert not backend.requests.retained
        longer = [*BEGINNING, 7, 7]
        assert [asked(engine, longer)] == alone_whole(model, [longer], [8])
        assert engine.tokens_reused == 0


def test_a_client_is_told_what_was_not_read_again() -> None:
    with running(small_served()) as service:
        address = f"http://127.0.0.1:{service.ports[0]}"
        ask = {"model": "tiny", "prompt": "once upon a time there was", "max_tokens": 4, "temperature": 0}
        answers = [httpx.post(f"{address}/v1/completions", json=ask, timeout=HANG_S).json() for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers] == [0, 25]
        figures = httpx.get(f"{address}/metrics", timeout=HANG_S).text
    assert 'shoal_reused_tokens_total{model="tiny"} 25\n' in figures
    assert 'shoal_kept_tokens{model="tiny"} 29\n' in figures
    assert 'shoal_proposed_tokens_total{model="tiny"} ' in figures
    assert 'shoal_accepted_tokens_total{model="tiny"} ' in figures
