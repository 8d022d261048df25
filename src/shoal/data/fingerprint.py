"""Digests of data sets: a worker must have the coordinator's data, and a resumed run its former data."""

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
"""Of larger data evenly spaced samples are hashed: to hash everything would delay the training."""
_AT_ONCE = 1024
_SPOT_CHECKS = 16
"""Samples that are hashed where each must be read and decoded first."""


def fingerprint(data: Data) -> str:
    """A digest of all samples in memory, up to 256 MiB; of other samples their number and a few of them; of a stream its name. Passages
    are included by the digest of their index."""
    if isinstance(data.train, RetrievalSamples | RetrievalStream):
        inner = fingerprint(data._replace(train=data.train.inner))
        return hashlib.sha256(f"{inner} {data.train.finder.index.digest} {data.train.finder.settings}".encode()).hexdigest()
    digest = hashlib.sha256(data.info.name.encode() if not isinstance(data.train, Samples) else b"")
    if isinstance(data.train, Samples):
        digest.update(str(len(data.train)).encode())
        for numbers in _hashed_numbers(data.train):
            for name, value in sorted(data.train.batch(numbers).items()):
                digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def local_fingerprint(data: Data) -> str:
    """A digest to detect changes on the same machine. It includes the sizes of a stream's files. Of live data sets of a Python program it
    includes only the number of samples, since their contents may be random."""
    if data.info.kind == "own":
        return f"own {len(data.train)}" if isinstance(data.train, Samples) else "own"
    sizes = [stream.documents.size() for stream in _streams(data.train)]
    return hashlib.sha256(f"{fingerprint(data)} {sizes}".encode()).hexdigest()


def _hashed_numbers(samples: Samples) -> Iterator[range | list[int]]:
    """The numbers of the samples to hash, in groups."""
    count = len(samples)
    if not isinstance(samples, _IN_MEMORY):
        if count:
            yield sorted({count * number // _SPOT_CHECKS for number in range(_SPOT_CHECKS)})
        return
    sample_bytes = sum(value.numel() * value.element_size() for value in samples.batch([0]).values()) if count else 1
    step = max(1, -(-count * sample_bytes // _MOST_BYTES))
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
