"""stories15M is to tell happier stories: sentiment from about 0.3 to 0.7, at most 10 nats an answer from where it began.

A model of 15 million parameters on a CPU: RLOO, which needs no value network, and one pass over the answers of each update. Steps are
small: with a learning rate of 1e-4 the first two already carry the model 6 nats away, in directions that no reward asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from rlhf import SEEDS, row, told
from run import Row

SETTINGS = {"rollout_size": 64, "mini_batch_size": 32, "epochs": 1, "steps": 30, "response_length": 20, "prompt_length": 16}


def measure() -> Iterator[Row]:
    torch.set_num_threads(1)
    found = [told("rloo", seed, model_name="stories15M", rate=2e-5, schedule="cosine", kl=0.05, **SETTINGS) for seed in SEEDS]
    yield row("stories15M, sentiment, rloo", found, ">= 0.70 at KL <= 10")
