"""Whatever is damaged in the files of a run or of an export: every command recovers exactly, or names the file; none fails or waits."""

from __future__ import annotations

import random
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from shoal import train
from shoal.cli.main import main
from shoal.data.text.tokenizers.own import CharacterTokenizer
from shoal.errors import ShoalError
from shoal.manifest import check_manifest, write_manifest
from shoal.runs.folder.checkpoint import Checkpoints, digest_of, load_weights, read_checkpoint, save_weights
from shoal.runs.folder.run_reader import INVITATION
from shoal.runs.invitation import CoordinatorSecrets, GuestList, Invitation
from shoal.runs.owner import OwnerFile, write_owner_file
from shoal.transports.keys import new_keys
from tests.support.damages import damaged, flip, no_hang
from tests.support.small_runs import train_and_export_text

DAMAGES = 4
"""Of each command below; `tests/chaos` has many more."""
FLIPS = 12
"""Of each kind of file that is read alone."""
MORE = """\
training: {max_steps: 4, batch_size: 4, device: cpu}
logging: {every_steps: 1}
"""
UNCHECKED = ("metrics.jsonl", "events.jsonl", "history.jsonl", "changes.jsonl", "lock", "latest", "spare-journal")
"""Figures and messages for people, which no number of a run is computed from; and files that are made again."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one process, its export, and a run with two workers."""
    folder = tmp_path_factory.mktemp("made")
    train_and_export_text(folder, MORE)
    overrides = ["data.source.name=digits", "training.epochs=1", "training.batch_size=64", "logging.every_steps=1"]
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train("starter", workers=2, overrides=overrides, model=network, run_dir=folder / "shared", progress=False)
    return folder


class Command(NamedTuple):
    """A command, the folder whose files are damaged, and what it leads to besides its output."""

    words: tuple[str, ...]
    folder: str
    leads_to: Callable[[], str] = lambda: ""


def last_weights() -> str:
    return "".join(digest_of(load_file(path)) for path in sorted(Path("run/checkpoints").glob("step-*5/weights.safetensors")))


def exported() -> str:
    return digest_of(load_weights(Path("again/model.safetensors"))) if Path("again").exists() else ""


COMMANDS = {
    "generate-run": Command(("generate", "run", "--max-new-tokens", "4"), "run"),
    "generate-export": Command(("generate", "export", "--max-new-tokens", "4"), "export"),
    "eval": Command(("eval", "run"), "run"),
    "export": Command(("export", "run", "again"), "run", exported),
    "resume": Command(
        ("train", "config.yaml", "--run-dir", "run", "--resume", "--set", "training.max_steps=5", "--log-level", "WARNING"),
        "run",
        last_weights,
    ),
    "status": Command(("status", "run"), "run"),
    "status-shared": Command(("status", "shared"), "shared"),
    "runs": Command(("runs", "."), "shared"),
    "audit": Command(("audit", "shared"), "shared"),
    "repair": Command(("repair", "shared"), "shared"),
    "manifest": Command(("manifest", "export"), "export"),
}


class Outcome(NamedTuple):
    code: int
    said: str
    result: str

    def is_same(self, other: Outcome) -> bool:
        return (self.code, self.result) == (other.code, other.result)


def outcome(command: Command, capsys: pytest.CaptureFixture[str], what: str = "") -> Outcome:
    capsys.readouterr()
    with no_hang(f"{command.words}: {what}"):
        code = main(command.words)
    said = capsys.readouterr()
    figures = re.sub(r"[\d.]+ (s|min|h)\b|as of .* ago|samples_per_s .*", "", said.out)
    return Outcome(code, said.out + said.err, f"{figures} {command.leads_to()}")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_recovers_exactly_or_names_the_damaged_file(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    command, chance = COMMANDS[name], random.Random(name)
    shutil.copytree(made, tmp_path / "whole")
    monkeypatch.chdir(tmp_path / "whole")
    whole = outcome(command, capsys)
    files = sorted(path.relative_to(made) for path in (made / command.folder).rglob("*") if path.is_file() and path.stat().st_size)
    for number in range(DAMAGES):
        copy = tmp_path / f"damaged {number}"
        shutil.copytree(made, copy)
        monkeypatch.chdir(copy)
        path = chance.choice(files)
        what = damaged(path, chance)
        found = outcome(command, capsys, what)
        assert found.code in (0, 1, 2), what
        named = path.name in found.said or path.parent.name in found.said
        assert found.is_same(whole) or named or path.name in UNCHECKED, f"{command.words}, {what}: {found}"
        shutil.rmtree(copy)


# --- files that are read alone ---------------------------------------------------------------------------


def _secrets(folder: Path) -> Any:
    return CoordinatorSecrets.of(folder)


def _write_secrets(folder: Path) -> None:
    CoordinatorSecrets("token", new_keys(), 5, 3, "tcp://127.0.0.1:5", True).save(folder)


def _write_weights(folder: Path) -> None:
    save_weights(folder / "start.safetensors", {"model.a": torch.arange(6.0), "model.b": torch.ones(2, 2, dtype=torch.bfloat16)})


def _weights(folder: Path) -> Any:
    return {name: value.tolist() for name, value in load_weights(folder / "start.safetensors").items()}


def _checkpoint(folder: Path) -> Any:
    found = read_checkpoint(folder / "step-00000003")
    return {name: value.tolist() for name, value in found.weights.items()}, str(found.state), found.step


def _manifest(folder: Path) -> Any:
    return check_manifest(folder)


def _write_manifest(folder: Path) -> None:
    (folder / "weights").write_bytes(b"12345")
    (folder / "config.json").write_bytes(b"{}")
    write_manifest(folder)


ALONE: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "secrets": (_write_secrets, _secrets),
    "guests": (lambda folder: GuestList(folder).invite("ann", 2), lambda folder: GuestList(folder).all()),
    "owner": (
        lambda folder: write_owner_file(folder, Invitation("tcp://127.0.0.1:5", "token", None)),
        lambda folder: OwnerFile.read(folder / "owner.json"),
    ),
    "invitation": (
        lambda folder: INVITATION.write(folder / "invitation.json", {"line": "shoal join …", "token": "t"}),
        lambda folder: [(INVITATION.read(folder / "invitation.json") or {})[name] for name in ("line", "token")],
    ),
    "weights": (_write_weights, _weights),
    "checkpoint": (
        lambda folder: Checkpoints(folder, 2).save(3, {"a": torch.arange(6.0)}, {"n": 3, "t": torch.ones(3)}),
        _checkpoint,
    ),
    "manifest": (_write_manifest, _manifest),
    "tokenizer": (
        lambda folder: CharacterTokenizer.from_texts(["the quick brown fox"]).save(folder),
        lambda folder: __import__("shoal.data", fromlist=["data"]).load_tokenizer(str(folder)).alphabet,
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_flipped_bit_in_a_file_is_refused_by_its_name_or_changes_nothing(tmp_path: Path, name: str) -> None:
    write, read = ALONE[name]
    write(tmp_path)
    whole, chance = read(tmp_path), random.Random(name)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.name != "latest")
    for _ in range(FLIPS):
        path = chance.choice(files)
        before = path.read_bytes()
        what = flip(path, chance)
        try:
            assert read(tmp_path) == whole, what
        except ShoalError as error:
            told = str(error)
        else:
            told = path.name
        assert path.name in told or path.parent.name in told, what
        path.write_bytes(before)


def test_an_audit_goes_by_the_settings_that_the_run_wrote(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shoal.cli.audit import _settings

    shutil.copytree(made / "shared", tmp_path / "shared")
    before, config = _settings(tmp_path / "shared"), tmp_path / "shared" / "config.yaml"
    config.write_text(re.sub(r"(?m)^  kind: .*$", "  kind: local", config.read_text()))
    assert _settings(tmp_path / "shared")["strategy"]["kind"] == before["strategy"]["kind"]


# --- a disk that is full -------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 3000, 20_000])
def test_a_file_that_cannot_be_written_is_named(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], room: int
) -> None:
    """`room`: the most bytes of a file, as an administrator may limit them; a full disk fails at the same places."""
    shutil.copytree(made, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    commands = [
        ["train", "config.yaml", "--run-dir", "new"],
        ["train", "config.yaml", "--run-dir", "run", "--resume", "--set", "training.max_steps=5"],
        ["export", "run", "again"],
        ["manifest", "export", "--write"],
    ]
    capsys.readouterr()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    codes = list[int]()
    for words in commands:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            codes.append(main(words))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        said = capsys.readouterr().err
        assert codes[-1] == 0 or re.search(r"(cannot (write|save|make) |warning: ).*(new|run|again|export)/\S+", said), (words, said)
    assert codes[:2] == [2, 2] or room > 3000
