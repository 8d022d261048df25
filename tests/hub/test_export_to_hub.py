"""Exports that are pushed to a hub: all files in one commit; what was written stays where the hub refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import main
from tests.support.fake_hub import FakeHub

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
SMALL = ("model.hidden_size=16", "model.num_layers=1", "model.num_heads=2", "training.max_steps=1", "data.max_eval_samples=8")


@pytest.fixture
def run(hub: FakeHub) -> Path:
    settings = [word for setting in (*SMALL, "training.schedule.warmup_steps=0") for word in ("--set", setting)]
    assert main(["train", "demo-gpt", "--run-dir", "gpt", *settings]) == 0
    return Path("gpt")


def test_an_export_is_pushed_whole_in_one_commit(hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "gpt", "model", "--push", "me/model", "--private"]) == 0
    assert f"pushed: {hub.url}/me/model" in capsys.readouterr().out
    (commit,) = hub.repos["me/model"].commits
    written = {path.relative_to("model").as_posix(): path.read_bytes() for path in Path("model").rglob("*") if path.is_file()}
    assert commit.files == written
    assert "model.safetensors" in written
    assert hub.repos["me/model"].private


def test_what_the_hub_refuses_stays_written_and_the_reason_is_told(
    hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fail("/api/repos/create", 403)
    assert main(["export", "gpt", "model", "--push", "me/model"]) == 2
    said = capsys.readouterr().err
    assert "model is written, but not pushed: the token may not write to me/model (403)" in said
    assert "hf upload me/model model" in said
    assert Path("model/model.safetensors").is_file()
    monkeypatch.setenv("HF_TOKEN", "")
    assert main(["export", "gpt", "other", "--push", "me/model"]) == 2
    assert "--push: uploads need a token" in capsys.readouterr().err
    assert not Path("other").exists()
