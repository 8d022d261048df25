"""Generation with a cache against plain recomputation of everything at each step."""

from __future__ import annotations

import pytest
import torch

from shoal.config.schema import model as schema
from shoal.config.schema.serving import Decoding, Sampling
from shoal.errors import ShoalError
from shoal.models import generate
from shoal.models.layers.value_head import ScoreModel
from shoal.models.lstm import Lstm
from shoal.models.mlp import Mlp

GREEDY = Decoding(active="greedy")
ROTARY = {"positions": "rotary", "feed_forward": "swiglu", "norm": "rms", "bias": False, "num_kv_heads": 2}


@pytest.fixture(params=["learned", "rotary", "lstm"])
def model(request, make_gpt):
    """Weights so large that what comes next depends on all that came before."""
    model = make_gpt(tied_embeddings=False, **ROTARY if request.param == "rotary" else {})
    if request.param == "lstm":
        model = Lstm(schema.Lstm(hidden_size=24, num_layers=2), 31).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if request.param == "lstm" else 2.0)
    return model


def prompt(rows: int = 3, length: int = 5) -> torch.Tensor:
    return torch.randint(0, 31, (rows, length), generator=torch.Generator().manual_seed(4))


def recomputed(model: torch.nn.Module, tokens: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """The greedy tokens with no cache: the model reads all it may see, every time."""
    longest = model.max_seq_len
    seen = tokens if longest is None else tokens[:, -longest:]
    found = []
    with torch.no_grad():
        for _ in range(steps):
            found.append(model(seen)[:, -1].argmax(-1))
            if seen.shape[1] == longest:
                seen = seen[:, seen.shape[1] - longest // 2 + 1 :]
            seen = torch.cat([seen, found[-1][:, None]], dim=1)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("length", "steps"), [(5, 11), (1, 60), (16, 20), (23, 9)])
def test_cached_tokens_equal_recomputed_ones(model, dtype, length, steps):
    model = model.to(dtype)
    tokens = prompt(length=length)
    cached = list(generate(model, tokens, max_new_tokens=steps, decoding=GREEDY))
    assert torch.equal(torch.stack(cached), torch.stack(recomputed(model, tokens, steps)))
    assert len({tuple(step.tolist()) for step in cached}) > 3  # not one token over and over


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-11)])
def test_cached_logits_equal_a_float64_reference(model, dtype, tolerance):
    tokens, cache = prompt(length=16), model.new_cache(16)
    with torch.no_grad():
        exact = model.double()(tokens)
        model.to(dtype)
        parts = [model(tokens[:, a:b], cache=cache) for a, b in [(0, 6), (6, 7), (7, 11), (11, 12), (12, 16)]]
    torch.testing.assert_close(torch.cat(parts, dim=1).double(), exact, atol=tolerance, rtol=0)


def count_tokens(model: torch.nn.Module) -> list[int]:
    counts: list[int] = []
    model.token_embedding.register_forward_pre_hook(lambda _, inputs: counts.append(inputs[0].shape[1]))
    return counts


def test_each_token_costs_one_token(model):
    counts = count_tokens(model)
    list(generate(model, prompt(length=5), max_new_tokens=11, decoding=GREEDY))
    assert counts == [5] + [1] * 10


def test_a_full_context_costs_two_tokens_each_on_average(make_gpt):
    model = make_gpt(max_seq_len=32)
    counts = count_tokens(model)
    list(generate(model, prompt(length=5), max_new_tokens=300, decoding=GREEDY))
    assert sum(counts) <= 5 + 2 * 300
    assert set(counts) == {5, 1, 16}


def test_the_cache_is_written_in_place(make_gpt):
    model = make_gpt()
    cache = model.new_cache(16)
    with torch.no_grad():
        model.next_logits(prompt(), cache)
        places = [layer.keys_and_values[0].data_ptr() for layer in cache.layers]
        for token in range(8):
            model.next_logits(torch.full((3, 1), token), cache)
    assert cache.length == 13
    assert places == [layer.keys_and_values[0].data_ptr() for layer in cache.layers]


def test_rows_end_by_themselves(model):
    free = torch.stack(list(generate(model, prompt(), max_new_tokens=30, decoding=GREEDY)))
    eos = int(free[4, 0])
    ended = torch.stack(list(generate(model, prompt(), max_new_tokens=30, decoding=GREEDY, eos_id=eos)))
    for row in range(3):
        hits = (free[:, row] == eos).nonzero()
        first = int(hits[0]) if len(hits) else 30
        assert torch.equal(ended[: first + 1, row], free[: min(first + 1, len(ended)), row])
        assert (ended[first:, row] == eos).all()
    alone = list(generate(model, prompt()[:1], max_new_tokens=30, decoding=GREEDY, eos_id=eos))
    assert len(alone) == int((free[:, 0] == eos).nonzero()[0]) + 1


def test_the_seed_decides(model):
    def sample(seed: int) -> list[list[int]]:
        decoding = Decoding(active="sampling", sampling=Sampling(temperature=2.0))
        return [step.tolist() for step in generate(model, prompt(), max_new_tokens=12, decoding=decoding, seed=seed)]

    before = torch.get_rng_state()
    first = sample(1)
    assert first == sample(1) != sample(2)
    assert torch.equal(before, torch.get_rng_state())
    assert len({tuple(row) for row in zip(*first, strict=True)}) == 3  # rows are drawn apart


def test_the_model_is_left_as_it_was(make_gpt):
    model = make_gpt(dropout=0.5).train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    steps = generate(model, prompt(), max_new_tokens=8, decoding=GREEDY)
    first = next(steps)
    assert [module.training for module in model.modules()] == modes  # also between the steps
    assert torch.is_grad_enabled()
    model.eval()
    assert torch.equal(torch.stack([first, *steps]), torch.stack(recomputed(model, prompt(), 8)))
    assert not first.is_inference()  # such a tensor could not be trained on


def test_nothing_asked_nothing_given(model):
    assert list(generate(model, prompt(), max_new_tokens=0, decoding=GREEDY)) == []


@pytest.mark.parametrize("tokens", [torch.zeros(1, 0, dtype=torch.long), torch.zeros(5, dtype=torch.long)])
def test_an_empty_prompt_is_refused(model, tokens):
    with pytest.raises(ShoalError, match=r"the prompt"):
        generate(model, tokens, max_new_tokens=3, decoding=GREEDY)


@pytest.mark.parametrize("wrong", [31, -1])
def test_strange_tokens_are_refused_at_once(model, wrong):
    with pytest.raises(ShoalError, match=rf"token id {wrong} of the prompt is not in the model's vocabulary of 31"):
        generate(model, torch.tensor([[1, wrong]]), max_new_tokens=3, decoding=GREEDY)


def test_broken_weights_are_named(make_gpt):
    model = make_gpt()
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    with pytest.raises(ShoalError, match=r"not finite.*earlier checkpoint"):
        list(generate(model, prompt(), max_new_tokens=3, decoding=GREEDY))


def test_only_language_models_write():
    with pytest.raises(ShoalError, match=r"Mlp does not write text.*model.kind"):
        generate(Mlp(4, (), 2), prompt(), max_new_tokens=3, decoding=GREEDY)


def test_a_reward_model_says_that_it_does_not_write(make_gpt):
    with pytest.raises(ShoalError, match=r"a reward model scores answers.*the run of a policy"):
        generate(ScoreModel(make_gpt()), prompt(), max_new_tokens=3, decoding=GREEDY)
