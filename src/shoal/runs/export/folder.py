"""Writes a run's networks into a folder for other programs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from shoal.config import Run
from shoal.data.text.tokenizers.for_transformers import save_for_transformers
from shoal.errors import ShoalError
from shoal.manifest import write_manifest
from shoal.models.gpt import Gpt
from shoal.models.huggingface.adapters import CONFIG, Adapters, read_adapters
from shoal.models.huggingface.from_gpt import as_transformers
from shoal.models.huggingface.model import HuggingFace
from shoal.models.huggingface.pretrained import save
from shoal.models.layers.value_head import ScoreModel
from shoal.models.moe import Moe
from shoal.runs.export.gguf_file import gguf_package, write_gguf, write_gguf_adapters
from shoal.runs.folder import plugin_record
from shoal.runs.folder.checkpoint import Checkpoints, save_weights
from shoal.runs.folder.sharded_checkpoint import write_dcp
from shoal.runs.trained_model import TrainedModel, open_model, open_run


def export(path: str, folder: Path, warn: Callable[[str], None], *, adapters: bool = False, transformers: bool = False) -> None:
    """Write a run's networks to a new folder, which appears whole or not at all. Raises ShoalError.

    A Hugging Face model is written for transformers, or with `adapters` only its LoRA matrices, for peft. A model of Shoal is written for
    `shoal generate`, or with `transformers` for transformers, where one of its models computes the same.
    """
    _refuse_full(folder)
    trained = open_model(path, warn, to_write=True)
    write = _write_adapters if adapters else _write_for_transformers if transformers else _write
    _appear(folder, lambda partial: write(trained, partial))


def export_gguf(path: str, file: Path, kind: str, warn: Callable[[str], None], *, adapters: bool = False) -> None:
    """Write a language model, with adapters merged, or with `adapters` these alone, as a GGUF file with matrices of this type, of
    `GGUF_TYPES`. Raises ShoalError."""
    gguf_package()
    trained, name = open_model(path, warn, to_write=True), Path(path).resolve().name
    if trained.tokenizer is None:
        raise ShoalError(f"the model at {path} writes no text, and llama.cpp reads only language models")
    if not adapters:
        write_gguf(transformers_model(trained), trained.tokenizer, kind, file, name, warn)
        return
    found = _adapters_of(path, trained)
    write_gguf_adapters(transformers_model(trained), found, kind, file, name)


def _adapters_of(path: str, trained: TrainedModel) -> Adapters:
    """The LoRA matrices of a run, or of a PEFT folder. Raises ShoalError."""
    if (Path(path) / CONFIG).is_file():
        return read_adapters(Path(path))
    with tempfile.TemporaryDirectory() as folder:
        _write_adapters(trained, Path(folder))
        return read_adapters(Path(folder))


def export_dcp(path: str, folder: Path, warn: Callable[[str], None]) -> None:
    """Write a model's weights as a checkpoint of torch.distributed.checkpoint, by their names in the networks: `player.name`. Raises
    ShoalError."""
    _refuse_full(folder)
    trained = open_model(path, warn)
    weights = {
        f"{player}.{name}": value for player, network in trained.task.players.items() for name, value in network.state_dict().items()
    }
    _appear(folder, lambda partial: write_dcp(partial, weights))


def _write_for_transformers(trained: TrainedModel, folder: Path) -> None:
    if trained.run.model.kind == "huggingface":
        _write(trained, folder)
        return
    save(transformers_model(trained), folder)
    if trained.tokenizer is not None:
        save_for_transformers(trained.tokenizer, folder)


def transformers_model(trained: TrainedModel) -> Any:
    """The language model as one of transformers, with LoRA adapters merged. Raises ShoalError."""
    settings: Any = trained.run.model
    model = trained.task.players.get("model")
    eos_id = trained.tokenizer.eos_id if trained.tokenizer is not None else None
    if isinstance(model, HuggingFace):
        return model.merged()
    if isinstance(model, Gpt | Moe):
        return as_transformers(model, settings, eos_id)
    what = "gives scores and writes no text" if isinstance(model, ScoreModel) else f"is of kind {settings.kind}"
    raise ShoalError(f"the model {what}, and Transformers has none that computes the same: export it without --transformers and --gguf")


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


def export_final_model(run: Run, folder: Path) -> Path | None:
    """Export the model of a run that has ended into its folder, if transformers can load it and there are weights: the best that were kept,
    else the last. Return that folder, else None."""
    if run.model.kind != "huggingface" or not Checkpoints(folder / "checkpoints", 1).all():
        return None
    trained = open_run(str(folder), lambda text: None, to_write=True)
    written = {folder / "model": _write}
    if getattr(run.model, "lora", None) is not None:
        written[folder / "adapters"] = _write_adapters
    for place, write in written.items():
        shutil.rmtree(place, ignore_errors=True)  # from before the run was resumed
        _appear(place, partial(write, trained))
    return folder / "model"


def _write(trained: TrainedModel, folder: Path) -> None:
    if trained.run.model.kind == "huggingface":
        model: Any = trained.task.players["model"]
        model.save(folder)
        if trained.tokenizer is not None:
            trained.tokenizer.save(folder)
        return
    save_weights(folder / "model.safetensors", trained.checkpoint.weights)
    for name in ("config.yaml", "data.json", plugin_record.FILE):
        if (trained.root / name).exists():
            shutil.copy(trained.root / name, folder / name)
    if trained.tokenizer is not None:
        trained.tokenizer.save(folder / "tokenizer")
    if trained.passages is not None:
        shutil.copytree(trained.passages, folder / "passages")
