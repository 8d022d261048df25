"""Every file of a model is listed with its digest: a flipped byte is refused by name, and an edit on purpose is taken when it is meant."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.errors import ShoalError
from shoal.files import DamagedFileError
from shoal.manifest import FILE, check_manifest, manifest_of, write_manifest
from tests.support.small_runs import train_and_export_text


def flip(path: Path, at: int = -1, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and its export."""
    folder = tmp_path_factory.mktemp("trained")
    train_and_export_text(folder, "training: {max_steps: 2, batch_size: 4, device: cpu}\n")
    return folder


@pytest.fixture
def work(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the current folder."""
    shutil.copytree(trained, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_a_flipped_byte_in_any_file_of_an_export_is_refused_by_name(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [path for path in Path("export").rglob("*") if path.is_file() and path.name != FILE]
    assert {path.name for path in files} >= {"model.safetensors", "config.yaml", "data.json"}
    for path in files:
        flip(path)
        assert main(["generate", "export", "--max-new-tokens", "1"]) == 2
        assert f"{path} is not as {FILE} beside it says" in capsys.readouterr().err
        flip(path)
    assert main(["generate", "export", "--max-new-tokens", "1"]) == 0
    (work / "export" / "data.json").unlink()
    assert main(["generate", "export"]) == 2
    assert "data.json is missing" in capsys.readouterr().err


def test_an_edit_on_purpose_is_taken_by_the_command_that_the_refusal_names(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = work / "export" / "config.yaml"
    path.write_text(path.read_text() + "# a note\n")
    assert main(["generate", "export"]) == 2
    assert "`shoal manifest export --write`" in capsys.readouterr().err
    assert main(["manifest", "export", "--write"]) == 0
    assert main(["manifest", "export"]) == 0
    assert "files are as manifest.json says" in capsys.readouterr().out
    assert main(["generate", "export", "--max-new-tokens", "1"]) == 0


def test_notes_and_hidden_files_may_change(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"1")
    assert write_manifest(tmp_path) == 1
    (tmp_path / "README.md").write_text("hello")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("main")
    assert check_manifest(tmp_path) == 1
    assert json.loads(manifest_of({"weights": tmp_path / "weights", "README.md": b""})) == json.loads((tmp_path / FILE).read_bytes())


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../b", "", "."])
def test_a_manifest_lists_only_files_of_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / FILE).write_text(json.dumps({"format": 1, "files": {name: "0" * 64}}))
    with pytest.raises(DamagedFileError, match=r"manifest\.json"):
        check_manifest(tmp_path)


def test_a_pipe_in_the_place_of_a_listed_file_is_refused(tmp_path: Path) -> None:
    import os

    (tmp_path / "weights").write_bytes(b"1")
    write_manifest(tmp_path)
    (tmp_path / "weights").unlink()
    os.mkfifo(tmp_path / "weights")
    with pytest.raises(ShoalError, match="weights"):
        check_manifest(tmp_path)


def test_settings_edited_in_a_run_are_told_or_refused_with_both_values(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = work / "run" / "config.yaml"
    written = path.read_text()
    path.write_text(written.replace("every_steps: 2", "every_steps: 7"))
    assert main(["generate", "run", "--max-new-tokens", "1"]) == 0
    assert "checkpoint.every_steps: 2 before, 7 now" in capsys.readouterr().err
    path.write_text(written.replace("num_heads: 2", "num_heads: 4"))
    assert main(["generate", "run"]) == 2
    said = capsys.readouterr().err
    assert "run/config.yaml was edited or damaged since the run wrote it" in said
    assert "model.num_heads: 2 before, 4 now" in said
    assert main(["manifest", "run", "--write"]) == 0
    assert main(["generate", "run", "--max-new-tokens", "1"]) == 0


def test_a_resumed_run_tells_of_edits_and_keeps_what_shapes_its_numbers(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = work / "run" / "config.yaml"
    written = path.read_text()
    go_on = ["train", "config.yaml", "--run-dir", "run", "--resume", "--set", "training.max_steps=3"]
    path.write_text(written.replace("batch_size: 4", "batch_size: 8"))
    assert main(["train", "run/config.yaml", "--run-dir", "run", "--resume"]) == 2
    assert "training.batch_size: 4 before, 8 now" in capsys.readouterr().err
    assert main(go_on) == 0
    assert "training.batch_size: 4 before, 8 now" in capsys.readouterr().err
    assert "batch_size: 4" in path.read_text()
    path.write_text("{")
    assert main([*go_on[:-1], "training.max_steps=4"]) == 0
    assert "run/config.yaml cannot be read, and is written again" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["data.json", "tokenizer/shoal-tokenizer.json"])
def test_a_file_that_a_run_wrote_once_is_refused_by_name_when_it_is_damaged(
    work: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = next((work / "run").glob("tokenizer/*")) if name.startswith("tokenizer") else work / "run" / name
    flip(path, len(path.read_bytes()) // 2)
    for command in (["generate", "run"], ["eval", "run"], ["train", "config.yaml", "--run-dir", "run", "--resume"]):
        assert main(command) == 2
        assert path.name in capsys.readouterr().err


def test_a_damaged_record_of_the_settings_is_told_and_written_again(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(work / "run" / "provenance.json", 100)
    assert main(["train", "config.yaml", "--run-dir", "run", "--resume", "--set", "training.max_steps=3"]) == 0
    assert "provenance.json is not as manifest.json beside it says" in capsys.readouterr().err
    assert main(["manifest", "run"]) == 0
