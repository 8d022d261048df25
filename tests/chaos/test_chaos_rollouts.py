"""Workers that answer prompts and the learner that checks them are killed again and again: the run comes to its end, and no answer is
another one for it."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from shoal.cli.main import main
from shoal.updates.answer_frames import pack
from tests.coordinator.test_rollout_leases import CHEATS, Room, answers_to, settings
from tests.support.processes import HANG_S, processes_in

CONFIG = """\
dialect: shoal
model: {kind: gpt, hidden_size: 32, num_layers: 2, num_heads: 2, max_seq_len: 32}
data: {tokenizer: bytes, max_samples: 50}
training: {epochs: 1, device: cpu, max_steps: 3, optimizer: {learning_rate: 0.003}}
checkpoint: {every_steps: 1, keep_last: 200}
rlhf:
  reward: exact
  prompts: prompts.jsonl
  ppo: {rollout_size: 32, mini_batch_size: 16, epochs: 1, steps: 120, prompt_length: 4, response_length: 8}
"""
KILLS = 20
VERSIONS = 40
COMMAND = ("train", "config.yaml", "--workers", "3", "--run-dir", "run")


def workers_of(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if "join" in process.cmdline() and Path(process.cwd()).resolve() == folder.resolve():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def lines_of(ledger: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in ledger.read_text().splitlines() if line.endswith("}")] if ledger.exists() else []


def test_twenty_kills_of_workers_and_learner_change_nothing_but_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i} ", "answer": "!"}) + "\n" for i in range(20)))
    chance, ledger = random.Random(0), tmp_path / "run" / "policy" / "coordinator" / "ledger.jsonl"
    with processes_in(tmp_path) as processes:
        run = processes.start(*COMMAND)
        for kill in range(KILLS):
            until, there = time.monotonic() + HANG_S, len(lines_of(ledger))
            while len(lines_of(ledger)) < there + 2 or not workers_of(tmp_path):
                assert run.poll() is None, run.communicate()
                assert time.monotonic() < until, f"nothing goes on after kill {kill}"
                time.sleep(0.05)
            if kill % 4 == 3:
                run.kill()
                run.communicate(timeout=HANG_S)
                run = processes.start(*COMMAND, "--resume")
            else:
                os.kill(chance.choice(workers_of(tmp_path)), signal.SIGKILL)
        said = run.communicate(timeout=HANG_S)
        assert run.returncode == 0, said
    summary = json.loads((tmp_path / "run" / "policy" / "summary.json").read_text())
    assert (summary["status"], summary["samples"]) == ("completed", 120 * 32)
    units = [unit for line in lines_of(ledger) if "version" in line for unit, *_ in line["answers"]]  # type: ignore[attr-defined]
    assert len(units) == len(set(units)) == 120 * 8, "every unit counted once"
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "run/policy", "--regenerate", "100"]) == 0
    told = capsys.readouterr().out
    assert "100 units were made again: 100 are the same, token for token" in told
    assert "nothing is missing, nothing is counted twice" in told


def learned_scores(tmp_path: Path, others: Sequence[str], versions: int) -> tuple[list[float], Room]:
    """The mean score of each version's answers, where three honest workers have some others beside them."""
    room = Room(
        settings(tmp_path, algorithm="grpo", kl={"coefficient": 0.0, "adaptive": False}, ppo={"steps": versions, "rollout_size": 48})
    )
    workers = {name: room.join(name) for name in ("first", "second", "third", *others)}
    while not room.coordinator.finished:
        version, before = room.coordinator.state.version, copy.deepcopy(room.learner.model)
        for name, worker in workers.items():
            if worker.protocol.session in room.coordinator.members.by_session and (unit := room.claim(worker)) is not None:
                room.send(worker, unit, pack(CHEATS.get(name, answers_to)(room, unit)))
        if room.coordinator.state.version > version:
            room.old = before
    assert room.coordinator.state.version == versions, "no unit was given up"
    return [one.metrics["score"] for one in room.published if "score" in one.metrics], room


def test_three_cheats_among_six_workers_change_nothing_that_is_learned(tmp_path: Path) -> None:
    honest, _ = learned_scores(tmp_path, (), VERSIONS)
    among, room = learned_scores(tmp_path, ("fabricates", "stale", "best-of-4"), VERSIONS)
    assert sum(honest[-5:]) / 5 > honest[0] + 0.15, "the policy learns"
    assert sum(among[-5:]) / 5 == pytest.approx(sum(honest[-5:]) / 5, abs=0.05)
    assert {line["inexact"][0] for line in room.ledger if "inexact" in line} == {"fabricates", "stale", "best-of-4"}
    counted = {one[0] for line in room.ledger if "version" in line for one in line["from"]}
    assert not counted & {"fabricates", "best-of-4"}
