"""A run goes on with the data that it began with, and notices when that is another; a stream has epochs, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from shoal import train
from shoal.cli.main import main
from shoal.data import Data, Info, fingerprint, local_fingerprint
from shoal.data.text.context_text import Origins
from shoal.data.text.samples import PackedText
from shoal.data.user_data import UserSamples
from shoal.runs.monitoring.recorder import SharedDataProgress

NAMELESS = Origins([], torch.zeros(0, 2).long())
TEXT = """\
dialect: shoal
model: {kind: gpt, hidden_size: 16, num_layers: 1, num_heads: 2, max_seq_len: 16}
data: {source: {kind: text, path: text.txt}, tokenizer: characters}
training: {max_steps: 3, batch_size: 4}
evaluation: {strategy: never}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.yaml").write_text(TEXT)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return tmp_path


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_a_run_alone_does_not_go_on_with_another_text(folder: Path, capsys: pytest.CaptureFixture[str], streaming: str) -> None:
    settings = ["--set", f"data.streaming={streaming}", "--set", "data.tokenizer=bytes"]
    assert main(["train", "text.yaml", "--run-dir", "run", *settings]) == 0
    text = (folder / "text.txt").read_text()
    changed = text[:2000] + ("T" if streaming == "false" else "and ") + text[2001:]
    (folder / "text.txt").write_text(changed)
    assert main(["train", "text.yaml", "--run-dir", "run", "--resume", *settings]) == 2
    told = capsys.readouterr().err
    assert "the data has changed since run began" in told
    assert "--set checkpoint.resume_from=run" in told
    (folder / "text.txt").write_text(text)
    assert main(["train", "text.yaml", "--run-dir", "run", "--resume", *settings]) == 0
    known = json.loads((folder / "run" / "data.json").read_text())
    del known["fingerprint"]
    (folder / "run" / "data.json").write_text(json.dumps(known))
    (folder / "text.txt").write_text(changed)
    assert main(["train", "text.yaml", "--run-dir", "run", "--resume", *settings]) == 2
    assert "data.json is not as manifest.json beside it says" in capsys.readouterr().err


def data_of(samples: Any, kind: Any = "text") -> Data:
    return Data(samples, None, Info(kind, "some"))


def test_one_token_in_the_middle_makes_other_data() -> None:
    tokens = torch.arange(5000 * 8).view(5000, 8)
    other = tokens.clone()
    other[2501, 3] += 1
    assert fingerprint(data_of(PackedText(tokens, tokens, NAMELESS))) == fingerprint(data_of(PackedText(tokens.clone(), tokens, NAMELESS)))
    assert fingerprint(data_of(PackedText(tokens, tokens, NAMELESS))) != fingerprint(data_of(PackedText(other, tokens, NAMELESS)))
    assert local_fingerprint(data_of(PackedText(tokens, tokens, NAMELESS))) != local_fingerprint(
        data_of(PackedText(other, tokens, NAMELESS))
    )


def test_samples_that_are_new_each_time_are_known_by_their_number() -> None:
    class Noise:
        def __init__(self, count: int) -> None:
            self.count = count

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, number: int) -> torch.Tensor:
            return torch.rand(2)

    first, again, more = (data_of(UserSamples(Noise(count), lambda rows: {"x": torch.stack(list(rows))}), "own") for count in (9, 9, 10))
    assert local_fingerprint(first) == local_fingerprint(again)
    assert local_fingerprint(first) != local_fingerprint(more)


# --- epochs of a stream ------------------------------------------------------------------------------------


class Points(IterableDataset[Any]):
    """Forty points, and then no more."""

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(40):
            point = torch.randn(2, generator=generator)
            yield point, int(point.sum() > 0)


@pytest.mark.parametrize("workers", [None, 2])
def test_a_stream_that_ends_is_read_as_often_as_the_epochs_say(tmp_path: Path, workers: int | None) -> None:
    training = {"epochs": 3, "max_steps": 1000, "batch_size": 4, "schedule": {"kind": "constant"}, "device": "cpu"}
    config = {"output_dir": str(tmp_path), "training": training, "checkpoint": {"strategy": "epoch", "keep_last": 9}}
    result = train(config, model=nn.Linear(2, 2), data=Points(), workers=workers, progress=False)
    assert result.summary["status"] == "completed"
    saved = sorted(int(path.name.partition("-")[2]) for path in (result.run_dir / "checkpoints").glob("step-*"))
    if workers is None:
        assert result.summary["samples"] == 3 * 40
        assert saved == [10, 20, 30]
    else:
        assert 3 * 40 <= result.summary["samples"] <= 4 * 40, "until every worker has begun the fourth"
        assert len(saved) == 3


def test_an_epoch_of_a_stream_is_over_when_every_seat_has_begun_the_next() -> None:
    places = {"0": [0, 5], "1": [0, 4]}
    shared = SharedDataProgress(None, places.values)
    for place, over in (([1, 1], False), ([1, 2], False)):
        places["0"] = place
        shared.update()
        assert shared.at_epoch_end is over
    places["1"] = [1, 1]
    shared.update()
    assert (shared.at_epoch_end, shared.epochs) == (True, 1)
    shared.update()
    assert not shared.at_epoch_end
