"""Random data in place of data that is not on this machine: a simulation of times needs only the number of samples and their shapes."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from shoal.config import Run
from shoal.config.schema.data import DataSource, HubDataset, Images, Mixture, Mnist
from shoal.config.schema.task import TEXT
from shoal.data.images.mnist import CLASSES
from shoal.data.images.samples import Target
from shoal.data.images.source import find_existing
from shoal.data.interfaces import Batch, Indices, Samples
from shoal.data.loaded_data import Data, Info
from shoal.data.splits import HELD_OUT_SHARE
from shoal.data.text.tokenizers import load_tokenizer
from shoal.data.user_data import UserStream
from shoal.errors import ShoalError

_MNIST, _MNIST_SIZE = 60_000, 28
_RGB = 3


class FakeSamples(Samples):
    """A given number of samples of the right shape, with random contents."""

    def __init__(self, info: Info, count: int, length: int) -> None:
        """`length`: tokens per text."""
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
    """Whether a source can be read without a download. Sources of plugins and programs without a `path` count as local."""
    if isinstance(source, Mixture):
        return all(is_local(part.source) for part in source.parts)
    if isinstance(source, Images):
        return find_existing(Path(source.path).expanduser()) is not None
    if isinstance(source, HubDataset):
        return Path(source.name).expanduser().exists()
    path = getattr(source, "path", "")
    return path == "" or (path is not None and Path(path).expanduser().exists())


def make_fake_data(run: Run, count: int | None) -> Data:
    """Random data with the shapes of a run's data. `count`: number of samples; None: from the settings, or endless if `training.max_steps`
    ends the run. Raises ShoalError if the length of the run or the shape of a sample is unknown."""
    known = count or _known_count(run)
    if known is None and run.training.max_steps is None:
        raise ShoalError(
            f"data.source: {_name(run)} is not on this machine, so the number of its samples is not known: give it with --samples N, or "
            "set training.max_steps"
        )
    name = f"{_name(run)}, which is not read: {'no end' if known is None else f'{known:,} samples'} supposed"
    info = _text_info(run, name) if run.chosen_task.needs in TEXT else _image_info(run, name)
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


def _text_info(run: Run, name: str) -> Info:
    size = getattr(run.model, "vocab_size", None)
    if size is None:
        token = run.hub.token.reveal() if run.hub.token else None
        try:
            size = load_tokenizer(run.data.tokenizer or "bytes", token=token).vocab_size
        except ShoalError as error:
            remedy = "set model.vocab_size" if hasattr(run.model, "vocab_size") else "set data.tokenizer to a local one"
            raise ShoalError(f"the size of the vocabulary is not known without the tokenizer: {remedy} ({error})") from None
    return Info("text", name, vocab_size=size)


def _image_info(run: Run, name: str) -> Info:
    target, model, is_mnist = Target.of(run), run.model, isinstance(run.data.source, Mnist)
    size, inputs = target.size or (_MNIST_SIZE if is_mnist else None), getattr(model, "input_dim", None)
    if size is None and inputs is None:
        raise ShoalError("the size of an image is not known without the data: set model.input_dim")
    channels = target.channels or (1 if is_mnist else _RGB)
    classes = CLASSES if is_mnist else getattr(model, "output_dim", None)
    if classes is None and run.chosen_task.needs == "labels":
        raise ShoalError("the number of classes is not known without the data: set model.output_dim")
    return Info("image", name, image_shape=(channels, size, size) if size else (1, 1, inputs or 0), num_classes=classes)
