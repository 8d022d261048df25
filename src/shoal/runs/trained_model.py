"""Opens the networks of a past run, without its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from shoal import data, models, tasks
from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.schema.model import HuggingFace
from shoal.engines import SingleEngine
from shoal.engines.single import choose_device
from shoal.errors import ShoalError
from shoal.manifest import check_manifest
from shoal.models.huggingface.as_gpt import weights_for
from shoal.runs.build_run import stream_text
from shoal.runs.folder import plugin_record
from shoal.runs.folder.checkpoint import read_weights
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.folder.run_reader import DATA
from shoal.runs.monitoring.best_weights import find_weights
from shoal.runs.training.initial_weights import passage_index_of
from shoal.updates.state_packing import Checkpoint


class TrainedModel(NamedTuple):
    """A run's networks with the weights of its newest checkpoint, or of its copy on the hub. The checkpoint has the weights to use, by the
    names of these networks, and no state."""

    run: Run
    task: tasks.Task
    checkpoint: Checkpoint
    tokenizer: data.Tokenizer | None
    root: Path
    passages: Path | None = None
    """The index for retrieval."""


def open_run(path: str, warn: Callable[[str], None]) -> TrainedModel:
    """The networks of a past run, without its data. Raises ShoalError."""
    folder = Path(path)
    root = folder.parent.parent if (folder / "state.json").exists() else folder
    pushed = root / "model.safetensors"  # a copy from the hub
    if not (root / "config.yaml").exists() or not (pushed.exists() or (root / "provenance.json").exists()):
        raise ShoalError(f"there is no run at {path}: `shoal runs` lists those there are")
    if pushed.exists():
        check_manifest(root)
    plugin_record.expect_those_of(root)
    run = RunDirectory(root).config() if pushed.exists() else RunDirectory(root).config_as_written(warn)
    raw = DATA.read(root / "data.json")
    if raw is None:
        raise ShoalError(f"the run at {path} was cut off before it began: it has no data.json")
    shape = tuple(raw["image_shape"]) if raw["image_shape"] else None
    tokenizer = data.load_tokenizer(str(root / "tokenizer")) if (root / "tokenizer").is_dir() else None
    eos_id = tokenizer.eos_id if tokenizer else None
    shapes = DataShapes(shape, raw["num_classes"], raw["vocab_size"], eos_id)
    if isinstance(run.model, HuggingFace):  # what is exported and served has the layers of transformers
        run = run.replace(model=run.model.replace(layers="original"))
    task = tasks.build(run, models.build(run, shapes), shapes)
    found = read_weights(pushed) if pushed.exists() else find_weights(path, warn)
    checkpoint = Checkpoint(found.path, found.step, _named_as_in(task, found.weights_to_use), {})
    SingleEngine(run, task, choose_device(run.training.device), 1).load_weights(checkpoint.weights)
    for player in task.players.values():
        player.eval()
    return TrainedModel(run, task, checkpoint, tokenizer, root, passage_index_of(root))


def _named_as_in(task: tasks.Task, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names that they have in the networks of a task, whichever layers trained."""
    found = dict(saved)
    for player, network in task.players.items():
        prefix = f"{player}.trunk." if hasattr(network, "trunk") else f"{player}."
        own = {name.removeprefix(prefix): found.pop(name) for name in saved if name.startswith(prefix)}
        found |= {f"{prefix}{name}": value for name, value in weights_for(getattr(network, "trunk", network), own).items()}
    return found


def generate_text(
    trained: TrainedModel, prompt: str, *, max_new_tokens: int, seed: int, decoding: Any = None, context: str = ""
) -> Iterator[str]:
    """Yield the text that the model generates after a prompt. `context`: a side text that the model reads."""
    if trained.tokenizer is None:
        raise ShoalError(f"a model of kind {trained.run.model.kind} does not write text; --grid draws images")
    if context and not getattr(getattr(trained.run.model, "cross_attention", None), "enabled", False):
        raise ShoalError("this model reads no context: it was trained without model.cross_attention.enabled")
    decoding, beside = decoding or trained.run.serving.decoding, side_texts_for(trained, context)
    yield from stream_text(trained.task.players["model"], trained.tokenizer, prompt, max_new_tokens, seed, decoding, beside)


def side_texts_for(trained: TrainedModel, context: str = "") -> models.SideTexts | None:
    """The side texts of the model: passages retrieved from its index, and a context."""
    assert trained.tokenizer is not None
    finder = data.open_finder(trained.run, trained.passages, trained.tokenizer) if trained.passages else None
    return models.make_side_texts(finder, [trained.tokenizer.encode(context)] if context else ())
