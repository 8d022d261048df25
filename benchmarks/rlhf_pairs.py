"""Learning from pairs. DPO: of two stories that stories260K tells, the happier one was chosen; the margin of chosen over rejected ones is
to grow on pairs that were held out, and new stories are to stay fluent: the model of the beginning finds them at most 1.2 times as
perplexing as its own. Needs ../shared/data.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from rlhf import SEEDS, storyteller
from run import Row

from shoal.engines import SingleEngine
from shoal.tasks.dpo import Dpo

PAIRS, HELD_OUT, BATCH, PASSES, RATE, BETA = 256, 64, 16, 3, 5e-5, 0.1


def answers(feed: Any, first: int, prompts: int) -> Any:
    """Two answers to each of some prompts."""
    return feed.answered([feed.prompt(first + number) for number in range(prompts)], first, 2)


def perplexity(rollout: Any) -> float:
    """How perplexing the model of the beginning finds answers, per token."""
    known_BT = (rollout.drawn.log_probs_BT - rollout.difference_BT)[rollout.drawn.real_BT]
    return math.exp(-float(known_BT.mean()))


def preferred(seed: int) -> dict[str, float]:
    """Margin and share in the right order on held-out pairs, and the perplexity and score of answers before and after."""
    feed: Any = storyteller("online-dpo", seed, rollout_size=2 * PAIRS, mini_batch_size=2 * BATCH, steps=1)
    chosen, held_out = (feed._paired(answers(feed, first, count)) for first, count in ((0, PAIRS), (10**6, HELD_OUT)))
    before = answers(feed, 2 * 10**6, HELD_OUT)
    task = Dpo(feed.task.players, BETA)
    run = feed.run.replace(training=feed.run.training.replace(optimizer=feed.run.training.optimizer.replace(learning_rate=RATE)))
    engine = SingleEngine(run, task, torch.device("cpu"), PASSES * PAIRS // BATCH)
    rows = [row for row in range(PAIRS) if chosen["decided"][row]]
    for number in range(PASSES):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed * 100 + number))
        for some in order.split(BATCH):
            engine.step([{name: value[[rows[one] for one in some.tolist()]] for name, value in chosen.items()}])
    after = answers(feed, 2 * 10**6, HELD_OUT)
    judged = engine.evaluate(iter([held_out]))
    scores = [float(one.scores_B.mean()) for one in (before, after)]
    return judged | {"perplexity": perplexity(after) / perplexity(before), "before": scores[0], "after": scores[1]}


def measure() -> Iterator[Row]:
    torch.set_num_threads(1)
    found = [preferred(seed) for seed in SEEDS]
    mean = {name: statistics.mean(one[name] for one in found) for name in found[0]}
    note = f"{mean['accuracy']:.2f} in the right order; sentiment {mean['before']:.2f} → {mean['after']:.2f}"
    yield Row("DPO, margin on held-out pairs", mean["margin"], 0.0, "β nats", math.inf, "> 0", note)
    yield Row("DPO, reference perplexity of new stories", mean["perplexity"], 1.0, "×", mean["perplexity"], "<= 1.2")
