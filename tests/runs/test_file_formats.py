"""Every file that Shoal reads back carries the number of its format; one of another format is refused by name, and stays as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from shoal.data import load_tokenizer
from shoal.data.text.tokenizers import library
from shoal.data.text.tokenizers.own import CharacterTokenizer
from shoal.errors import ShoalError
from shoal.launch.postgres.connection_file import ConnectionFile
from shoal.launch.up_file import running_process, written_while_up
from shoal.protocol.messages import SeatAssigned
from shoal.runs import converted_models
from shoal.runs.folder import plugin_record
from shoal.runs.folder.checkpoint import Checkpoints
from shoal.runs.folder.run_reader import DATA, PROVENANCE, STATUS, SUMMARY, RunFolder, read_summary
from shoal.runs.folder.worker_checkpoint import HALF, SaveSchedule, WorkerCheckpoints
from shoal.runs.invitation import CoordinatorSecrets, GuestList, Invitation, write_join_command
from shoal.runs.owner import OwnerFile, write_owner_file
from shoal.runs.training.initial_weights import passage_index_of
from shoal.transports.keys import new_keys
from shoal.updates.worker_state import RoundStart


class Kind(NamedTuple):
    """A kind of file: how it gets into a folder, and what reads it from there."""

    file: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]


def write_up_file(folder: Path) -> None:
    with written_while_up(folder):
        content = (folder / "up.json").read_bytes()
    (folder / "up.json").write_bytes(content)


def write_plugin_record(folder: Path) -> None:
    (folder / "plugins.json").write_text('{"format": 1, "plugins": {}}')


def write_index(folder: Path) -> None:
    pytest.importorskip("faiss", reason="retrieval needs faiss-cpu (shoal[rag])")
    from shoal.data.retrieval.encoders import HashedWords
    from shoal.data.retrieval.index import build_index
    from shoal.data.retrieval.passages import cut_passages
    from shoal.data.text.documents import Document

    build_index(cut_passages([Document("cats drink milk", origin="a")], 64, 100), HashedWords(), folder / "index", {})


def read_index(folder: Path) -> object:
    from shoal.data.retrieval.index import open_index

    return open_index(folder / "index")


DESCRIBED = {"name": "digits", "fingerprint": "f", "image_shape": None, "num_classes": 10, "vocab_size": None}
KINDS = [
    Kind("owner.json", lambda to: write_owner_file(to, Invitation("tcp://h:1", "t", None)), lambda at: OwnerFile.read(at / "owner.json")),
    Kind("secrets.json", CoordinatorSecrets("t", new_keys()).save, CoordinatorSecrets.of),
    Kind("guests.json", lambda to: GuestList(to).invite("ann", 2), lambda at: GuestList(at).all()),
    Kind("invitation.json", lambda to: write_join_command(to, "shoal join"), lambda at: RunFolder(at).invitation()),
    Kind("postgres.json", ConnectionFile("h", 1, "d", "u", "p").save, ConnectionFile.of),
    Kind("up.json", write_up_file, running_process),
    Kind("data.json", lambda to: DATA.write(to / "data.json", DESCRIBED), passage_index_of),
    Kind("status.json", lambda to: STATUS.write(to / "status.json", {"members": []}), lambda at: RunFolder(at).status()),
    Kind("summary.json", lambda to: SUMMARY.write(to / "summary.json", {"status": "completed"}), read_summary),
    Kind("provenance.json", lambda to: PROVENANCE.write(to / "provenance.json", {"settings": {}}), lambda at: RunFolder(at).provenance()),
    Kind("plugins.json", write_plugin_record, plugin_record.expect_those_of),
    Kind("shoal_tokenizer.json", CharacterTokenizer("abc").save, lambda at: load_tokenizer(str(at))),
    Kind("index/manifest.json", write_index, read_index),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.file)
def test_a_file_of_another_format_is_refused_by_name(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("dialect: shoal\n")
    kind.write(tmp_path)
    kind.read(tmp_path)
    file = tmp_path / kind.file
    content = json.loads(file.read_text())
    key = "schema" if "schema" in content else "format"
    number = content[key]
    for other, told in ((number + 1, rf"{kind.file} has [\w ]+ format {number + 1}"), (None, rf"{kind.file} has no [\w ]+ format number")):
        file.write_text(json.dumps(content | {key: other}))
        with pytest.raises(ShoalError, match=rf"{told}, and this version of Shoal reads format {number}: \w+"):
            kind.read(tmp_path)
        assert json.loads(file.read_text()) == content | {key: other}


def test_a_students_role_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    from shoal.transports.database_address import parse
    from shoal.transports.postgres import enrolment

    access = parse("postgresql://class:token@localhost:1/shoal")
    file = tmp_path / f"class-{enrolment._class_of(access, None)}.json"
    file.write_text('{"format": 2, "user": "ann", "password": "secret"}')
    with pytest.raises(ShoalError, match=f"{file.name} has student role file format 2, and this version of Shoal reads format 1"):
        enrolment.own_access(access, None, tmp_path, 0.1)


def test_a_half_round_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    said = list[str]()
    engine: Any = SimpleNamespace(world=SimpleNamespace(first=True))
    checkpoints = WorkerCheckpoints(engine, tmp_path, None, SaveSchedule(lambda version: True, 1, "shape"), 1, said.append)
    Checkpoints(tmp_path / HALF, 1).save(3, {"weight": torch.zeros(2)}, {"format": 2, "half": None})
    assert checkpoints.find_partial_round(RoundStart(2, 17, SeatAssigned(1, 0, 12))) is None
    assert "step-00000003 has worker checkpoint format 2, and this version of Shoal reads format 1" in said[0]


def test_a_cached_tokenizer_of_another_format_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.train_bpe(["some text to learn"], tmp_path)
    (before,) = tmp_path.glob("bpe-*.json")
    before.write_text("of another format")
    monkeypatch.setattr(library, "_CACHE_FORMAT", 2)
    assert library.train_bpe(["some text to learn"], tmp_path).decode([0]) is not None
    assert len(list(tmp_path.glob("bpe-*.json"))) == 2


def test_a_converted_model_of_another_format_is_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Path]()

    def convert(file: Path, partial: Path) -> None:
        (partial / "config.json").write_text("{}")
        made.append(file)

    monkeypatch.setattr(converted_models, "_convert_gguf", convert)
    monkeypatch.setattr(converted_models, "state_folder", lambda: tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    first = converted_models.converted(tmp_path / "model.gguf")
    assert converted_models.converted(tmp_path / "model.gguf") == first
    assert len(made) == 1
    monkeypatch.setattr(converted_models, "_CACHE_FORMAT", converted_models._CACHE_FORMAT + 1)
    assert converted_models.converted(tmp_path / "model.gguf") != first
    assert len(made) == 2


def test_a_converted_model_that_was_damaged_is_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converted_models, "_convert_gguf", lambda file, partial: (partial / "config.json").write_text("{}"))
    monkeypatch.setattr(converted_models, "state_folder", lambda: tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (converted_models.converted(tmp_path / "model.gguf") / "config.json").write_text("[]")
    assert (converted_models.converted(tmp_path / "model.gguf") / "config.json").read_text() == "{}"
