"""What does an update of PPO take on one GPU, beside TRL 1.12's PPOTrainer?

Both begin with a GPT-2 of 124M with weights at random and the same prompts, give answers of a fixed length that nothing ends, and take
the same passes in mini-batches of the same size, in bf16 by autocast over weights in float32, with a reward that costs next to nothing.
Rounds of both follow each other in turn, each in a process of its own. A value has a network of its own, or shares the policy's.

Seconds are by the clock, per update, the first two left out. TRL must be where this Python finds it, since GPU machines often have no way
to install it; it needs transformers, accelerate, pandas and pyarrow.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import ppo
from run import Row

ASKED: dict[str, Any] = {"seed": 0, "answers": 64, "mini": 32, "epochs": 2, "updates": 6, "length": 128, "rate": 1e-6, "kl": 0.05}
PROMPT, VOCABULARY, FIRST, ROUNDS = 64, 50257, 2, 2


def asked(shared: bool, folder: str) -> dict[str, Any]:
    prompts = [[(7 * row + 13 * place) % 50_000 for place in range(PROMPT)] for row in range(ASKED["answers"])]
    return ASKED | {"shared": shared, "prompts": prompts, "folder": folder, "pad": VOCABULARY - 1}


def measure() -> Iterator[Row]:
    import torch

    if not torch.cuda.is_available() or find_spec("trl") is None:
        print("gpu-ppo: skipped, there is no CUDA GPU or no trl here")
        return
    commands = {"ours": [sys.executable, __file__], "theirs": [sys.executable, str(ppo.APPS / "trl_ppo.py")]}
    for shared in (False, True):
        found: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(ROUNDS):
                for who, command in commands.items():
                    found[who].append(ppo.spent_by(command, asked(shared, folder)))
        seconds = {who: statistics.median(one for run in runs for one in run["spent"][FIRST:]) for who, runs in found.items()}
        peak = {who: statistics.median(run["megabytes"] for run in runs) for who, runs in found.items()}
        kind = "the value shares the policy" if shared else "a value network"
        note = f"answers took {statistics.median(run['sampling'] for run in found['ours']):.3f} s of ours"
        yield Row(f"gpu-ppo, {kind}", seconds["ours"], seconds["theirs"], "s", seconds["theirs"] / seconds["ours"], "≥ 3", note)
        yield Row(f"gpu-ppo, {kind}, memory", peak["ours"], peak["theirs"], "MB", peak["ours"] / peak["theirs"], "–")


# --- our side, in a process of its own -------------------------------------------------------------------


def ours(given: dict[str, Any]) -> dict[str, Any]:
    import torch

    from shoal.config.schema import model as schema
    from shoal.models.gpt import Gpt
    from shoal.runs.rlhf import rollouts

    torch.manual_seed(given["seed"])
    sizes = schema.Gpt(hidden_size=768, num_layers=12, num_heads=12, max_seq_len=1024)
    model = Gpt(sizes, VOCABULARY)
    sampling: list[float] = []
    sample = rollouts.sample

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    def timed(*values: Any, **more: Any) -> Any:
        start = now()
        drawn = sample(*values, **more)
        sampling.append(now() - start)
        return drawn

    rollouts.sample = timed
    found = ppo.updates(given, model, torch.device("cuda"), {"precision": {"kind": "bf16"}}, now)
    return found | {"megabytes": torch.cuda.max_memory_allocated() / 2**20, "sampling": statistics.median(sampling[FIRST:])}


if __name__ == "__main__":
    print(json.dumps(ours(json.loads(sys.argv[1]))))
