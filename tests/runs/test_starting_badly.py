"""Starts that fail: they leave nothing behind, and say what is wrong in the words of who typed it."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.cli.running import _speaks_for_all
from shoal.config.load import resolve_data
from shoal.config.paths import nothing_at
from shoal.config.ranks import Place
from shoal.config.schema.model import HuggingFace
from shoal.data.hub.dataset import Request, load_splits
from shoal.data.text.tokenizers.load import load_tokenizer
from shoal.errors import ShoalError
from shoal.models.pretrained import load as load_model
from shoal.runs.run_directory import RunDirectory


def test_a_coordinator_that_cannot_listen_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = ["--set", "strategy.kind=async", "--set", f"transport.port={port}", "--host", "127.0.0.1"]
        assert main(["coordinate", "starter", "--run-dir", str(tmp_path / "run"), *settings]) == 2
    assert str(port) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_somebody_has_used_is_never_removed(tmp_path: Path) -> None:
    run = resolve_data({}, name="test", dialect="shoal", environ={}).run
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    for wanted, file in (("mine", "notes.txt"), ("begun", "metrics.jsonl")):
        directory = RunDirectory.create(run, str(tmp_path / wanted))
        (directory.path / file).touch()
        with pytest.raises(ShoalError), directory.kept_if_begun():
            raise ShoalError("it fails")
        assert (tmp_path / wanted / file).exists()


@pytest.mark.parametrize(
    "settings", [{"name": "../../elsewhere"}, {"name": "a\\b"}, {"logging": {"project": "../x"}}, {"logging": {"project": "/x"}}]
)
def test_no_name_leads_out_of_the_folder_of_runs(settings: dict[str, object], tmp_path: Path) -> None:
    loaded = resolve_data({"output_dir": str(tmp_path / "runs")} | settings, name="test", dialect="shoal", environ={})
    with pytest.raises(ShoalError, match="output_dir says where runs are kept"):
        RunDirectory.create(loaded.run)
    assert not list(tmp_path.iterdir())


def test_a_mistyped_path_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    assert nothing_at("./corpsu") == "there is nothing at ./corpsu (did you mean corpus?)"
    assert nothing_at("data.jsonl") == "there is nothing at data.jsonl"
    assert nothing_at("/no/where/else") == "there is nothing at /no/where/else"
    assert not nothing_at("./corpus")
    assert not nothing_at("openai/gpt2"), "this may be on the hub"


def test_a_mistyped_model_data_set_or_tokenizer_says_so() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    with pytest.raises(ShoalError, match=r"^model\.pretrained: there is nothing at \./nowhere"):
        load_model(HuggingFace(pretrained="./nowhere"), None)
    with pytest.raises(ShoalError, match=r"^data\.source\.name: there is nothing at \./nowhere$"):
        load_splits(Request("./nowhere"), None)
    with pytest.raises(ShoalError, match=r"^data\.tokenizer: there is nothing at \./nowhere"):
        load_tokenizer("./nowhere")


@pytest.mark.parametrize(
    ("here", "speaks"),
    [
        (None, True),
        (Place(0, 2, 0, 2), True),
        (Place(1, 2, 1, 2), False),
        (Place(0, 2, 0, 2, file="meeting"), False),
    ],
)
def test_one_process_tells_what_is_doubtful_about_the_settings(here: Place | None, speaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.running.place", lambda: here)
    assert _speaks_for_all() == speaks


def test_what_psycopg_remarks_while_a_connection_is_lost_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("psycopg")
    import shoal.transports.postgres.access  # noqa: F401

    root, logger = logging.getLogger(), logging.getLogger("psycopg")
    handlers, root.handlers = root.handlers, []
    try:
        logger.warning("error ignored terminating %r", "<psycopg.Pipeline>")
    finally:
        root.handlers = handlers
    assert "ignored" not in capsys.readouterr().err
