"""A few letters that tell different data apart: for workers that must have the coordinator's, and for a run that goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from shoal.data.images.samples import TensorImages
from shoal.data.interfaces import Samples, SampleStream
from shoal.data.loaded_data import Data
from shoal.data.retrieval.augmented_samples import RetrievalSamples, RetrievalStream
from shoal.data.streams.mixed import MixedStream
from shoal.data.streams.text import TextStream
from shoal.data.text.mixture import ChainedText, MixedText
from shoal.data.text.samples import PackedText, PaddedText

_IN_MEMORY = (PackedText, PaddedText, MixedText, ChainedText, TensorImages)
_MOST_BYTES = 256 << 20
"""Larger data is looked at in places, evenly spread: to read all of it would take longer than to begin with the training."""
_AT_ONCE = 1024
_PLACES = 16
"""Samples that are looked at where each must be read and decoded first."""


def fingerprint(data: Data) -> str:
    """Of samples in memory everything counts, up to 256 MiB; of others their number, and a few of them. A stream is known by its name.
    Passages count as the index that they are found in."""
    if isinstance(data.train, RetrievalSamples | RetrievalStream):
        inner = fingerprint(data._replace(train=data.train.inner))
        return hashlib.sha256(f"{inner} {data.train.finder.index.digest} {data.train.finder.reading}".encode()).hexdigest()
    digest = hashlib.sha256(data.info.name.encode() if not isinstance(data.train, Samples) else b"")
    if isinstance(data.train, Samples):
        digest.update(str(len(data.train)).encode())
        for numbers in _looked_at(data.train):
            for name, value in sorted(data.train.batch(numbers).items()):
                digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def local_fingerprint(data: Data) -> str:
    """The same, for the same machine some time later. A stream's files may have another size then. What a program brought along may be
    different each time it is looked at: of that only the number counts."""
    if data.info.kind == "own":
        return f"own {len(data.train)}" if isinstance(data.train, Samples) else "own"
    sizes = [stream.documents.size() for stream in _streams(data.train)]
    return hashlib.sha256(f"{fingerprint(data)} {sizes}".encode()).hexdigest()


def _looked_at(samples: Samples) -> Iterator[range | list[int]]:
    """The numbers of the samples that count, some at a time."""
    count = len(samples)
    if not isinstance(samples, _IN_MEMORY):
        if count:
            yield sorted({count * place // _PLACES for place in range(_PLACES)})
        return
    each = sum(value.numel() * value.element_size() for value in samples.batch([0]).values()) if count else 1
    step = max(1, -(-count * each // _MOST_BYTES))
    for start in range(0, count, step * _AT_ONCE):
        yield range(start, min(count, start + step * _AT_ONCE), step)


def _streams(samples: Samples | SampleStream) -> Iterator[TextStream]:
    if isinstance(samples, TextStream):
        yield samples
    elif isinstance(samples, RetrievalStream):
        yield from _streams(samples.inner)
    elif isinstance(samples, MixedStream):
        for stream in samples.streams:
            yield from _streams(stream)
