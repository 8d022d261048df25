"""Machines that hold layers of a served model are killed in the middle of sentences: every answer is what one process writes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from shoal.cli.main import main
from tests.support.processes import HANG_S, processes_in, wait_for_line

TEXT = ["data.source.kind=text", "data.source.path=text.txt", "data.tokenizer=bytes", "data.sequence_length=64"]
SHORT = ["training.max_steps=3", "training.batch_size=2", "training.device=cpu"]
SMALL = ["model.kind=gpt", "model.hidden_size=32", "model.num_layers=6", "model.num_heads=2", "model.max_seq_len=256"]
KILLS = 20
KILLED_AT_TOKEN = 30


def nodes() -> list[int]:
    """The processes here that hold layers, whoever is their parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            words = " ".join(process.cmdline())
            found += [process.pid] if "shoal-nodes-" in words and "--node" in words else []
    return found


def answer(port: int, seed: int, victim: int | None = None) -> str:
    """What is written after the prompt. `victim`: the place of the node that is killed on the way."""
    body = {"model": "run", "prompt": "the quick", "max_tokens": 120, "temperature": 1.0, "seed": seed, "stream": True}
    text, tokens = "", 0
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=HANG_S) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line.removeprefix("data: "))
            assert "error" not in piece, piece
            text += "".join(choice["text"] for choice in piece["choices"])
            tokens += 1
            if tokens == KILLED_AT_TOKEN and victim is not None:
                kill(victim)
    return text


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def machines(port: int) -> list[str]:
    told = httpx.get(f"http://127.0.0.1:{port}/v1/status", timeout=HANG_S).json()
    return [machine["name"] for machine in told["machines"] if machine["alive"]]


def test_answers_go_on_whichever_node_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "config.yaml").write_text("dialect: shoal\n")
    monkeypatch.chdir(tmp_path)
    settings = [word for setting in [*TEXT, *SHORT, *SMALL] for word in ("--set", setting)]
    assert main(["train", "config.yaml", "--run-dir", "run", *settings]) == 0
    ready = r"run answers at http://127.0.0.1:(\d+)/v1"
    with processes_in(tmp_path) as processes:
        alone = processes.start("serve", "run", "--port", "0")
        port = int(wait_for_line(alone, ready))
        wanted = [answer(port, seed) for seed in range(KILLS)]
        assert len(set(wanted)) == KILLS, "the seeds give different texts"
        spread = processes.start("serve", "run", "--port", "0", "--nodes", "3")
        port = int(wait_for_line(spread, ready))
        for seed in range(KILLS):
            while not (there := nodes()):  # one that was killed is started again
                time.sleep(0.05)
            assert answer(port, seed, there[seed % len(there)]) == wanted[seed]
        assert "server" in machines(port)
        spread.terminate()
        assert "directly" in spread.communicate()[0], "the nodes handed on to each other"
