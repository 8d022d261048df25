"""Starts that fail: they leave nothing behind, and say what is wrong in the words of who typed it."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
import torch

from shoal.cli.main import main
from shoal.cli.run_command import _speaks_for_all
from shoal.config.load import resolve_data
from shoal.config.path_hints import missing_path_hint
from shoal.config.ranks import RankPlace
from shoal.config.schema.model import HuggingFace
from shoal.data.hub.dataset import DataRequest, load_splits
from shoal.data.text.tokenizers.lookup import load_tokenizer
from shoal.engines import SingleEngine
from shoal.errors import ShoalError
from shoal.models.huggingface.pretrained import load as load_model
from shoal.runs.coordinator_run import CoordinatorLoop
from shoal.runs.folder.run_directory import RunDirectory


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


@pytest.mark.parametrize("workers", [[], ["--workers", "1"]], ids=["alone", "with a worker"])
def test_a_first_step_that_fails_leaves_nothing_in_the_way_of_the_next_run(
    tmp_path: Path, workers: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ShoalError("no step can be made")

    again = ["train", "starter", "--run-dir", str(tmp_path / "run"), "--set", "training.max_steps=2", "--set", "evaluation.strategy=never"]
    again += [*workers, "--set", "transport.kind=in-process"] if workers else []
    with monkeypatch.context() as patch:
        patch.setattr(SingleEngine, "_in_turn", fail)
        assert main(again) == 2
    assert "no step can be made" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(again) == 0, capsys.readouterr().err
    assert main(again) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_a_run_with_invitations_is_kept_though_it_failed_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ShoalError("the disk is full")

    monkeypatch.setattr(CoordinatorLoop, "_coordinate", fail)
    settings = ["--set", "strategy.kind=async", "--set", "transport.port=0", "--host", "127.0.0.1"]
    assert main(["coordinate", "starter", "--run-dir", str(tmp_path / "run"), *settings]) == 2
    assert "the disk is full" in capsys.readouterr().err
    assert (tmp_path / "run" / "coordinator").is_dir(), "its line to join is good for the run that goes on"


def test_a_run_that_failed_before_its_first_step_takes_its_own_database_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ShoalError("no step can be made")

    monkeypatch.setattr(CoordinatorLoop, "_coordinate", fail)
    settings = ["--set", "strategy.kind=workunits", "--set", "transport.kind=postgres", "--set", "transport.host=embedded"]
    assert main(["train", "starter", "--run-dir", str(tmp_path / "run"), "--workers", "1", *settings]) == 2
    assert "no step can be made" in capsys.readouterr().err
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.suffix != ".log"]


def test_logs_of_workers_are_kept_and_files_of_others_too(tmp_path: Path) -> None:
    run = resolve_data({}, name="test", dialect="shoal", environ={}).run
    for name in ("used", "fresh"):
        if name == "used":
            (tmp_path / name).mkdir()
            (tmp_path / name / "notes.txt").touch()
        directory = RunDirectory.create(run, str(tmp_path / name))
        (directory.path / "workers" / "w1").mkdir(parents=True)
        for file in ("config.yaml", "workers/w1.log", "workers/w1/key"):
            (directory.path / file).touch()
        directory.forget()
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    used = ("notes.txt", "config.yaml", "lock", "workers/w1.log", "workers/w1/key")
    assert left == {"fresh/workers/w1.log", *(f"used/{name}" for name in used)}


def test_a_recording_without_a_gpu_is_refused_before_there_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["train", "starter", "--run-dir", str(tmp_path / "run"), "--set", "training.cuda_graph=true"]) == 2
    told = capsys.readouterr()
    assert "training.cuda_graph records what a CUDA GPU does" in told.err
    assert str(tmp_path) not in told.out, "it was not said to be there"
    assert not (tmp_path / "run").exists()


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
    assert missing_path_hint("./corpsu") == "there is nothing at ./corpsu (did you mean corpus?)"
    assert missing_path_hint("data.jsonl") == "there is nothing at data.jsonl"
    assert missing_path_hint("/no/where/else") == "there is nothing at /no/where/else"
    assert not missing_path_hint("./corpus")
    assert not missing_path_hint("openai/gpt2"), "this may be on the hub"


def test_a_mistyped_model_data_set_or_tokenizer_says_so() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    with pytest.raises(ShoalError, match=r"^model\.pretrained: there is nothing at \./nowhere"):
        load_model(HuggingFace(pretrained="./nowhere"), None)
    with pytest.raises(ShoalError, match=r"^data\.source\.name: there is nothing at \./nowhere$"):
        load_splits(DataRequest("./nowhere"), None)
    with pytest.raises(ShoalError, match=r"^data\.tokenizer: there is nothing at \./nowhere"):
        load_tokenizer("./nowhere")


@pytest.mark.parametrize(
    ("here", "speaks"),
    [
        (None, True),
        (RankPlace(0, 2, 0, 2), True),
        (RankPlace(1, 2, 1, 2), False),
        (RankPlace(0, 2, 0, 2, file="meeting"), False),
    ],
)
def test_one_process_tells_what_is_doubtful_about_the_settings(
    here: RankPlace | None, speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.run_command.rank_place", lambda: here)
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
