"""Processes of a live `shoal serve` with layers on several machines, of which one has a fault: texts are what one process writes."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from shoal.cli.main import main
from tests.conftest import ROOT
from tests.support.faulty_node import FAULTS
from tests.support.processes import HANG_S, Command, Processes, processes_in, wait_for_line

TEXT = ["data.source.kind=text", "data.source.path=text.txt", "data.tokenizer=bytes", "data.sequence_length=64"]
SHORT = ["training.max_steps=1", "training.batch_size=2", "training.device=cpu"]
SMALL = ["model.kind=gpt", "model.hidden_size=32", "model.num_layers=6", "model.num_heads=2", "model.max_seq_len=256"]
READY = r"run answers at http://127.0.0.1:(\d+)/v1"
TOKENS = 60


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (folder / "config.yaml").write_text("dialect: shoal\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        settings = [word for setting in [*TEXT, *SHORT, *SMALL] for word in ("--set", setting)]
        assert main(["train", "config.yaml", "--run-dir", "run", *settings]) == 0
    return folder


def texts(port: int) -> list[str]:
    """What is written with several seeds, at the same time."""
    body = {"model": "run", "prompt": ["the quick", "a", "lazy dog"], "max_tokens": TOKENS, "temperature": 1.0, "seed": 3}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def faulty(processes: Processes, fault: str, invitation: list[str]) -> Command:
    values = [invitation[0], *(invitation[invitation.index(word) + 1] if word in invitation else "" for word in ("--token", "--key"))]
    process = Command(["-m", "tests.support.faulty_node", fault, "20", *values, "faulty"], ROOT)
    processes.running.append(process)
    return process


def removed(process: Command) -> list[str]:
    """The machines that a server removed, once it has ended."""
    process.terminate()
    return re.findall(r"(\S+) is removed: ", process.communicate()[0])


@pytest.mark.parametrize("fault", [fault if fault == "nan" else pytest.param(fault, marks=pytest.mark.long) for fault in FAULTS])
def test_a_live_service_goes_on_when_a_node_is_faulty(trained: Path, fault: str) -> None:
    with processes_in(trained) as processes:
        alone = processes.start("serve", "run", "--port", "0")
        spread = processes.start("serve", "run", "--port", "0", "--nodes", "3", "--node-host", "127.0.0.1")
        invitation = wait_for_line(spread, r"shoal join (.*)").split()
        processes.start("join", *invitation, "--name", "healthy")
        faulty(processes, fault, invitation)
        port = int(wait_for_line(spread, READY))
        wanted = texts(int(wait_for_line(alone, READY)))
        assert [texts(port) for _ in range(3)] == [wanted] * 3
        found = set(removed(spread))
        assert found <= {"faulty"}
        assert found or fault in ("fails others", "never sends", "two faces")
