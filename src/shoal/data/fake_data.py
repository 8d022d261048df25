"""Data that is not on this machine, as far as a simulation of times must know it: how many samples there are, and their shapes."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from shoal.config import Run
from shoal.config.schema.data import DataSource, HubDataset, Images, Mixture, Mnist
from shoal.config.schema.task import TEXT
from shoal.data.images.mnist import CLASSES
from shoal.data.images.samples import Target
from shoal.data.images.source import present
from shoal.data.interfaces import Batch, Indices, Samples
from shoal.data.loaded_data import Data, Info
from shoal.data.splits import HELD_OUT_SHARE
from shoal.data.text.tokenizers import load_tokenizer
from shoal.data.user_data import UserStream
from shoal.errors import ShoalError

_MNIST, _MNIST_SIZE = 60_000, 28
_COLOURS = 3


class FakeSamples(Samples):
    """A given number of samples of the right shape, with random contents."""

    def __init__(self, info: Info, count: int, length: int) -> None:
        """`length`: tokens of a text."""
        self._info, self._count, self._length = info, count, length

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Indices) -> Batch:
        size, info = len(indices), self._info
        if info.image_shape is None:
            tokens_BL = torch.randint(info.vocab_size or 1, (size, self._length))
            return {"input_ids": tokens_BL, "labels": tokens_BL}
        labels = {} if info.num_classes is None else {"label": torch.randint(info.num_classes, (size,))}
        return {"image": torch.rand(size, *info.image_shape)} | labels


def is_local(source: DataSource | None) -> bool:
    """Whether a source can be read without a download. Those of plugins and programs know by themselves."""
    if isinstance(source, Mixture):
        return all(is_local(part.source) for part in source.parts)
    if isinstance(source, Images):
        return present(Path(source.path).expanduser()) is not None
    if isinstance(source, HubDataset):
        return Path(source.name).expanduser().exists()
    path = getattr(source, "path", "")
    return path == "" or (path is not None and Path(path).expanduser().exists())


def make_fake_data(run: Run, count: int | None) -> Data:
    """Data in place of that of a run, which is not read. `count`: how many samples it has; null: what the settings say of it, or no end
    where the run ends with its steps. Raises ShoalError where nothing says how long the run is, or what shape a sample has."""
    known = count or _known_count(run)
    if known is None and run.training.max_steps is None:
        raise ShoalError(
            f"data.source: {_name(run)} is not on this machine, so the number of its samples is not known: give it with --samples N, or "
            "set training.max_steps"
        )
    told = f"{_name(run)}, which is not read: {'no end' if known is None else f'{known:,} samples'} supposed"
    info = _text(run, told) if run.chosen_task.needs in TEXT else _images(run, told)
    samples = FakeSamples(info, known or 1, run.data.sequence_length or 1)
    return Data(samples if known is not None else UserStream(itertools.repeat(0), samples.batch), None, info)


def _name(run: Run) -> str:
    source = run.data.source
    return str(getattr(source, "name", None) or getattr(source, "path", None) or getattr(source, "kind", "the data"))


def _known_count(run: Run) -> int | None:
    settings = run.data
    if settings.max_train_samples is not None:
        return settings.max_train_samples
    if settings.max_samples is not None:
        return max(1, round(settings.max_samples * (1 - HELD_OUT_SHARE)))
    return _MNIST if isinstance(settings.source, Mnist) else None


def _text(run: Run, told: str) -> Info:
    size = getattr(run.model, "vocab_size", None)
    if size is None:
        token = run.hub.token.reveal() if run.hub.token else None
        try:
            size = load_tokenizer(run.data.tokenizer or "bytes", token=token).vocab_size
        except ShoalError as error:
            mended = "set model.vocab_size" if hasattr(run.model, "vocab_size") else "set data.tokenizer to one that is here"
            raise ShoalError(f"how many tokens there are is not known without the tokenizer: {mended} ({error})") from None
    return Info("text", told, vocab_size=size)


def _images(run: Run, told: str) -> Info:
    target, model, is_mnist = Target.of(run), run.model, isinstance(run.data.source, Mnist)
    size, numbers = target.size or (_MNIST_SIZE if is_mnist else None), getattr(model, "input_dim", None)
    if size is None and numbers is None:
        raise ShoalError("the size of an image is not known without the data: set model.input_dim")
    colours = target.channels or (1 if is_mnist else _COLOURS)
    classes = CLASSES if is_mnist else getattr(model, "output_dim", None)
    if classes is None and run.chosen_task.needs == "labels":
        raise ShoalError("the number of classes is not known without the data: set model.output_dim")
    return Info("image", told, image_shape=(colours, size, size) if size else (1, 1, numbers or 0), num_classes=classes)
