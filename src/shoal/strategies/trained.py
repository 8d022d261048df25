"""What a finished run is used for: its networks, without its data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shoal import data, models, tasks
from shoal.config import Run
from shoal.engines import SingleEngine
from shoal.engines.single import choose_device
from shoal.errors import ShoalError
from shoal.strategies.assembly import config_of, write_text
from shoal.worker import RunDirectory
from shoal.worker.checkpoint import Checkpoint, find, read_weights


class Shapes(NamedTuple):
    """What the networks must know of the data, kept with the run."""

    image_shape: tuple[int, int, int] | None
    num_classes: int | None
    vocab_size: int | None


class Trained(NamedTuple):
    """A run's networks with the weights of its newest checkpoint, or of its copy on the hub."""

    run: Run
    task: tasks.Task
    checkpoint: Checkpoint
    tokenizer: data.Tokenizer | None
    root: Path


def open_run(path: str, warn: Callable[[str], None]) -> Trained:
    """The networks of a past run, without its data. Raises ShoalError."""
    folder = Path(path)
    root = folder.parent.parent if (folder / "state.json").exists() else folder
    pushed = root / "model.safetensors"  # a copy from the hub
    if not (root / "config.yaml").exists() or not (pushed.exists() or (root / "provenance.json").exists()):
        raise ShoalError(f"there is no run at {path}: `shoal runs` lists those there are")
    run = config_of(RunDirectory(root))
    try:
        raw: dict[str, Any] = json.loads((root / "data.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ShoalError(f"the run at {path} was cut off before it began: it has no data.json") from None
    shape = raw["image_shape"]
    shapes = Shapes(tuple(shape) if shape else None, raw["num_classes"], raw["vocab_size"])
    tokenizer = data.load_tokenizer(str(root / "tokenizer")) if (root / "tokenizer").is_dir() else None
    task = tasks.build(run, models.build(run, shapes), shapes, tokenizer.eos_id if tokenizer else None)
    checkpoint = read_weights(pushed) if pushed.exists() else find(path, warn)
    SingleEngine(run, task, choose_device(run.training.device), 1).load_weights(checkpoint.weights)
    for player in task.players.values():
        player.eval()
    return Trained(run, task, checkpoint, tokenizer, root)


def generate_text(trained: Trained, prompt: str, *, max_new_tokens: int, seed: int, decoding: Any = None) -> Iterator[str]:
    """The text that follows a prompt, piece by piece."""
    if trained.tokenizer is None:
        raise ShoalError(f"a model of kind {trained.run.model.kind} does not write text; --grid draws images")
    yield from write_text(
        trained.task.players["model"], trained.tokenizer, prompt, max_new_tokens, seed, decoding or trained.run.serving.decoding
    )
