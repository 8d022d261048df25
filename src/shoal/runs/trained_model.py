"""Opens and exports the networks of a past run, without its data."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from shoal import data, models, tasks
from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.schema.model import Moe
from shoal.engines import SingleEngine
from shoal.engines.single import choose_device
from shoal.errors import ShoalError
from shoal.manifest import check_manifest, write_manifest
from shoal.models.mixtral import as_mixtral
from shoal.models.transformer import Trunk
from shoal.runs.build_run import stream_text
from shoal.runs.folder import plugin_record
from shoal.runs.folder.checkpoint import find_checkpoint, read_weights, save_weights
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.folder.run_reader import DATA
from shoal.runs.training.initial_weights import passage_index_of
from shoal.updates.state_packing import Checkpoint


class TrainedModel(NamedTuple):
    """A run's networks with the weights of its newest checkpoint, or of its copy on the hub."""

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
    task = tasks.build(run, models.build(run, shapes), shapes)
    checkpoint = read_weights(pushed) if pushed.exists() else find_checkpoint(path, warn)
    SingleEngine(run, task, choose_device(run.training.device), 1).load_weights(checkpoint.weights_to_use)
    for player in task.players.values():
        player.eval()
    return TrainedModel(run, task, checkpoint, tokenizer, root, passage_index_of(root))


def export(path: str, folder: Path, warn: Callable[[str], None], *, adapters: bool = False, mixtral: bool = False) -> None:
    """Write a run's networks to a new folder, which appears whole or not at all. Raises ShoalError.

    A Hugging Face model is written for transformers, or with `adapters` only its LoRA matrices, for peft. A model of Shoal is written for
    `shoal generate`, or with `mixtral` a mixture of experts for transformers.
    """
    _refuse_full(folder)
    trained = open_run(path, warn)
    write = _write_adapters if adapters else _write_mixtral if mixtral else _write
    _appear(folder, lambda partial: write(trained, partial))


def _write_mixtral(trained: TrainedModel, folder: Path) -> None:
    settings, model = trained.run.model, trained.task.players["model"]
    if not isinstance(settings, Moe) or not isinstance(model, Trunk):
        raise ShoalError(f"a model of kind {settings.kind} is no mixture of experts: export it without --mixtral")
    as_mixtral(model, settings).save_pretrained(str(folder))
    if trained.tokenizer is not None:
        trained.tokenizer.save(folder)


def _write_adapters(trained: TrainedModel, folder: Path) -> None:
    if trained.run.model.kind != "huggingface":
        raise ShoalError(f"a model of kind {trained.run.model.kind} has no adapters: only models of Hugging Face are trained with LoRA")
    model: Any = trained.task.players["model"]
    model.save_adapters(folder)
    if trained.tokenizer is not None:
        trained.tokenizer.save(folder)


def export_network(model: nn.Module, folder: Path) -> None:
    """Write the network of a program: for transformers where it is one of its models, else its weights by name."""

    def write(partial: Path) -> None:
        save = getattr(model, "save_pretrained", None)
        if save is not None:
            save(str(partial))
        else:
            tensors = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
            save_weights(partial / "model.safetensors", tensors)

    _refuse_full(folder)
    _appear(folder, write)


def _refuse_full(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ShoalError(f"{folder} is there already, and not empty: choose another folder")


def _appear(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder with its manifest, which appears whole or not at all."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        write_manifest(partial)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except (ShoalError, OSError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, ShoalError):
            raise ShoalError(str(error).replace(str(partial), str(folder))) from None
        raise ShoalError(f"cannot write {folder}: {error.strerror or error}") from None


def export_final_model(run: Run, folder: Path, summary: dict[str, Any]) -> Path | None:
    """Export the model of a completed run into its folder, if transformers can load it. Return that folder, else None."""
    if run.model.kind != "huggingface" or summary["status"] != "completed":
        return None
    final = folder / "model"
    shutil.rmtree(final, ignore_errors=True)  # from before the run was resumed
    export(str(folder), final, lambda text: None)
    if getattr(run.model, "lora", None) is not None:
        shutil.rmtree(folder / "adapters", ignore_errors=True)
        export(str(folder), folder / "adapters", lambda text: None, adapters=True)
    return final


def _write(trained: TrainedModel, folder: Path) -> None:
    if trained.run.model.kind == "huggingface":
        model: Any = trained.task.players["model"]
        model.save(folder)
        if trained.tokenizer is not None:
            trained.tokenizer.save(folder)
        return
    save_weights(folder / "model.safetensors", trained.checkpoint.weights_to_use)
    for name in ("config.yaml", "data.json", plugin_record.FILE):
        if (trained.root / name).exists():
            shutil.copy(trained.root / name, folder / name)
    if trained.tokenizer is not None:
        trained.tokenizer.save(folder / "tokenizer")
    if trained.passages is not None:
        shutil.copytree(trained.passages, folder / "passages")


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
