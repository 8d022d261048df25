"""Processes that load data ahead: they start beside any threads, and end with the process that trains, however that ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.config.schema.data import Loader
from shoal.data import Batch, ShardFeed
from shoal.data.interfaces import Indices, Samples
from shoal.errors import ShoalError
from shoal.python.train import train
from tests.support.eventually import eventually

pytestmark = pytest.mark.whole

PROGRAM = """
import torch
import shoal
class Mine(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, number):
        return {"x": torch.tensor([float(number)]), "pid": torch.tensor(__import__("os").getpid())}
def loss(model, batch):
    open(f"loaded-{int(batch['pid'][0])}", "w").close()
    return model(batch["x"]).square().mean()
settings = {"training": {"max_steps": 1_000_000, "batch_size": 2, "device": "cpu"}, "data": {"loader": {"num_workers": 1}}}
if __name__ == "__main__":
    shoal.train(settings, model=torch.nn.Linear(1, 1), data=Mine(), loss=loss, run_dir="run", progress=False)
"""


class Pids(Samples):
    """Samples that tell which process read them."""

    def __len__(self) -> int:
        return 8

    def batch(self, indices: Indices) -> Batch:
        return {"pid": torch.full((len(indices),), os.getpid())}


def test_they_are_not_forked_from_the_process_that_trains() -> None:
    """A fork beside threads copies locks that nobody will open again."""
    feed = ShardFeed(Pids(), batch_size=4, seed=0, loader=Loader(num_workers=1))
    pid = int(next(feed)["pid"][0])
    assert parent_of(pid) != os.getpid()
    feed.close()
    wait_until_gone(pid)


def test_data_that_cannot_be_sent_is_refused() -> None:
    samples = Pids()
    samples.why = lambda: None  # type: ignore[attr-defined]
    feed = ShardFeed(samples, batch_size=4, seed=0, loader=Loader(num_workers=2))
    with pytest.raises(ShoalError, match=r"cannot be sent to 2 processes that load it ahead: .*lambda.*data\.loader\.num_workers to 0"):
        next(feed)


def test_they_end_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    with program(tmp_path, PROGRAM) as process:
        pid = loading_in(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until_gone(pid)


def test_a_program_that_trains_when_it_is_imported_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python marks a process that imports the program of the process that started it."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ShoalError, match='put the training under `if __name__ == "__main__":`'):
        train({})


@contextlib.contextmanager
def program(folder: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "program.py").write_text(text)
    process = subprocess.Popen([sys.executable, "program.py"], cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def loading_in(folder: Path) -> int:
    """The process whose batches have arrived."""
    eventually(lambda: list(folder.glob("loaded-*")), "no batch came")
    return int(next(folder.glob("loaded-*")).name.removeprefix("loaded-"))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_until_gone(pid: int) -> None:
    eventually(lambda: not Path(f"/proc/{pid}").exists(), f"process {pid} is still there")
