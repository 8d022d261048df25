"""Learning from one's own answers: every formula against its definition, in float64 where numbers are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal import data
from shoal.config.load import resolve_data
from shoal.config.schema import model as schema
from shoal.config.schema.rlhf import ExactReward as Exact
from shoal.config.schema.rlhf import JudgeReward, Kl, Ppo, Rlhf, SumReward, WeightedReward
from shoal.config.schema.rlhf import SentimentReward as Sentiment
from shoal.data import load_tokenizer
from shoal.engines import SingleEngine
from shoal.errors import ShoalError
from shoal.models.generation.batch_sampling import sample
from shoal.models.generation.decoding import group_draws
from shoal.models.gpt import Gpt
from shoal.models.kernels.cpu_packing import packed_for
from shoal.models.layers.embedding import TokenEmbedding
from shoal.models.layers.value_head import ScoreModel, add_value_head
from shoal.runs.rlhf.rewards.interface import Answer
from shoal.runs.rlhf.rollouts import RolloutFeed, RolloutPrompt, prompts_of
from shoal.runs.training.train_alone import prepare
from shoal.tasks import advantages
from shoal.tasks.answer_logprobs import PromptAnswers, as_text, as_used, given_to, log_probs
from shoal.tasks.chunked_logprobs import ChunkedLogProbs, in_pieces
from shoal.tasks.policy_gradient import OnlineDpo, PolicyGradient

SIZES: dict[str, Any] = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 24}
RUN = resolve_data({"model": {"kind": "gpt"}, "rlhf": {}}, name="test", dialect="shoal", environ={}).run


def gpt(**more: Any) -> Gpt:
    torch.manual_seed(0)
    return Gpt(schema.Gpt(**SIZES | more), 257)


def real(lengths: list[int], width: int) -> Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


# --- credit -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "decay"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.99, 0.0)])
def test_advantages_are_the_sum_of_their_definition(gamma: float, decay: float) -> None:
    torch.manual_seed(0)
    rewards, values, there = torch.randn(3, 6).double(), torch.randn(3, 6).double(), real([6, 4, 1], 6)
    found = advantages.gae(rewards, values, there, gamma, decay)
    for row, length in enumerate([6, 4, 1]):
        for t in range(6):
            total = 0.0
            for k in range(t, length):
                following = float(values[row, k + 1]) if k + 1 < length else 0.0
                total += (gamma * decay) ** (k - t) * (float(rewards[row, k]) + gamma * following - float(values[row, k]))
            assert float(found[row, t]) == pytest.approx(total if t < length else 0.0, abs=1e-12)
            if decay == 1.0 and gamma == 1.0 and t < length:
                assert float(found[row, t]) == pytest.approx(float(rewards[row, t:length].sum() - values[row, t]), abs=1e-12)


def test_the_rewards_of_an_answer_add_up_to_its_score_less_the_penalty() -> None:
    torch.manual_seed(0)
    scores, difference, there = torch.randn(3).double(), torch.randn(3, 5).double(), real([5, 3, 1], 5)
    rewards = advantages.token_rewards(scores, advantages.kl_penalty(difference, "kl"), 0.3, there)
    for row, length in enumerate([5, 3, 1]):
        assert float(rewards[row].sum()) == pytest.approx(float(scores[row] - 0.3 * difference[row, :length].sum()), abs=1e-12)
        assert not rewards[row, length:].any()
        assert float(rewards[row, length - 1]) == pytest.approx(float(scores[row] - 0.3 * difference[row, length - 1]), abs=1e-12)
    assert torch.equal(advantages.kl_penalty(difference, "abs"), difference.abs())
    assert torch.equal(advantages.kl_penalty(difference, "mse"), 0.5 * difference**2)


def test_answers_are_compared_with_the_others_to_the_same_prompt() -> None:
    totals = torch.tensor([1.0, 2.0, 6.0, 3.0, 3.0, 3.0]).double()
    assert torch.allclose(advantages.leave_one_out(totals, 3), torch.tensor([1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 0]).double())
    grouped = advantages.group_relative(totals, 3)
    assert torch.allclose(grouped[:3], (totals[:3] - 3) / totals[:3].std())
    assert not grouped[3:].any(), "a group without a difference teaches nothing"


def test_whitening_looks_at_real_tokens_only() -> None:
    torch.manual_seed(0)
    values, there = torch.randn(3, 5).double(), real([5, 2, 3], 5)
    changed = torch.where(there, values, 1e6)
    white = advantages.whiten(values, there)
    assert torch.equal(white, advantages.whiten(changed, there))
    assert float(white[there].mean()) == pytest.approx(0, abs=1e-9)
    assert float(white[there].var(correction=0)) == pytest.approx(1, abs=1e-6)
    assert float(advantages.whiten(values, there, shift=False)[there].mean()) == pytest.approx(float(values[there].mean()))
    assert torch.equal(advantages.gae(values, values, there, 0.9, 0.9), advantages.gae(changed, changed, there, 0.9, 0.9))


def test_the_coefficient_follows_its_closed_form() -> None:
    for kl, error in ((6.3, 0.05), (60.0, 0.2), (0.1, -0.2), (6.0, 0.0)):
        assert advantages.adapted(0.2, kl, 6.0, 64, 10_000) == pytest.approx(0.2 * (1 + error * 64 / 10_000), rel=1e-12)


def test_the_spread_of_all_numbers_so_far_is_their_standard_deviation() -> None:
    torch.manual_seed(0)
    numbers, spread = torch.randn(30).double() * 3 + 5, advantages.RunningDeviation()
    assert spread.deviation == 1.0
    for some in numbers.split([7, 1, 22]):
        spread.add(some)
    assert spread.deviation == pytest.approx(float(numbers.std(correction=0)), rel=1e-12)


# --- answers ------------------------------------------------------------------------------------------------------------


def answers(model: Gpt, temperature: float = 1.0, prompts: Any = ([5, 6, 7, 8], [9], [3, 4])) -> Any:
    draws = group_draws(3, 0, prompts, 1)
    return sample(model, prompts, max_new_tokens=7, temperature=temperature, draws=draws, eos_id=256, pad_id=256)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_generation_and_scoring_agree_with_and_without_padding(positions: Any, temperature: float) -> None:
    model = gpt(positions=positions, dropout=0.3)
    drawn = answers(model, temperature)
    assert model.training, "the model is given back as it was"
    text = as_text(*drawn[:4])
    with as_used(model), torch.no_grad():
        scored = log_probs(model, text, temperature)[:, -7:]
        assert torch.allclose(scored, drawn.log_probs_BT, atol=1e-4)
        for row, prompt in enumerate(([5, 6, 7, 8], [9], [3, 4])):
            answer = drawn.answer_BT[row][drawn.real_BT[row]]
            whole = torch.cat([torch.tensor(prompt), answer])[None]
            alone = (model(whole[:, :-1])[0] / temperature).log_softmax(-1)[len(prompt) - 1 :].gather(1, answer[:, None])[:, 0]
            assert torch.allclose(alone, drawn.log_probs_BT[row][drawn.real_BT[row]], atol=1e-4)


def test_values_of_a_head_are_those_of_a_pass_over_the_answers() -> None:
    model = gpt(dropout=0.3)
    assert answers(model).values_BT is None, "nobody predicts anything"
    task = PolicyGradient({"model": model} | add_value_head(model, "head"), Rlhf())
    torch.nn.init.normal_(model.value_head.weight)
    drawn = answers(model)
    with as_used(model), torch.no_grad():
        expected_BT = task.values(as_text(*drawn[:4]), 7)
    assert expected_BT is not None
    assert drawn.values_BT is not None
    assert torch.allclose(drawn.values_BT, expected_BT * drawn.real_BT, atol=1e-4)


@pytest.mark.parametrize("place", ["head", "network"])
def test_values_are_in_32_bits_also_where_an_engine_computes_in_16(place: Any) -> None:
    """FSDP and DeepSpeed hold weights of 16 bits. The variance of advantages can round to 0 in them."""
    model = gpt()
    players = {"model": model} | add_value_head(model, place)
    task = PolicyGradient(players, Rlhf())
    drawn = answers(model)
    for player in players.values():
        player.half()
    with torch.no_grad():
        values_BT = task.values(as_text(*drawn[:4]), 7)
    assert values_BT is not None
    assert values_BT.dtype == torch.float32


def packed_in(model: Gpt) -> int:
    return sum("forward" in vars(module) for module in model.modules())


def test_matrices_packed_for_generation_give_the_same_and_learn_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.models.kernels.cpu_packing.platform.machine", lambda: "aarch64")
    model = gpt(hidden_size=320, num_heads=4)
    ids_BL = torch.arange(12).view(3, 4)
    with torch.no_grad():
        plain = model(ids_BL)
        with packed_for(model, 3):
            assert packed_in(model) > 0
            assert torch.allclose(model(ids_BL), plain, atol=1e-5)
    assert packed_in(model) == 0
    model(ids_BL).sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters())


def test_no_second_copy_is_made_of_a_model_that_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.models.kernels.cpu_packing.platform.machine", lambda: "aarch64")
    monkeypatch.setattr("shoal.models.kernels.cpu_packing._MOST_NUMBERS", 1_000_000)
    model = gpt(hidden_size=320, num_heads=4)
    with packed_for(model, 3):
        assert packed_in(model) == 0


def test_an_answer_ends_with_the_token_that_ends_it() -> None:
    model, draws = Gpt(schema.Gpt(**SIZES), 5), group_draws(3, 0, [[1], [2], [3]], 2)
    drawn = sample(model, [[1], [1], [2], [2], [3], [3]], max_new_tokens=7, temperature=1.0, draws=draws, eos_id=4, pad_id=0)
    assert drawn.stopped_B.any()
    for row in range(6):
        there = drawn.answer_BT[row][drawn.real_BT[row]].tolist()
        assert (there[-1] == 4) == bool(drawn.stopped_B[row])
        assert 4 not in there[:-1]
        assert not drawn.log_probs_BT[row][~drawn.real_BT[row]].any()


def test_prompts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShoalError, match=r"rlhf\.ppo\.response_length"):
        answers(gpt(), prompts=[list(range(20))])
    with pytest.raises(ShoalError, match="a prompt is empty"):
        answers(gpt(), prompts=[[1], []])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("batching", ["packed", "dynamic"])
def test_prompts_are_the_first_tokens_of_texts_in_memory_or_of_a_stream(streaming: bool, batching: str, tmp_path: Path) -> None:
    texts = [f"{number:03} is the number of this text" for number in range(60)]
    for text in texts:
        (tmp_path / f"{text[:3]}.txt").write_text(text)
    source = {"kind": "text", "path": str(tmp_path)}
    settings = {
        "model": {"kind": "gpt"},
        "task": {"kind": "ppo"},
        "data": {"source": source, "tokenizer": "bytes", "streaming": streaming, "batching": batching, "sequence_length": 32},
        "rlhf": {"ppo": {"prompt_length": 5, "steps": 2, "rollout_size": 8, "mini_batch_size": 8}},
    }
    run = resolve_data(settings, name="test", dialect="shoal", environ={}).run
    prompts, held_out = prompts_of(run, data.load(run))
    assert prompts == prompts_of(run, data.load(run))[0]
    assert all(len(prompt.ids) == 5 for prompt in prompts)
    assert held_out
    if batching == "dynamic":
        assert {prompt.text for prompt in [*prompts, *held_out]} <= {text[:5] for text in texts}
        assert not {prompt.text for prompt in prompts} & {prompt.text for prompt in held_out}
    assert len(prompts) == 16 or not streaming


# --- losses -------------------------------------------------------------------------------------------------------------


def task_and_batch(algorithm: Any = "ppo", value: Any = "network", score: Any = None, **more: Any) -> tuple[RolloutFeed, dict[str, Tensor]]:
    model = gpt(dropout=0.3)
    players: dict[str, Any] = {"model": model}
    if algorithm == "ppo":
        players |= add_value_head(model, value)
    ppo = Ppo(rollout_size=8, mini_batch_size=4, epochs=2, response_length=6, prompt_length=4, **more)
    settings = Rlhf(algorithm=algorithm, value=value, group_size=4, ppo=ppo, kl=Kl(coefficient=0.0, adaptive=False))
    run = RUN.replace(rlhf=settings)
    prompts = [RolloutPrompt([65 + i] * (1 + i % 3), "A") for i in range(5)]
    feed = RolloutFeed(
        run,
        OnlineDpo(players, settings) if algorithm == "online-dpo" else PolicyGradient(players, settings),
        load_tokenizer("bytes"),
        prompts,
        prompts,
        score or (lambda some: [float(i) for i in range(len(some))]),
    )
    next(feed)
    assert feed.buffer is not None
    return feed, feed.buffer


@pytest.mark.parametrize("value", ["network", "head"])
def test_the_first_mini_batch_has_a_ratio_of_one_and_no_kl(value: str) -> None:
    feed, batch = task_and_batch(value=value)
    losses = list(feed.task.losses(batch))
    assert [loss.player for loss in losses] == (["model", "value"] if value == "network" else ["model"])
    metrics = losses[0].metrics
    assert float(metrics["approximate_kl"]) == pytest.approx(0, abs=1e-8)
    assert float(metrics["clip_share"]) == 0
    counted = PromptAnswers.of(batch).counted_BL[:, -6:]
    assert float(metrics["policy_loss"].detach()) == pytest.approx(-float(batch["advantages"][counted].mean()), abs=1e-5)
    assert feed.figures["kl"] == pytest.approx(0, abs=1e-4), "the policy is its own reference"
    errors = (batch["values"] - batch["returns"])[counted]
    assert float(losses[-1].metrics["value_loss"].detach()) == pytest.approx(0.5 * float(errors.square().mean()), rel=1e-4)


def slopes(task: PolicyGradient, batch: dict[str, Tensor], share: float = 1.0) -> list[Tensor]:
    found = []
    for loss in task.losses(batch):
        parameters = [parameter for parameter in task.players[loss.player].parameters() if parameter.requires_grad]
        found += [slope * share for slope in torch.autograd.grad(loss.value, parameters)]
    return found


def test_one_batch_and_four_pieces_have_the_same_gradient_and_padding_none() -> None:
    feed, batch = task_and_batch()
    task = feed.task
    for player in task.players.values():
        player.double()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    whole, total = slopes(task, batch), task.count(batch)
    pieces = [{name: value[i : i + 2] for name, value in batch.items()} for i in range(0, 8, 2)]
    parts = [slopes(task, piece, task.count(piece) / total) for piece in pieces]
    for own, several in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.allclose(own, sum(several), rtol=1e-9, atol=1e-12)
    outside = ~PromptAnswers.of(batch).mask_BL
    junk = {name: value.clone() for name, value in batch.items()}
    junk["input_ids"][outside] = 7
    after = ~PromptAnswers.of(batch).counted_BL[:, -6:]
    for name in ("log_probs", "advantages", "values", "returns"):
        junk[name][after] = 100.0
    for own, other in zip(whole, slopes(task, junk), strict=True):
        assert torch.allclose(own, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("value", "bonus", "more"), [("network", 0.3, 0), ("head", 0.3, 7), ("head", 0.0, 7)])
def test_gradients_that_are_formed_in_pieces_are_those_of_whole_logits(
    value: str, bonus: float, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, at another temperature, with a bonus for entropy and without, three tokens at a time, two of them in a processor's cache,
    with so many `more` rows in the output matrix, as a GPU wants them; a task that is not shown the matrix makes all logits at once."""
    feed, batch = task_and_batch(value=value, temperature=0.7, entropy_weight=bonus)
    task, model = feed.task, feed.task.players["model"].double()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    batch["log_probs"] = batch["log_probs"] + 0.3 * torch.sin(torch.arange(batch["log_probs"].numel())).view_as(batch["log_probs"])
    monkeypatch.setattr("shoal.tasks.chunked_logprobs._LOGITS_AT_ONCE", 3 * 257)
    monkeypatch.setattr("shoal.tasks.chunked_logprobs._CACHED", 2 * 264)
    monkeypatch.setattr("shoal.tasks.chunked_logprobs._rows_missing", lambda weight_VD: more)
    (loss, *_) = task.losses(batch)
    parameters = [one for name, one in model.named_parameters() if name != "value_head.weight"]
    policy_alone = loss.value - task.ppo.value_weight * loss.metrics.get("value_loss", 0.0)
    found = torch.autograd.grad(policy_alone, parameters)

    def unseen(ids_BL: Tensor, **given: Any) -> Tensor:
        logits_BLV: Tensor = model(ids_BL, **given)
        return logits_BLV

    other = PolicyGradient({"model": unseen}, task.settings)  # type: ignore[dict-item]
    text = PromptAnswers.of(batch)
    with as_used(model):
        plain, metrics, _ = other._policy(batch, text, given_to(model, text), text.counted_BL[:, -6:])
    for name in ("policy_loss", "entropy", "clip_share", "approximate_kl"):
        assert float(loss.metrics[name].detach()) == pytest.approx(float(metrics[name].detach()), abs=1e-12)
    for one, there in zip(found, torch.autograd.grad(plain, parameters), strict=True):
        assert torch.allclose(one, there, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("precision", "kind"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
def test_slopes_are_multiplied_in_the_precision_of_the_run_but_not_in_float16(precision: torch.dtype, kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_ND, weight_VD = (torch.randn(rows, 16, generator=generator) for rows in (5, 257))
    labels_N = torch.arange(5)

    def slopes() -> ChunkedLogProbs:
        return in_pieces(hidden_ND, weight_VD.requires_grad_(), labels_N, 1.0, lambda some, log_probs_n, _: (log_probs_n.exp(), 0.1))

    exact = slopes()
    with torch.autocast("cpu", dtype=precision):
        found = slopes()
    assert found.hidden_slope_ND.dtype == kind
    assert found.weight_slope_VD is not None
    assert exact.weight_slope_VD is not None
    for one, other in ((found.hidden_slope_ND, exact.hidden_slope_ND), (found.weight_slope_VD, exact.weight_slope_VD)):
        assert float((one - other).norm() / other.norm()) < 0.05


@pytest.mark.parametrize("value", ["network", "head"])
def test_a_matrix_with_two_uses_has_the_gradient_of_both_to_the_bit(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, batch = task_and_batch(value=value)
    model, text = feed.task.players["model"], PromptAnswers.of(batch)
    assert len(text.input_ids_BL.unique()) < text.input_ids_BL.numel(), "some token is there twice"
    given = given_to(model, text)
    model.hidden(text.input_ids_BL, **given)  # type: ignore[operator]
    assert given["beside"].output_weight is not None
    found = slopes(feed.task, batch)
    monkeypatch.setattr(TokenEmbedding, "can_lend", False)
    for one, plain in zip(found, slopes(feed.task, batch), strict=True):
        assert torch.equal(one, plain)


def test_the_output_matrix_has_its_gradient_whatever_the_number_of_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for taken in (True, False):
        if not taken:
            monkeypatch.setattr("shoal.tasks.policy_gradient.gradient_buffer_of", lambda parameter: None)
        feed, batch = task_and_batch(value="head")
        engine = SingleEngine(RUN, feed.task, torch.device("cpu"), 10)
        network, matrix = engine.networks["model"], feed.task.players["model"].output_weight
        assert isinstance(matrix, Tensor)
        engine._begin_step()
        next(feed.task.losses(batch)).value.backward()  # type: ignore[no-untyped-call]
        assert matrix.grad is not None
        assert matrix.grad.data_ptr() == network.gradient.data_ptr(), "the matrix is the first parameter"
        places = [slope.data_ptr() for slope in network.slopes]
        assert [one.grad.data_ptr() for one in network.parameters if one.grad is not None] == places, "no copy of a gradient is kept"
        parts = [{name: value[i : i + 4] for name, value in batch.items()} for i in (0, 4)]
        for batches in ([batch], parts, [batch], parts):
            engine.step(batches)
            found.append((taken, engine.gradient.clone(), engine.vector.clone()))
    for (_, *with_room), (_, *without) in zip(found[:4], found[4:], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(with_room, without, strict=True))
    assert found[0][1].any()


def test_looked_up_rows_are_added_to_the_gradient_of_the_shared_matrix() -> None:
    embedding, ids = TokenEmbedding(5, 2), torch.tensor([[1, 3, 1]])
    rows_slope, lent_slope = torch.ones(1, 3, 2), torch.full((5, 2), 10.0)
    rows, lent = embedding(ids, lends=True)
    (both,) = torch.autograd.grad([rows, lent], embedding.weight, [rows_slope, lent_slope])
    assert both.data_ptr() == lent_slope.data_ptr(), "no other matrix was made"
    assert both[:, 0].tolist() == [10, 12, 10, 11, 10]
    rows, lent = embedding(ids, lends=True)
    (of_rows,) = torch.autograd.grad(rows, embedding.weight, rows_slope)
    assert of_rows[:, 1].tolist() == [0, 2, 0, 1, 0]
    rows, lent = embedding(ids, lends=True)
    (of_lent,) = torch.autograd.grad(lent.sum(), embedding.weight)
    assert torch.equal(of_lent, torch.ones(5, 2))


def test_prompts_get_no_gradient_of_the_logits() -> None:
    feed, batch = task_and_batch("rloo")
    model: Any = feed.task.players["model"]
    seen: list[Tensor] = []
    inner = model.hidden

    def watched(*given: Any, **more: Any) -> Tensor:
        hidden: Tensor = inner(*given, **more)
        hidden.retain_grad()
        seen.append(hidden)
        return hidden

    model.hidden = watched
    (loss,) = feed.task.losses(batch)
    loss.value.backward()
    counted = PromptAnswers.of(batch).counted_BL
    assert seen[0].grad is not None
    assert not seen[0].grad[~counted].any(), "exactly 0 in prompts and padding"
    assert seen[0].grad[counted].any()


def test_equal_scores_teach_nothing_at_no_penalty() -> None:
    feed, batch = task_and_batch("grpo", score=lambda some: [1.0] * len(some))
    for slope in slopes(feed.task, batch):
        assert not slope.any()


def test_the_better_of_two_answers_is_learned_as_dpo_learns_pairs() -> None:
    scores = [3.0, 1.0, 0.0, 2.0, 1.0, 1.0, 5.0, 9.0]
    feed, pairs = task_and_batch("online-dpo", score=lambda some: scores[: len(some)], temperature=0.7)
    assert pairs["decided"].tolist() == [True, True, False, True], "of two that are equal nobody learns"
    assert feed.micro_batch == 2
    drawn = feed.answered([feed.prompt(number) for number in range(4)], 0, 2)
    better = [0, 3, 4, 7]
    assert torch.equal(pairs["chosen_labels"], drawn.text.labels_BL[better])
    assert torch.equal(pairs["rejected_input_ids"], drawn.text.input_ids_BL[[1, 2, 5, 6]])
    model = feed.task.players["model"]
    with as_used(model):
        (loss,) = feed.task.losses(pairs)
        gains = [
            log_probs(model, PromptAnswers.of(pairs, side), 0.7).sum(1) - pairs[f"{side}reference"] for side in ("chosen_", "rejected_")
        ]
    margin = 0.1 * (gains[0] - gains[1])[pairs["decided"]]
    assert float(loss.value.detach()) == pytest.approx(float(torch.log1p(torch.exp(-margin.double())).mean().detach()), abs=1e-6)
    assert float(margin.detach().abs().max()) < 1e-4, "the policy is its own reference"
    assert feed.task.count(pairs) == 3


def test_a_policy_that_moved_too_far_gets_new_answers() -> None:
    feed, _ = task_and_batch(stop_kl=0.1)
    feed.task.moved = [torch.tensor([0.5, 10.0]), torch.tensor([1.0, 5.0])]
    assert not feed.at_epoch_end, "that is 0.1 of each token, over all pieces of the mini-batch"
    next(feed)
    assert (feed.epoch, feed.position, feed.task.moved) == (0, 2, [])
    feed.task.moved = [torch.tensor([0.5, 10.0]), torch.tensor([1.1, 5.0])]
    assert feed.at_epoch_end
    next(feed)
    assert (feed.epoch, feed.position) == (1, 1)


def test_collapsing_answers_are_told() -> None:
    feed, _ = task_and_batch()
    told: list[str] = []
    feed.warn = told.append
    feed.first = {"score": -5.0, "answer_length": 100.0, "distinct_share": 0.1}
    feed.position = feed.most_batches
    next(feed)
    assert told
    assert "answers collapse" in told[0]


# --- rewards ------------------------------------------------------------------------------------------------------------


def test_rewards_are_functions_of_answers() -> None:
    pytest.importorskip("vaderSentiment")
    some = [Answer("2+2=", " 4\nand so on", "4"), Answer("2+2=", "I love happy days", "4")]
    exact, sentiment = (kind.builder()(kind, RUN) for kind in (Exact(), Sentiment()))
    assert exact(some) == [1.0, 0.0]
    assert sentiment(some)[1] > 0.8 > abs(sentiment(some)[0])
    total = SumReward(parts=(WeightedReward(reward=Exact(), weight=2.0), WeightedReward(reward=Sentiment(), weight=-1.0)))
    assert total.builder()(total, RUN)(some) == pytest.approx([2.0, -sentiment(some)[1]])
    with pytest.raises(ShoalError, match="needs the right answers"):
        exact([Answer("2+2=", "4")])


def test_a_judge_is_asked_and_says_how_probable_yes_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, bytes_ = Gpt(schema.Gpt(**SIZES | {"max_seq_len": 64}), 257), load_tokenizer("bytes")
    monkeypatch.setattr("shoal.runs.rlhf.rewards.judge._judge", lambda settings, run: (model, bytes_))
    judge = JudgeReward(model="somewhere", question="{prompt}{answer} {good}?")
    found = judge.builder()(judge, RUN)([Answer("2+2=", "4"), Answer("a longer one", " {prompt}")])
    for asked, score in zip(("2+2=4 {good}?", "a longer one {prompt} {good}?"), found, strict=True):
        gains = []
        for word in (" yes", " no"):
            ids = torch.tensor([bytes_.encode(asked + word)])
            log_p = model(ids[:, :-1])[0].log_softmax(-1)[-len(word) :]
            gains.append(log_p.gather(1, ids[0, -len(word) :, None]).sum())
        assert score == pytest.approx(float(torch.sigmoid(gains[0] - gains[1]).detach()), abs=1e-5)


# --- whole runs ---------------------------------------------------------------------------------------------------------


def settings(tmp_path: Path, **rlhf: Any) -> Any:
    rows = [{"prompt": f"{i}", "answer": "!"} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ppo = {"rollout_size": 16, "mini_batch_size": 8, "epochs": 2, "steps": 4, "prompt_length": 4, "response_length": 3}
    tree = {
        "model": {"kind": "gpt", **SIZES},
        "training": {"epochs": 1, "device": "cpu", "gradient_accumulation_steps": 2, "optimizer": {"learning_rate": 0.003}},
        "checkpoint": {"every_steps": 3},
        "data": {"max_samples": 50},
        "rlhf": {"reward": "exact", "prompts": str(tmp_path / "prompts.jsonl"), "ppo": ppo} | rlhf,
        "output_dir": str(tmp_path),
    }
    return resolve_data(tree, name="test", dialect="shoal", environ={})


@pytest.mark.whole
@pytest.mark.parametrize(
    "more",
    [{}, {"value": "head"}, pytest.param({"algorithm": "grpo"}, marks=pytest.mark.long), {"algorithm": "online-dpo"}],
    ids=["network", "head", "grpo", "online-dpo"],
)
def test_a_policy_resumes_in_the_middle_of_a_rollout_to_the_same_numbers(tmp_path: Path, more: dict[str, Any]) -> None:
    whole = prepare(settings(tmp_path, **more), run_dir=str(tmp_path / "whole"), resume=False, reporters=[])
    summary = whole.train()
    assert (summary["status"], summary["steps"]) == ("completed", 16)
    assert {"score", "kl", "answer_length", "stopped_share"} <= set(summary["metrics"]["eval"])
    own = {"margin", "accuracy"} if more.get("algorithm") == "online-dpo" else {"entropy", "clip_share", "approximate_kl"}
    assert {"score", "kl_coefficient"} | own <= set(summary["metrics"]["train"])
    half = prepare(settings(tmp_path, **more), run_dir=str(tmp_path / "half"), resume=False, reporters=[])
    step = half.engine.step

    def until_six(batches: Any) -> Any:
        half.interrupt() if half.step == 5 else None
        return step(batches)

    half.engine.step = until_six  # type: ignore[method-assign]
    half.train()
    assert half.step == 6
    again = prepare(settings(tmp_path, **more), run_dir=str(tmp_path / "half"), resume=True, reporters=[])
    again.train()
    for name, value in whole.engine.weights().items():
        assert torch.equal(value, again.engine.weights()[name]), name
    assert list((tmp_path / "whole" / "samples").glob("*.txt"))


def test_a_policy_learns_what_is_rewarded() -> None:
    """Answers come to be made of ASCII; half of all bytes are none. GRPO, since a value would have to be learned first."""
    feed, _ = task_and_batch("grpo", score=lambda some: [sum(letter < "\x80" for letter in one.text) / 6 for one in some])
    optimizer = torch.optim.Adam(feed.task.players["model"].parameters(), 0.01)
    first = feed.figures["score"]
    for _ in range(90):
        (loss,) = feed.task.losses(next(feed))
        optimizer.zero_grad()
        loss.value.backward()
        optimizer.step()
    assert feed.figures["score"] > first + 0.3


def test_a_separate_value_network_has_a_trunk_that_is_no_part_of_the_policy() -> None:
    model = gpt()
    value = add_value_head(model, "network")["value"]
    assert isinstance(value, ScoreModel)
    assert not {id(parameter) for parameter in value.parameters()} & {id(parameter) for parameter in model.parameters()}
