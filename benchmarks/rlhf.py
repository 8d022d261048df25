"""Does feedback teach? Means over the last 5 updates, two seeds each. Needs ../shared/data for the stories.

stories      stories260K is to tell happier stories: sentiment from about 0.3 to 0.7 in 30 updates of 64 answers (PPO, RLOO, GRPO)
arithmetic   a small GPT that adds digits right one time in three is to do so nine times in ten (the reward `exact`)

How sentimental the first answers are depends on the prompts: half of them begin a tale ("Once upon a time, there was a boy": 0.45), half
are in the middle of one ("One day, a boy": 0.12). The base of the sums has learned from a text in which two of three sums are wrong: it
knows what is right, and does not say it more often than the text did. It must have read each sum often enough for that, in rows of their
own and in no order: what it never says cannot be rewarded.

`BENCH=rlhf:sums`, or `rlhf:ppo`, `rlhf:rloo`, `rlhf:grpo`, measures a part. `rlhf-15m` does the first with stories15M, and `rlhf-pairs`
has the tasks that learn from pairs.
"""

from __future__ import annotations

import gzip
import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from run import Row

from shoal.cli.main import main
from shoal.config.load import resolve_data
from shoal.engines import SingleEngine
from shoal.runs.rlhf.rollouts import RolloutFeed, RolloutPrompt
from shoal.tasks.policy_gradient import PolicyGradient

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
SEEDS = (0, 1)
UPDATES, LAST = 30, 5
ABOUT = ("boy", "girl", "dog", "cat", "bird", "bear", "king", "queen", "baby", "rabbit", "frog", "duck", "tree", "fish", "mouse", "man")


class StoryTokenizer:
    """The pieces of a stories model, as llama2.c joins them."""

    eos_id, pad_id = 1, 0

    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            self.pieces = json.load(file)
        self.known = {piece: (number, score) for number, (piece, score) in reversed(list(enumerate(self.pieces)))}

    def encode(self, text: str) -> list[int]:
        parts = list(" " + text)
        while True:
            joined = [(self.known.get(a + b, (0, -1e9))[1], at) for at, (a, b) in enumerate(pairwise(parts))]
            score, at = max(joined, default=(-1e9, 0), key=lambda one: one[0])
            if score <= -1e9:
                return [1, *(self.known[part][0] for part in parts)]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[number][0] for number in ids if number > 2).replace("<0x0A>", "\n")


def storyteller(
    algorithm: str,
    seed: int,
    model_name: str = "stories260K",
    value: str = "network",
    rate: float = 0.0005,
    schedule: str = "constant",
    kl: float = 0.05,
    **more: int,
) -> RolloutFeed:
    """A feed of a story model's answers, with an `engine` that learns from them. `more`: settings of rlhf.ppo."""
    from story_models import load_story_model

    ppo = {"rollout_size": 64, "mini_batch_size": 16, "epochs": 4, "steps": UPDATES, "response_length": 24, "prompt_length": 32} | more
    optimizer = {"learning_rate": rate, "weight_decay": 0.0}
    tree: dict[str, Any] = {
        "model": {"kind": "gpt"},
        "seed": seed,
        "training": {
            "device": "cpu",
            "epochs": 1,
            "clipping": {"max_norm": 1.0},
            "optimizer": optimizer,
            "schedule": {"kind": schedule},
        },
        "rlhf": {"algorithm": algorithm, "value": value, "reward": "sentiment", "ppo": ppo, "kl": {"coefficient": kl, "adaptive": False}},
    }
    run = resolve_data(tree, name="bench", dialect="shoal", environ={}).run
    assert run.rlhf is not None
    from shoal.models.layers.value_head import add_value_head

    torch.manual_seed(seed)
    model = load_story_model(DATA / "lm", model_name)[0].requires_grad_(True)
    players = {"model": model} | (add_value_head(model, value) if algorithm == "ppo" else {})
    task, tokenizer = PolicyGradient(players, run.rlhf), StoryTokenizer(DATA / "lm" / f"{model_name}.vocab.json.gz")
    steps = ppo["steps"] * ppo["epochs"] * ppo["rollout_size"] // ppo["mini_batch_size"]
    engine = SingleEngine(run, task, torch.device("cpu"), steps)
    begun = (f"{beginning} a {one}" for one in ABOUT for beginning in ("Once upon a time, there was", "One day,"))
    prompts = [RolloutPrompt(tokenizer.encode(text), text) for text in begun]
    made: Any = tokenizer
    feed = RolloutFeed(run, task, made, prompts, prompts, run.rlhf.reward.builder()(run.rlhf.reward, run), engine)
    feed.engine, feed.run = engine, run  # type: ignore[attr-defined]
    return feed


def told(algorithm: str, seed: int, **more: Any) -> tuple[list[float], list[float]]:
    """The mean score of each update's answers, and their distance from the reference."""
    feed: Any = storyteller(algorithm, seed, **more)
    scores, distances = [], []
    while feed.epoch < feed.epochs - 1 or not feed.at_epoch_end:
        fresh = feed.buffer is None or feed.at_epoch_end
        feed.engine.step([next(feed)])
        if fresh:
            scores.append(feed.figures["score"])
            distances.append(feed.figures["kl"])
    return scores, distances


def row(name: str, found: list[tuple[list[float], list[float]]], target: str) -> Row:
    """The score of the last updates beside that of the first answers, which are of the model as it was."""
    first = statistics.mean(scores[0] for scores, _ in found)
    last = [statistics.mean(scores[-LAST:]) for scores, _ in found]
    distances = [statistics.mean(distances[-LAST:]) for _, distances in found]
    note = f"seeds {', '.join(f'{one:.2f}' for one in last)}; KL {', '.join(f'{one:.1f}' for one in distances)} nats an answer"
    return Row(name, statistics.mean(last), first, "score", statistics.mean(last) / first, target, note)


KL = {"ppo": 0.05, "rloo": 0.05, "grpo": 0.05}
"""Coefficients with which the three end at about the same distance from the reference."""


def stories(algorithm: str) -> Row:
    found = [told(algorithm, seed, kl=KL[algorithm]) for seed in SEEDS]
    return row(f"stories260K, sentiment, {algorithm}", found, ">= 0.70")


BASE = """\
dialect: shoal
seed: SEED
model: {kind: gpt, hidden_size: 64, num_layers: 2, num_heads: 4, max_seq_len: 16, positions: rotary}
data: {source: {kind: preferences, path: sums.jsonl}, tokenizer: bytes, batching: dynamic}
task: language-modelling
training: {batch_size: 100, max_steps: 1500, device: cpu, optimizer: {learning_rate: 0.003}, schedule: {kind: cosine}}
evaluation: {strategy: never}
"""
LEARNING = "training: {device: cpu, optimizer: {learning_rate: 0.0007}, schedule: {kind: cosine}, clipping: {max_norm: 1.0}}"
"""A learning rate that is not lowered, or mini-batches of 100, let the policy fall back again and again: 0.6, 0.3, 0.5, 0.1."""
POLICY = """\
rlhf:
  policy: base
  reward: exact
  prompts: prompts.jsonl
  algorithm: grpo
  group_size: 8
  kl: {coefficient: 0.0, adaptive: false}
  ppo: {rollout_size: 400, mini_batch_size: 200, epochs: 2, steps: 100, prompt_length: 8, response_length: 4}
"""


def wrong(right: int, number: int) -> int:
    """A sum that is a little wrong, one of three."""
    return max(0, right + number * (1 if (right + number) % 2 else -1))


def arithmetic(seed: int) -> tuple[float, float]:
    """The share of right sums before and after, in the answers of updates."""
    sums = [(f"{a}+{b}=", a + b) for a in range(10) for b in range(10)]
    read = [(asked, right if copy < 7 else wrong(right, 1 + copy % 3)) for asked, right in sums for copy in range(20)]
    random.Random(seed).shuffle(read)
    Path("sums.jsonl").write_text("".join(json.dumps({"prompt": p, "chosen": f"{s}\n", "rejected": "?\n"}) + "\n" for p, s in read))
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": str(s)}) + "\n" for p, s in sums))
    base = BASE.replace("SEED", str(seed))
    Path("base.yaml").write_text(base)
    kept = "".join(line + "\n" for line in base.splitlines() if not line.startswith(("task", "training")))
    Path("policy.yaml").write_text(f"{kept}{LEARNING}\n{POLICY}")
    assert main(["train", "base.yaml", "--run-dir", "base"]) == 0
    assert main(["train", "policy.yaml", "--run-dir", f"policy-{seed}", "--set", "logging.every_steps=4"]) == 0
    lines = [json.loads(line) for line in Path(f"policy-{seed}/policy/metrics.jsonl").read_text().splitlines()]
    scores = [line["score"] for line in lines if line["split"] == "train"]
    return scores[0], statistics.mean(scores[-LAST:])


def sums() -> Iterator[Row]:
    found = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            found.append(arithmetic(seed))
    before, after = (statistics.mean(one[place] for one in found) for place in (0, 1))
    yield Row("arithmetic, exact, grpo", after, before, "share right", after / before, "<= 0.4 before, >= 0.9 after", str(found))


def measure(part: str = "") -> Iterator[Row]:
    torch.set_num_threads(1)
    for algorithm in KL:
        if part in ("", algorithm):
            yield stories(algorithm)
    if part in ("", "sums"):
        yield from sums()
