"""Rewards of a user's own: what a function is given, and what becomes of scores that are none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import ShoalError
from shoal.runs.rlhf.rewards.function import score_with
from shoal.runs.rlhf.rewards.interface import Answer, checked

ANSWERS = [
    Answer("Two and two? ", "four", columns={"expected": "four", "weight": 2.0}, where="prompts.jsonl:1"),
    Answer("Three? ", "no", columns={"expected": "three", "weight": 0.5}, where="prompts.jsonl:2"),
]


def test_a_function_gets_prompt_answer_and_the_columns_that_it_takes() -> None:
    def weighted(prompt: str, answer: str, expected: str, weight: float = 1.0) -> float:
        return weight * (answer == expected)

    def every(prompt: str, answer: str, **columns: Any) -> Any:
        assert set(columns) == {"expected", "weight"}
        return torch.tensor(float(len(prompt)))

    assert score_with(weighted)(ANSWERS) == [2.0, 0.0]
    assert score_with(every)(ANSWERS) == [13.0, 7.0]
    assert score_with(lambda prompt, answer: len(answer))(ANSWERS) == [4, 2]


@pytest.mark.parametrize(("wrong", "told"), [(math.nan, "gave nan for"), (math.inf, "gave inf for"), ("good", "gave str in place of")])
def test_a_score_that_is_no_number_names_the_function_and_the_row(wrong: Any, told: str) -> None:
    def judge(prompt: str, answer: str) -> Any:
        return wrong if answer == "no" else 1.0

    with pytest.raises(ShoalError, match=told) as caught:
        checked(score_with(judge), "judge")(ANSWERS)
    assert "judge" in str(caught.value)
    assert "prompts.jsonl:2, the prompt 'Three? ' and the answer 'no'" in str(caught.value)


def test_a_column_that_a_row_lacks_is_named() -> None:
    def coloured(prompt: str, answer: str, expected: str, colour: str) -> float:
        return 0.0

    with pytest.raises(ShoalError, match=r"takes `colour`, and there is no such column for prompts\.jsonl:1"):
        score_with(coloured)(ANSWERS)


def test_a_wrong_number_of_scores_names_the_reward() -> None:
    def short(answers: Sequence[Answer]) -> list[float]:
        return [1.0]

    with pytest.raises(ShoalError, match="the reward `mine` gave 1 scores for 2 answers"):
        checked(short, "`mine`")(ANSWERS)


SETTINGS: dict[str, Any] = {
    "task": "ppo",
    "model": {"kind": "gpt", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 16},
    "data": {"source": {"kind": "text", "path": "text.txt"}, "tokenizer": "bytes", "sequence_length": 16},
    "training": {"device": "cpu"},
    "evaluation": {"strategy": "never"},
    "rlhf": {
        "algorithm": "rloo",
        "group_size": 2,
        "prompts": "prompts.jsonl",
        "ppo": {"rollout_size": 8, "mini_batch_size": 8, "epochs": 1, "steps": 1, "prompt_length": 8, "response_length": 4},
    },
}


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Trains the base, then a policy with a reward."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Thing {n}? ", "answer": str(n), "n": n}) + "\n" for n in range(12)))
    base = {name: value for name, value in SETTINGS.items() if name not in ("task", "rlhf")}
    shoal.train(base | {"training": {"device": "cpu", "max_steps": 1}}, run_dir="base", progress=False)
    tuned = SETTINGS | {"rlhf": SETTINGS["rlhf"] | {"policy": "base"}}
    return lambda reward, **more: shoal.train(tuned, reward=reward, run_dir="policy", progress=False, **more)


def test_a_program_passes_its_reward(policy: Callable[..., Any]) -> None:
    seen: list[tuple[str, str, int]] = []

    def reward(prompt: str, answer: str, expected: str, n: int) -> float:
        seen.append((prompt, expected, n))
        return float(n)

    result = policy(reward)
    assert result.status == "completed"
    assert len(seen) == 8
    assert all(prompt == f"Thing {n}? " and expected == str(n) for prompt, expected, n in seen)
    assert result.metrics["train"]["score"] == pytest.approx(sum(n for *_, n in seen) / 8)


def test_a_reward_is_named_in_the_settings(policy: Callable[..., Any]) -> None:
    Path("my_rewards.py").write_text("def broken(prompt, answer, n):\n    return float('nan') if n > 2 else 0.0\n")
    with pytest.raises(ShoalError, match=r"the reward my_rewards:broken gave nan for prompts.jsonl:\d+, the prompt 'Thing"):
        policy("my_rewards:broken")


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ShoalError, match="reward= takes a function"):
        shoal.train({}, reward=3)  # type: ignore[arg-type]
