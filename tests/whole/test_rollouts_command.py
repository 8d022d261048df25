"""A policy that learns from the answers of other processes, as a user runs it; some of them are killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.runs.rlhf.regenerate import regenerate
from tests.support.processes import HANG_S, Processes, processes_in

CONFIG = """\
model: {kind: gpt, hidden_size: 16, num_layers: 1, num_heads: 2, max_seq_len: 24}
training: {epochs: 1, device: cpu, optimizer: {learning_rate: 0.003}}
data: {max_samples: 50}
evaluation: {every_steps: 4}
checkpoint: {every_steps: 1, keep_last: 20}
coordinator: {heartbeat_interval_s: 1.0}
rlhf:
  reward: exact
  prompts: prompts.jsonl
  ppo: {rollout_size: 16, mini_batch_size: 8, epochs: 1, steps: 5, prompt_length: 4, response_length: 8}
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i} ", "answer": "!"}) + "\n" for i in range(20)))
    with processes_in(tmp_path) as made:
        yield made


def joined(folder: Path) -> list[int]:
    """Worker processes that were started in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if b"join" in (path / "cmdline").read_bytes().replace(b"\0", b" ").split() and (path / "cwd").resolve() == folder.resolve():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def test_a_run_survives_its_workers_and_learner_and_its_answers_can_be_reproduced(
    processes: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("train", "config.yaml", "--workers", "2", "--run-dir", "run")
    run, ledger = processes.start(*command), tmp_path / "run" / "policy" / "coordinator" / "ledger.jsonl"
    while not ledger.exists() or not ledger.read_text():
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)
    for pid in joined(tmp_path)[:1]:
        os.kill(pid, signal.SIGKILL)
    while len(ledger.read_text().splitlines()) < 3:
        assert run.poll() is None
        time.sleep(0.02)
    run.kill()
    run.communicate(timeout=HANG_S)
    before = ledger.read_text().splitlines()[:3]
    code, output = processes.run(*command, "--resume")
    assert code == 0, output
    assert "phase 1, base: done already" in output
    assert ledger.read_text().splitlines()[:3] == before
    summary = json.loads((tmp_path / "run" / "policy" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["samples"]) == ("completed", 5, 5 * 16)
    assert {"score", "kl"} <= set(summary["metrics"]["eval"])
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "run/policy", "--regenerate", "12"]) == 0
    told = capsys.readouterr().out
    assert "12 units were made again: 12 are the same, token for token" in told
    assert "nothing is missing, nothing is counted twice" in told
    told_of = [json.loads(line) for line in ledger.read_text().splitlines()]
    forged = [line | {"answers": [[unit, base, "0" * 64] for unit, base, _ in line.get("answers", ())]} for line in told_of]
    made = regenerate(Path("run/policy"), forged, 12)
    assert (made.same, len(made.others)) == (0, 12)
    assert made.most < 10, "hardly any of these draws lies so near to another token"
    assert made.violations()
