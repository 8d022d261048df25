"""The number of samples that are used, and the choice of those that are held out."""

from __future__ import annotations

import re
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.config.schema.data import Data as Settings
from shoal.data.interfaces import SelectableSamples

HELD_OUT_SHARE = 0.05
SomeSamples = TypeVar("SomeSamples", bound=SelectableSamples)
TRAIN_NAMES = ("train", "training")
HELD_OUT_NAMES = ("validation", "valid", "val", "dev", "test", "eval")
"""Common names of the held-out split, the most common one first."""
_SPLIT = re.compile(rf"(?:^|[._-])({'|'.join(TRAIN_NAMES + HELD_OUT_NAMES)})(?:[._-]|$)", re.IGNORECASE)


def counts(settings: Settings, train: int, held_out: int) -> tuple[int, int]:
    """The numbers of samples for training and evaluation. `max_samples` limits their sum, in proportion."""
    if settings.max_samples is not None and settings.max_samples < train + held_out:
        share = held_out / (train + held_out)
        held_out = min(held_out, max(1, round(settings.max_samples * share)), settings.max_samples - 1)
        train = min(train, settings.max_samples - held_out)
    return min(train, settings.max_train_samples or train), min(held_out, settings.max_eval_samples or held_out)


def held_out_numbers(count: int, seed: int) -> NDArray[np.bool_]:
    """A mask of the held-out samples: 5 % of `count`, at least one, chosen by seed."""
    held = np.zeros(count, np.bool_)
    held[np.random.default_rng([seed, 5]).permutation(count)[: max(1, round(count * HELD_OUT_SHARE))]] = True
    return held


def some_of(samples: SomeSamples, count: int, seed: int) -> SomeSamples:
    """`count` of the samples, chosen by seed: the first samples of a sorted source may all be of one class."""
    if count >= len(samples):
        return samples
    chosen = np.random.default_rng([seed, 7]).permutation(len(samples))[:count]
    return samples.select(torch.from_numpy(np.sort(chosen)))


def divided(samples: SomeSamples, seed: int) -> tuple[SomeSamples, SomeSamples | None]:
    """Training samples, and the held-out samples; None if there are fewer than two samples."""
    if len(samples) < 2:
        return samples, None
    held = held_out_numbers(len(samples), seed)
    return samples.select(torch.from_numpy(np.flatnonzero(~held))), samples.select(torch.from_numpy(np.flatnonzero(held)))


def split_and_limit(
    settings: Settings, seed: int, train: SomeSamples, held_out: SomeSamples | None
) -> tuple[SomeSamples, SomeSamples | None]:
    """Training and held-out samples in the numbers of the settings. Without held-out samples of their own, some are held out."""
    if held_out is None:
        train, held_out = divided(train, seed)
    train_count, eval_count = counts(settings, len(train), len(held_out) if held_out else 0)
    return some_of(train, train_count, seed), some_of(held_out, eval_count, seed) if held_out and eval_count else None


def share_out(draws: int, shares: NDArray[np.float64]) -> list[int]:
    """Apportion `draws` to the shares by the largest-remainder method."""
    exact = shares * draws
    whole = np.floor(exact).astype(np.int64)
    for part in np.argsort(whole - exact, kind="stable")[: draws - int(whole.sum())]:
        whole[part] += 1
    return [int(count) for count in whole]


def split_of(name: str) -> str | None:
    """`train` or `held-out`, if the name of a file or folder contains the name of such a split."""
    found = _SPLIT.search(name)
    return None if found is None else "train" if found[1].lower() in TRAIN_NAMES else "held-out"
