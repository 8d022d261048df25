"""Requests give the same text alone, together, and whatever comes and goes beside them."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.config.schema import model as schema
from shoal.config.schema.serving import Decoding
from shoal.errors import ShoalError
from shoal.models import generate
from shoal.models.generation.decoding import TokenDraws, Warp
from shoal.models.generation.kv_cache import KeyValueCache
from shoal.models.generation.side_texts import SideTexts
from shoal.models.gpt import Gpt
from shoal.models.layers.cross_attention import WithCrossAttention
from shoal.models.lstm import Lstm
from shoal.models.moe import Moe
from shoal.serve.api.embedding import HiddenStateMean
from shoal.serve.backend import LocalBackend
from shoal.serve.batching.batching_engine import BatchingEngine, QueueFullError
from shoal.serve.batching.generation_job import Finished, GenerationJob
from shoal.serve.batching.token_logprobs import PromptLogprobs
from shoal.serve.nodes.distributed_model import DistributedModel

VOCABULARY = 40


def hugging_face(kind: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    from shoal.models.huggingface.model import HuggingFace

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=4, n_positions=64)
    else:
        made = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[kind]
        config = made(**sizes, num_key_value_heads=2, max_position_embeddings=64)
    return HuggingFace(transformers.AutoModelForCausalLM.from_config(config))


def make_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(1)
    sizes = {"hidden_size": 24, "num_layers": 2, "num_heads": 4, "max_seq_len": 64}
    if kind == "lstm":
        model: torch.nn.Module = Lstm(schema.Lstm(hidden_size=24, num_layers=2), VOCABULARY)
    elif kind == "rotary":
        model = Gpt(schema.Gpt(**sizes, positions="rotary", norm="rms", feed_forward="swiglu", bias=False, num_kv_heads=2), VOCABULARY)
    elif kind == "moe":
        model = Moe(schema.Moe(**sizes, experts=schema.Experts(count=4, per_token=2)), VOCABULARY)
    elif kind == "learned":
        model = Gpt(schema.Gpt(**sizes), VOCABULARY)
    else:
        model = hugging_face(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model.double().eval()


class Heard:
    """What one request heard."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end = ""

    def __call__(self, heard) -> bool:
        assert not self.end, "nothing comes after the end"
        if isinstance(heard, Finished):
            self.end = heard.reason
        else:
            self.tokens.append(heard.token)
        return False


def job(prompt: list[int], heard: Heard, tokens: int = 12, **more) -> GenerationJob:
    return GenerationJob(prompt, tokens, TokenDraws(3, prompt), heard, more.pop("warp", Warp(1.0)), **more)


def engine(model: torch.nn.Module, **limits) -> BatchingEngine:
    ticks = iter(range(1_000_000))
    return BatchingEngine(
        LocalBackend(model), most_running=limits.get("running", 4), most_waiting=limits.get("waiting", 100), clock=lambda: next(ticks)
    )


def finish(one: BatchingEngine) -> None:
    while one.busy:
        one.step()


def alone(model: torch.nn.Module, prompt: list[int], tokens: int) -> list[int]:
    heard = Heard()
    one = engine(model)
    one.submit(job(prompt, heard, tokens))
    finish(one)
    return heard.tokens


@pytest.mark.parametrize("kind", ["learned", "rotary", "moe", "lstm", "gpt2", "llama", "qwen2"])
def test_requests_that_come_and_go_give_the_text_they_give_alone(kind):
    model, chance = make_model(kind), random.Random(5)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(chance.choice([1, 3, 9, 40]))] for _ in range(7)]
    lengths = [chance.choice([2, 7, 15]) for _ in prompts]
    one, heard = engine(model, running=3), [Heard() for _ in prompts]
    for prompt, length, listener in zip(prompts, lengths, heard, strict=True):
        one.submit(job(prompt, listener, length))
        for _ in range(chance.randrange(4)):
            one.step()
    finish(one)
    assert [listener.tokens for listener in heard] == [alone(model, p, n) for p, n in zip(prompts, lengths, strict=True)]
    assert {listener.end for listener in heard} == {"length"}
    assert not one.backend.caches.requests


@pytest.mark.parametrize("kind", ["learned", "moe", "lstm", "llama"])
@pytest.mark.parametrize("tokens", [0, 1])
def test_probabilities_of_a_prompt_are_those_of_a_forward_pass(kind, tokens):
    """In chunks, beside requests that decode, and whatever the prefix cache holds."""
    model, chance = make_model(kind), random.Random(4)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(length)] for length in (1, 40, 40)]
    one = BatchingEngine(LocalBackend(model), most_running=4, most_waiting=9, clock=itertools.count().__next__, kept_tokens=200)
    beside, scored = Heard(), []
    one.submit(job([3, 4], beside, 20))
    for prompt in [*prompts, prompts[1]]:
        scored.append((prompt, PromptLogprobs(prompt, 2), Heard()))
        one.submit(job(prompt, scored[-1][2], tokens, collector=scored[-1][1]))
        one.step()
    finish(one)
    assert beside.tokens == alone(model, [3, 4], 20)
    for prompt, found, heard in scored:
        with torch.no_grad():
            logprobs_LV = model(torch.tensor([prompt]))[0].log_softmax(-1)
        assert [one.token for one in found.found] == prompt
        assert [one.logprob for one in found.found[1:]] == pytest.approx([float(logprobs_LV[i, t]) for i, t in enumerate(prompt[1:])])
        assert [[other.token for other in one.others] for one in found.found[1:]] == logprobs_LV[:-1].topk(2).indices.tolist()
        assert (heard.end, heard.tokens) == ("length", alone(model, prompt, 1)[:tokens])


@pytest.mark.parametrize("kind", ["rotary", "lstm", "gpt2", "qwen2"])
def test_an_embedding_is_that_of_a_forward_pass(kind):
    """In chunks, beside a request that decodes."""
    model, prompt = make_model(kind), [i % VOCABULARY for i in range(50)]
    one, beside, found = engine(model), Heard(), [HiddenStateMean("mean"), HiddenStateMean("last")]
    one.submit(job([3, 4], beside, 20))
    for collector in found:
        one.submit(job(prompt, Heard(), 0, collector=collector))
        one.step()
    finish(one)
    with torch.no_grad():
        hidden_LD = model.hidden(torch.tensor([prompt]))[0]
    for collector, expected_D in zip(found, (hidden_LD.mean(0), hidden_LD[-1]), strict=True):
        assert collector.embedding() == pytest.approx((expected_D / expected_D.norm()).tolist(), abs=1e-6)
    assert beside.tokens == alone(model, [3, 4], 20)


def test_the_token_that_ends_a_text_is_reported_beside_those_of_its_prompt():
    """Who asks for one token and drops the last would otherwise drop one of the prompt."""
    model, heard = make_model("rotary"), []
    (end,) = alone(model, [5, 6], 1)
    one = engine(model)
    asked = {"collector": PromptLogprobs([5, 6], 1), "eos_ids": frozenset({end}), "top_logprobs": 1}
    one.submit(job([5, 6], lambda event: bool(heard.append(event)), 1, **asked))
    finish(one)
    assert [(heard[0].token, heard[0].is_end), heard[1]] == [(end, True), Finished("stop")]
    assert heard[0].logprob < 0


def test_a_request_that_is_cancelled_frees_its_place_before_the_next_token():
    one, left, kept = engine(make_model("rotary")), Heard(), Heard()
    numbers = one.submit(job([1, 2], left, 50))
    one.submit(job([3], kept, 12))
    for _ in range(5):
        one.step()
    one.cancel(numbers)
    before = len(left.tokens)
    one.step()
    assert left.end == "cancelled"
    assert len(left.tokens) == before
    finish(one)
    assert kept.tokens == alone(one.backend.model, [3], 12)
    assert not one.backend.caches.requests


def test_a_long_prompt_is_read_in_pieces_beside_the_others():
    one, first, second = engine(make_model("rotary")), Heard(), Heard()
    one.submit(job([1], first, 30))
    one.step()
    one.submit(job(list(range(40)), second, 3))
    one.step()
    assert len(first.tokens) == 2
    assert not second.tokens
    one.step()
    assert len(first.tokens) == 3
    assert not second.tokens
    finish(one)
    assert second.tokens == alone(one.backend.model, list(range(40)), 3)


class Priced(LocalBackend):
    """A model whose time is computed: a second to go through its weights, and a twentieth for each token."""

    now = 0.0

    def _read(self, work):
        Priced.now += 1.0 + 0.05 * sum(map(len, work.ids))
        return super()._read(work)


def test_tokens_take_less_than_twice_as_long_while_a_long_prompt_is_read():
    came: list[float] = []
    one = BatchingEngine(Priced(make_model("lstm")), most_running=8, most_waiting=8, clock=lambda: Priced.now)
    one.submit(*(job([1], Heard(), 500) for _ in range(3)))
    one.submit(GenerationJob([1], 500, TokenDraws(3, [1]), lambda heard: bool(came.append(Priced.now)), Warp(1.0)))
    while len(came) < 20:
        one.step()
    second = Heard()
    one.submit(job([2] * 600, second, 1))
    while not second.end:
        one.step()
    usual, beside = came[19] - came[18], (came[-1] - came[19]) / (len(came) - 20)
    longest = max(after - before for before, after in itertools.pairwise(came[19:]))
    assert 1.5 < beside / usual < 2
    assert longest / usual < 3
    assert len(came) - 20 < 600 / 4, "the prompt is not kept waiting either"


def test_where_many_prompts_wait_for_one_that_writes_each_counts_as_much_as_it():
    came: list[float] = []
    one = BatchingEngine(Priced(make_model("lstm")), most_running=8, most_waiting=8, clock=lambda: Priced.now)
    one.submit(GenerationJob([1], 500, TokenDraws(3, [1]), lambda heard: bool(came.append(Priced.now)), Warp(1.0)))
    while len(came) < 20:
        one.step()
    many = [Heard() for _ in range(6)]
    one.submit(*(job([2] * (90 + i), heard, 500) for i, heard in enumerate(many)))
    while not all(heard.tokens for heard in many):
        one.step()
    assert came[-1] - came[19] < 220, "with the share of one prompt, all would wait for 271 s until the last of them is read"


class TwoGroups(LocalBackend):
    """As many groups as two machines would want; one work after the other is finished."""

    microbatches = 2

    def results(self):
        self.sizes.append([len(work.requests) for work in self._pending])
        for found in super().results():
            yield found
            return

    sizes: list[list[int]]


def test_requests_stay_in_their_groups_and_their_caches_are_joined_once(monkeypatch):
    copies, joined = [], KeyValueCache.joined.__func__
    monkeypatch.setattr(KeyValueCache, "joined", classmethod(lambda cls, rows: copies.append(len(rows)) or joined(cls, rows)))
    model, heard = make_model("rotary"), [Heard() for _ in range(8)]
    stages = TwoGroups(model)
    stages.sizes = []
    piped = BatchingEngine(stages, most_running=8, most_waiting=8, clock=itertools.count().__next__)
    for i, one in enumerate(heard):
        piped.submit(job([i + 1] * (i + 2), one, 40))
        piped.step()
    while not all(len(one.tokens) > 5 for one in heard):
        piped.step()
    copies.clear()
    stages.sizes.clear()
    while all(len(one.tokens) < 35 for one in heard):
        piped.step()
    assert [4, 4] in stages.sizes
    assert all(size == 4 for sizes in stages.sizes for size in sizes)
    assert not copies, "nobody came or went"
    finish(piped)
    assert [one.tokens for one in heard] == [alone(model, [i + 1] * (i + 2), 40) for i in range(8)]


@pytest.mark.parametrize("kind", ["rotary", "lstm", "llama"])
def test_prompts_of_one_length_that_come_together_are_read_together(kind):
    one, heard = engine(make_model(kind)), [Heard() for _ in range(4)]
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8], [7, 7, 7]]
    started, start = [], one.backend.start
    one.backend.start = lambda work: started.append(work.requests) or start(work)
    for prompt, own in zip(prompts, heard, strict=True):
        one.submit(job(prompt, own))
    one.step()
    assert started == [(0, 1, 3), (2,)]
    finish(one)
    assert [own.tokens for own in heard] == [alone(one.backend.model, prompt, 12) for prompt in prompts]
    assert one.tokens_read == 11


def test_more_requests_than_may_wait_are_refused_whole():
    one = engine(make_model("learned"), running=1, waiting=1)
    one.submit(job([1], Heard()), job([2], Heard()))
    with pytest.raises(QueueFullError):
        one.submit(job([3], Heard()))
    assert len(one.waiting) == 2


def test_a_request_ends_at_its_deadline_wherever_it_is():
    one, runs, waits = engine(make_model("learned"), running=1), Heard(), Heard()
    one.submit(job([1], runs, 60, deadline=20.0))
    one.submit(job([2], waits, 5, deadline=20.0))
    finish(one)
    assert (runs.end, waits.end) == ("timeout", "timeout")


def test_the_end_of_text_ends_a_request_and_is_not_told():
    model = make_model("rotary")
    tokens = alone(model, [4, 5], 12)
    stopped, heard = engine(model), Heard()
    stopped.submit(job([4, 5], heard, eos_ids=frozenset({tokens[5]})))
    finish(stopped)
    assert heard.end == "stop"
    assert heard.tokens == tokens[: tokens.index(tokens[5])]


def test_probabilities_of_tokens_are_those_of_the_model():
    model, found = make_model("rotary"), []
    one = engine(model)
    one.submit(GenerationJob([4, 5], 3, TokenDraws(1, []), lambda heard: bool(found.append(heard)), Warp(0.0), top_logprobs=2))
    finish(one)
    with torch.no_grad():
        exact = model(torch.tensor([[4, 5]]))[0, -1].log_softmax(-1)
    assert found[0].logprob == pytest.approx(float(exact.max()))
    assert [other.logprob for other in found[0].others] == pytest.approx(exact.topk(2).values.tolist())


def reading_model(feature: str) -> Moe:
    """A model whose gates to what it reads are open, and which remembers something."""
    reading = {
        "cross_attention": schema.CrossAttention(enabled=True),
        "retrieval": schema.Retrieval(enabled=True, chunk_size=4),
        "episodic_memory": schema.EpisodicMemory(enabled=True, chunk_size=4, capacity=6, top_k=2),
    }[feature]
    torch.manual_seed(1)
    model = Moe(schema.Moe(hidden_size=16, num_layers=2, num_heads=2, max_seq_len=64, **{feature: reading}), VOCABULARY).eval()
    for part in model.modules():
        if isinstance(part, WithCrossAttention):
            part.gate.data.fill_(2.0)
    if model.memory is not None:
        model.memory.importance_N.fill_(1.0)
        model.memory.vectors_NVD.normal_()
    return model


def passages_beside(ids_BL: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a chunk of four tokens finds is itself turned round."""
    chunks = (ids_BL.shape[1] - 1) // 4
    found = ids_BL[:, : 4 * chunks].unflatten(1, (chunks, 4)).flip(2) if chunks else ids_BL[:, None, :1] * 0 - 1
    return {"passage_ids": found, "passage_from": torch.arange(1, found.shape[1] + 1)[None].expand(len(ids_BL), -1) * 4}


BESIDE = {
    "cross_attention": SideTexts(lambda rows, texts, starts: {"context_ids": torch.tensor([[[5, 6, 7]]])}, None),
    "retrieval": SideTexts(lambda rows, texts, starts: passages_beside(torch.tensor(texts)), 4),
    "episodic_memory": None,
}


@pytest.mark.parametrize("feature", BESIDE)
def test_a_served_model_reads_what_it_reads_when_it_writes_alone(feature: str) -> None:
    """Prompts are read in pieces, beside others that write meanwhile."""
    model, beside = reading_model(feature), BESIDE[feature]
    prompts, heard = [list(range(1, 20)), [3, 4, 5, 6, 7]], [Heard(), Heard()]
    one = BatchingEngine(LocalBackend(model, beside), most_running=2, most_waiting=2, clock=itertools.count().__next__)
    for prompt, listener in zip(prompts, heard, strict=True):
        one.submit(job(prompt, listener, 14, warp=Warp(0.0)))
        one.step()
    finish(one)
    greedy = Decoding(active="greedy")
    for prompt, listener in zip(prompts, heard, strict=True):
        wanted = generate(model, torch.tensor([prompt]), max_new_tokens=14, decoding=greedy, beside=beside)
        assert listener.tokens == [int(token) for token in wanted]
    plain = alone(model, prompts[0], 14) if beside else None
    assert heard[0].tokens != plain, "what it reads changes what it writes"
    assert not one.backend.caches.requests
    assert not one.backend._readers


def test_a_model_that_reads_is_not_spread_over_machines() -> None:
    served: Any = SimpleNamespace(model=reading_model("episodic_memory"))
    with pytest.raises(ShoalError, match="is served by one machine: --nodes 1"):
        DistributedModel(served, None, print)  # type: ignore[arg-type]


def test_a_request_without_finite_logits_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, heard, other, warned = make_model("learned"), Heard(), Heard(), []
    one = engine(model)
    one._warn = warned.append
    plain = engine(model)
    plain.submit(job([3, 1, 4], wanted := Heard()))
    finish(plain)
    one.submit(job([3, 1, 4], heard), job([5, 1, 4], other))
    read = one.backend._read

    def with_a_nan(batch):
        logits_BV = read(batch).clone()
        for row, number in enumerate(batch.requests):
            if number == 1 and len(heard.tokens) >= 3:
                logits_BV[row, 7] = float("nan")
        return logits_BV

    monkeypatch.setattr(one.backend, "_read", with_a_nan)
    finish(one)
    assert (other.end, heard.end) == ("not_finite", "length")
    assert heard.tokens == wanted.tokens
    assert "not finite" in warned[0]
