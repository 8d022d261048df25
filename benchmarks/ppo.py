"""What does an update of PPO cost, beside TRL 1.12's PPOTrainer? Needs ../shared/data for the weights.

Both begin with the weights of stories15M and the same prompts, give answers of a fixed length that nothing ends, take the same passes in
mini-batches of the same size, in float32 on one thread, with a reward that costs nothing. Rounds of both follow each other in turn. Ours is
a Gpt with the same weights, TRL's a Llama of transformers; a value has a network of its own, or shares the policy's.

Seconds are the processor's, per update, the first one left out. Memory is the peak above what the loaded libraries take. What is rewarded
is the share of tokens with even numbers; `BENCH=ppo:reward` (ten minutes) lets both learn that from equally many answers, and compares the
means of the last updates.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import peers
from run import Row

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data" / "lm"
APPS = Path(__file__).parent / "peer_apps"
MODEL = "stories15M"
NAME = "trl"
peers.INSTALL.setdefault(NAME, [["torch==2.13.0"], ["transformers==5.22.2", "accelerate==1.15.0", "datasets==5.2.0"], ["trl==1.12.0"]])
ASKED: dict[str, Any] = {"seed": 0, "answers": 16, "mini": 8, "epochs": 2, "updates": 3, "length": 32, "rate": 1e-5, "kl": 0.05}
PROMPT, PROMPTS = 16, 64
ROUNDS = 2
LEARNING: dict[str, Any] = {"updates": 25, "rate": 1e-4}
LAST = 5


def asked(shared: bool, folder: str) -> dict[str, Any]:
    prompts = [[1] + [(7 * row + 13 * place) % 3000 + 300 for place in range(PROMPT - 1)] for row in range(PROMPTS)]
    files = {"weights": str(DATA / f"{MODEL}.npz"), "config": str(DATA / f"{MODEL}.config.json"), "folder": folder}
    return ASKED | files | {"shared": shared, "prompts": prompts}


def spent_by(command: list[str], given: dict[str, Any]) -> dict[str, Any]:
    """What one process found: `spent` for each update, `megabytes`, and the `scores`."""
    own = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([*command, json.dumps(given)], capture_output=True, text=True, env=own)
    if done.returncode:
        raise RuntimeError(f"{command[1]} failed: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith('{"spent"')))
    return found


def learned() -> Row:
    """The scores of both after the same number of answers."""
    with tempfile.TemporaryDirectory() as folder:
        given = asked(False, folder) | LEARNING
        theirs = spent_by([str(peers.python(NAME)), str(APPS / "trl_ppo.py")], given)["scores"]
        ours = spent_by([sys.executable, __file__], given)["scores"]
    last = [statistics.mean(scores[-LAST:]) for scores in (ours, theirs)]
    note = f"from {ours[0]:.3f}, TRL from {theirs[0]:.3f}, in {LEARNING['updates']} updates of {ASKED['answers']} answers"
    return Row("PPO, score of the last updates", last[0], last[1], "share", last[0] / last[1], ">= 1", note)


def measure(part: str = "") -> Iterator[Row]:
    if part == "reward":
        yield learned()
        return
    goals = {False: (">= 1.4", ""), True: (">= 2", "<= 0.6")}
    for shared, (speed, memory) in goals.items():
        found: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
        with tempfile.TemporaryDirectory() as folder:
            given = asked(shared, folder)
            for _ in range(ROUNDS):
                found["theirs"].append(spent_by([str(peers.python(NAME)), str(APPS / "trl_ppo.py")], given))
                found["ours"].append(spent_by([sys.executable, __file__], given))
        seconds = {who: statistics.median(one for run in runs for one in run["spent"][1:]) for who, runs in found.items()}
        peak = {who: statistics.median(run["megabytes"] for run in runs) for who, runs in found.items()}
        score = {who: statistics.mean(run["scores"][-1] for run in runs) for who, runs in found.items()}
        kind = "the value shares the policy" if shared else "a value network"
        note = f"scores of the last update {score['ours']:.3f}, TRL {score['theirs']:.3f}"
        yield Row(f"PPO, {kind}", seconds["ours"], seconds["theirs"], "s", seconds["theirs"] / seconds["ours"], speed, note)
        yield Row(f"PPO, {kind}, memory", peak["ours"], peak["theirs"], "MB", peak["ours"] / peak["theirs"], memory)


# --- our side, in a process of its own -------------------------------------------------------------------


class Numbers:
    """A tokenizer whose text is the tokens' numbers."""

    eos_id: int | None = None
    pad_id = 0

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def ours(given: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    from story_models import load_story_model

    torch.manual_seed(given["seed"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = updates(given, load_story_model(DATA, MODEL)[0].requires_grad_(True), torch.device("cpu"), {}, time.process_time)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return found | {"megabytes": peak / 1024}


def updates(given: dict[str, Any], model: Any, device: Any, training: dict[str, Any], clock: Callable[[], float]) -> dict[str, Any]:
    """Updates of a feed and an engine, put together as a run does: what each took by the clock, and its score."""
    from shoal.config.load import resolve_data
    from shoal.engines import SingleEngine
    from shoal.models.layers.value_head import add_value_head
    from shoal.runs.rlhf.rollouts import RolloutFeed, RolloutPrompt
    from shoal.tasks.policy_gradient import PolicyGradient

    ppo = {"rollout_size": given["answers"], "mini_batch_size": given["mini"], "epochs": given["epochs"], "steps": given["updates"]}
    ppo |= {"response_length": given["length"], "prompt_length": len(given["prompts"][0])}
    optimizer = {"learning_rate": given["rate"], "weight_decay": 0.0}
    training = {"device": device.type, "epochs": 1, "clipping": {"enabled": False}, "optimizer": optimizer} | training
    value = "head" if given["shared"] else "network"
    rlhf = {"value": value, "ppo": ppo, "kl": {"coefficient": given["kl"], "adaptive": False}}
    tree = {"model": {"kind": "gpt"}, "seed": given["seed"], "training": training, "rlhf": rlhf}
    run = resolve_data(tree, name="bench", dialect="shoal", environ={}).run
    assert run.rlhf is not None
    task = PolicyGradient({"model": model} | add_value_head(model, value), run.rlhf)
    each = given["epochs"] * given["answers"] // given["mini"]
    engine = SingleEngine(run, task, device, given["updates"] * each, learns=True)
    prompts = [RolloutPrompt(ids, "") for ids in given["prompts"]]
    tokenizer: Any = Numbers()

    def score(answers: Any) -> list[float]:
        return [statistics.mean(int(word) % 2 == 0 for word in one.text.split()) for one in answers]

    feed = RolloutFeed(run, task, tokenizer, prompts, prompts, score, engine)
    times, scores = [clock()], []
    for _ in range(given["updates"]):
        for _ in range(each):
            engine.step([next(feed)])
        times.append(clock())
        scores.append(feed.figures["score"])
    return {"spent": [later - earlier for earlier, later in pairwise(times)], "scores": scores}


if __name__ == "__main__":
    print(json.dumps(ours(json.loads(sys.argv[1]))))
