"""What a user watches of a mixture: figures of each layer, loads and gradient norms of each expert, and a picture of the loads."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from shoal.cli.demo_results import show
from shoal.cli.main import main
from shoal.config import load
from shoal.engines import SingleEngine
from shoal.models.moe import Moe
from shoal.tasks.language import LanguageModelling

SIZES = ["hidden_size=16", "num_layers=2", "num_heads=2", "max_seq_len=8", "experts.count=4", "experts.per_token=1"]


def tiny(*more: str) -> SingleEngine:
    own = [f"model.{one}" for one in (*SIZES, "vocab_size=12")]
    run = load("starter", overrides=["model.kind=moe", *own, "task.kind=language-modelling", "data.source.name=zen", *more], environ={})
    torch.manual_seed(0)
    return SingleEngine(run, LanguageModelling({"model": Moe(run.model, 12)}), torch.device("cpu"), 10)  # type: ignore[arg-type]


def test_figures_of_a_step_are_those_of_all_its_batches() -> None:
    engine = tiny()
    ids = torch.randint(12, (4, 8), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": part, "labels": part.roll(-1, 1)} for part in ids.chunk(2)]
    figures = engine.step(batches).metrics
    details = engine.figures()
    for layer in range(2):
        shares = [details[f"layers/{layer}/load/{expert}"] for expert in range(4)]
        assert sum(shares) == pytest.approx(1)
        assert {round(32 * share, 3) % 1 for share in shares} == {0}, "shares of 32 tokens: both batches count"
        assert float(figures[f"layers/{layer}/load_excess"]) == pytest.approx(4 * max(shares) - 1, abs=1e-6)
        assert int(figures[f"layers/{layer}/dead_experts"]) == shares.count(0.0)
        entropy = -sum(share * math.log(share) for share in shares if share) / math.log(4)
        assert float(figures[f"layers/{layer}/load_entropy"]) == pytest.approx(entropy, abs=1e-6)
        assert 0 < float(figures[f"layers/{layer}/gate_entropy"]) <= 1 + 1e-6
        assert {f"layers/{layer}/{name}" for name in ("balance", "logsumexp", "dropped")} <= set(figures)


def test_each_expert_has_a_gradient_norm_of_its_own() -> None:
    engine = tiny("logging.track_gradients=true")
    ids = torch.full((2, 8), 3)
    engine.gradients([{"input_ids": ids, "labels": ids}])
    figures = engine.figures()
    name = "gradients/blocks.0.feed_forward.up"
    norms = [figures[f"{name}/{expert}"] for expert in range(4)]
    assert math.hypot(*norms) == pytest.approx(figures[name], rel=1e-5)
    loads = [figures[f"layers/0/load/{expert}"] for expert in range(4)]
    assert [norm > 0 for norm in norms] == [load > 0 for load in loads]


def test_a_run_records_them_and_draws_the_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and looked at the rat. " * 40)
    own = [f"model.{one}" for one in SIZES]
    settings = [
        "model.kind=moe",
        *own,
        "data.source.kind=text",
        f"data.source.path={text}",
        "training.max_steps=3",
        "logging.every_steps=1",
    ]
    assert main(["train", "starter", *(part for one in settings for part in ("--set", one)), "--run-dir", "run"]) == 0
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert "layers/1/load_excess" in records[0]
    with Image.open("run/experts.png") as picture:
        assert picture.size[0] > 100
    capsys.readouterr()
    show("text", Path("run"))
    rows = [line.split()[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("  layer ")]
    assert [len(row) for row in rows] == [4, 4]
    assert all(98 <= sum(map(int, row)) <= 102 for row in rows), "the demo tells how many of 100 choices fell on each expert"
