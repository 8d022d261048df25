"""Machines that hold layers of a served model are killed in the middle of sentences: every answer is what one process writes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from shoal.cli.main import main
from tests.support.processes import HANG_S, processes_in, wait_for_line

TEXT = ["data.source.kind=text", "data.source.path=text.txt", "data.tokenizer=bytes", "data.sequence_length=64"]
SHORT = ["training.max_steps=3", "training.batch_size=2", "training.device=cpu"]
SMALL = ["model.kind=gpt", "model.hidden_size=32", "model.num_layers=6", "model.num_heads=2", "model.max_seq_len=256"]
SHARE = float(os.environ.get("CHAOS_SHARE", "1"))
TEXTS = 10
KILLS = max(TEXTS, round(100 * SHARE))
KILLED_AT_TOKENS = (20, 45, 70, 95)
READY = r"run answers at http://127.0.0.1:(\d+)/v1"
STOPPED_EVERY = 25
"""One of this many victims is stopped instead of killed: it keeps its connections, and sends nothing."""


def nodes(server: int) -> list[int]:
    """The processes of a server that hold layers. One fork server starts both."""
    found = []
    for process in psutil.Process(server).parent().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            words = " ".join(process.cmdline()).split()  # a process of a fork server has one text there
            found += [process.pid] if "--node" in words else []
    return found


class Killer:
    """Kills or stops nodes of a server."""

    def __init__(self, server: int, chance: random.Random) -> None:
        self.server, self.chance, self.kills = server, chance, 0
        self.stopped: list[int] = []

    def strike(self) -> None:
        there = [pid for pid in nodes(self.server) if pid not in self.stopped]
        if not there:  # the last one is being started again
            return
        victim, self.kills = self.chance.choice(there), self.kills + 1
        with contextlib.suppress(ProcessLookupError):
            if self.kills % STOPPED_EVERY:
                os.kill(victim, signal.SIGKILL)
            else:
                os.kill(victim, signal.SIGSTOP)
                self.stopped.append(victim)

    def end_stopped(self) -> None:
        for pid in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.stopped.clear()


ASKED: dict[str, Any] = {"model": "run", "prompt": "the quick", "max_tokens": 120, "temperature": 1.0}


def answer(port: int, seed: int, killer: Killer | None = None, at: Sequence[int] = KILLED_AT_TOKENS, **more: Any) -> str:
    """What is written after the prompt. `killer`: strikes when the answer has these numbers of tokens; `more`: fields of the request."""
    body = {**ASKED, **more, "seed": seed, "stream": True}
    text, tokens = "", 0
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=HANG_S) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line.removeprefix("data: "))
            assert "error" not in piece, piece
            text += "".join(choice["text"] for choice in piece["choices"])
            tokens += 1
            if tokens in at and killer is not None:
                killer.strike()
    return text


def machines(port: int) -> list[str]:
    told = httpx.get(f"http://127.0.0.1:{port}/v1/status", timeout=HANG_S).json()
    return [machine["name"] for machine in told["machines"] if machine["alive"]]


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    """A small model in the folder `run`."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (folder / "config.yaml").write_text("dialect: shoal\n")
    monkeypatch.chdir(folder)
    settings = [word for setting in [*TEXT, *SHORT, *SMALL, *more] for word in ("--set", setting)]
    assert main(["train", "config.yaml", "--run-dir", "run", *settings]) == 0


def test_answers_go_on_whichever_node_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, monkeypatch)
    with processes_in(tmp_path) as processes:
        alone = processes.start("serve", "run", "--port", "0")
        port = int(wait_for_line(alone, READY))
        wanted = [answer(port, seed) for seed in range(TEXTS)]
        assert len(set(wanted)) == TEXTS, "the seeds give different texts"
        spread = processes.start("serve", "run", "--port", "0", "--nodes", "4")
        port = int(wait_for_line(spread, READY))
        killer, asked = Killer(spread.pid, random.Random(1)), 0
        while killer.kills < KILLS:
            while not nodes(spread.pid):  # those that were killed are started again
                time.sleep(0.05)
            assert answer(port, asked % TEXTS, killer) == wanted[asked % TEXTS]
            killer.end_stopped()
            asked += 1
        print(f"{killer.kills} kills of serving nodes in {asked} answers, all as one process writes them", flush=True)
        assert "server" in machines(port)
        spread.terminate()
        assert "directly" in spread.communicate()[0], "the nodes handed on to each other"


CONSTRAINED: list[dict[str, Any]] = [
    {"guided_regex": r"( (the|quick|brown|lazy) (fox|dog|cat) jumps over the lazy (dog|fox)[.,]){3}"},
    {"grammar": 'start: "{\\"words\\": [" word (", " word){11} "]}"\nword: "\\"" ("jumps" | "lazy" | "quick" | "brown fox") "\\""\n'},
    {},
]
"""Grammars of texts that repeat themselves, so that tokens are proposed; and an answer without one."""
PACKED = ["model.hidden_size=64", "model.positions=rotary", "model.norm=rms", "model.bias=false"]
PACKED_KILLS = max(4, round(16 * SHARE))


def accepted_tokens(port: int) -> int:
    """Proposed tokens that were right, by the server's own count."""
    page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=HANG_S).text
    return sum(int(float(line.split()[-1])) for line in page.splitlines() if line.startswith("shoal_accepted_tokens_total"))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_sampled_answers_by_a_grammar_with_proposed_tokens_and_packed_weights_go_on(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, monkeypatch, *PACKED)
    served, asked = ("serve", "run", "--port", "0", "--set", f"serving.weights={weights}"), list(enumerate(CONSTRAINED * 2))
    with processes_in(tmp_path) as processes:
        port = int(wait_for_line(processes.start(*served, "--set", "serving.proposed_tokens=0"), READY))
        wanted = [answer(port, seed, **more) for seed, more in asked]
        assert accepted_tokens(port) == 0
        spread = processes.start(*served, "--set", "serving.proposed_tokens=5", "--set", "serving.spread=even", "--nodes", "3")
        port = int(wait_for_line(spread, READY))
        killer, answers = Killer(spread.pid, random.Random(1)), 0
        while killer.kills < PACKED_KILLS:
            for seed, more in asked:
                while len(nodes(spread.pid)) < 2:  # those that were killed are started again
                    time.sleep(0.05)
                assert answer(port, seed, killer, (2,), **more) == wanted[seed]
                killer.end_stopped()
                answers += 1
        print(f"{weights}: {killer.kills} kills in {answers} answers, {accepted_tokens(port)} proposed tokens accepted", flush=True)
        assert accepted_tokens(port) > 0
