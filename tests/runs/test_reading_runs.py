"""Whole runs whose models read passages and contexts, and remember: what that is worth, and that a break changes nothing."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from tests.support.processes import run_python

pytestmark = pytest.mark.whole

pytest.importorskip("faiss", reason="retrieval needs faiss-cpu (shoal[rag])")

SETTINGS = """\
dialect: shoal
model:
  kind: moe
  hidden_size: 32
  num_layers: 2
  num_heads: 4
  intermediate_size: 48
  max_seq_len: {length}
  experts: {{count: 2, per_token: 1, capacity_factor: null}}
  cross_attention: {{every_layers: 1}}
  {features}
data: {{source: {{kind: text, path: texts}}, sequence_length: {length}, max_eval_samples: 20}}
training: {{max_steps: {steps}, batch_size: 8, optimizer: {{name: AdamW, learning_rate: 0.01}}}}
evaluation: {{strategy: steps, every_steps: {steps}}}
checkpoint: {{strategy: steps, every_steps: 4}}
logging: {{every_steps: 1}}
output_dir: out
"""
RETRIEVAL = "retrieval: {{enabled: true, encoder: words, passages: {passages}, top_k: 1, chunk_size: 16, passage_tokens: 4}}"
MEMORY = "episodic_memory: {enabled: true, capacity: 16, chunk_size: 8, replay_rate: 0.5}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    return tmp_path


def records(run: Path, split: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in one.items() if not _is_measured(name)} for one in lines if one["split"] == split]


def _is_measured(name: str) -> bool:
    """Whether a figure differs from one run of the same numbers to the next."""
    return name.endswith("_s") or name.startswith("seconds/") or name in ("mfu", "memory_bytes")


def secrets(seed: int, count: int) -> list[tuple[str, str]]:
    """Names that are 16 bytes long with a full stop, and the letter that each means."""
    drawn = random.Random(seed)
    return [("".join(drawn.choices("abcdefghijklmnop", k=15)) + ".", drawn.choice("QRST")) for _ in range(count)]


def test_a_planted_fact_helps_only_while_it_is_indexed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each text names something, and then says what it means, which no other text tells: only a passage does."""
    facts = secrets(1, 400)
    rows = [json.dumps({"prompt": f"{name}=", "completion": meaning}) for name, meaning in facts]
    (folder / "texts" / "rows.jsonl").write_text("\n".join(rows))
    (folder / "facts.txt").write_text("\n".join(meaning * 4 + " " + name for name, meaning in facts))
    features = RETRIEVAL.replace("{{", "{").replace("}}", "}").replace("{passages}", "facts.txt")
    text = SETTINGS.format(length=32, features=features, steps=80).replace("max_eval_samples", "batching: dynamic, max_eval_samples")
    (folder / "run.yaml").write_text(text.replace("batch_size: 8", "batch_size: 32").replace("every_steps: 1}", "every_steps: 40}"))
    assert main(["train", "run.yaml", "--run-dir", "facts"]) == 0
    judged = records(folder / "facts", "eval")[-1]
    assert judged["loss"] < judged["loss_without_retrieval"] - 0.1
    (folder / "facts.txt").write_text("\n".join(meaning * 4 + " " + name for name, meaning in secrets(2, 400)))
    capsys.readouterr()
    assert main(["eval", "facts", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["loss"] > judged["loss"] + 0.1, "other facts help nobody"
    assert main(["generate", "facts", "--prompt", facts[0][0] + "=", "--max-new-tokens", "4"]) == 0
    assert main(["export", "facts", "written"]) == 0
    assert (folder / "written" / "passages" / "manifest.json").exists()
    assert main(["generate", "written", "--prompt", facts[0][0] + "=", "--max-new-tokens", "4"]) == 0


def test_a_memory_survives_a_kill_to_identical_records(folder: Path) -> None:
    """To the bit, as processes of their own: what else a process has computed may change how the next sum is rounded."""
    train = ["-m", "shoal", "train", "run.yaml", "--run-dir"]
    drawn = random.Random(3)
    for number in range(40):
        (folder / "texts" / f"{number}.txt").write_text(" ".join(drawn.choices(["one", "two", "three", "four", "five"], k=60)))
    (folder / "run.yaml").write_text(SETTINGS.format(length=32, features=MEMORY, steps=12))
    assert run_python([*train, "whole"], folder).returncode == 0
    (folder / "killed.py").write_text(_KILLED)
    assert run_python(["killed.py"], folder).returncode == -signal.SIGKILL
    assert run_python([*train, "killed", "--resume"], folder).returncode == 0
    whole, resumed = (records(folder / run, "train") for run in ("whole", "killed"))
    assert whole == resumed
    assert sum(record["replayed"] for record in whole) > 12
    assert records(folder / "whole", "eval") == records(folder / "killed", "eval")
    assert {"loss", "loss_without_memory"} <= set(records(folder / "whole", "eval")[-1])


_KILLED = """
import os, signal
from shoal.cli.main import main
from shoal.models.layers.episodic_memory import EpisodicMemory
before, steps = EpisodicMemory.end_step, []
def end_step(self):
    steps.append(before(self))
    if len(steps) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
EpisodicMemory.end_step = end_step
main(["train", "run.yaml", "--run-dir", "killed"])
"""
