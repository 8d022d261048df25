"""Sizes that the coordinator and its workers must compute alike: contributions needed, processes per worker, extent of the data."""

from __future__ import annotations

import math

import torch

from shoal import data
from shoal.config import Run
from shoal.config.derived_values import quorum
from shoal.config.ranks import batch_share
from shoal.config.schema.updates import Bucketing, NearestNeighbours
from shoal.runs.build_run import feed_for_seat
from shoal.strategies import DataExtent


def needed_contributions(run: Run) -> int:
    """The least number of contributions that the aggregation rule needs."""
    rule, mixing = run.updates.aggregation, run.updates.mixing
    byzantine = getattr(rule, "byzantine", None) or 0
    least = quorum(rule.kind, byzantine, mixing.size if isinstance(mixing, Bucketing) else 1)
    return max(least, quorum("nearest-neighbours", mixing.byzantine or 0)) if isinstance(mixing, NearestNeighbours) else least


def ranks_per_worker(run: Run) -> int:
    """Processes of a worker that read batches of their own, by the settings. A worker that sets its own engine counts its own."""
    return 1 if run.engine.kind == "single" else batch_share(run, 0, (run.launch.devices_per_node or 1) * (run.launch.nodes or 1))[1]


def data_extent(run: Run, samples: data.Data, expected: int) -> DataExtent:
    return DataExtent(
        expected, ranks_per_worker(run), lambda shards: feed_for_seat(run, samples, 0, shards).batches_per_epoch, run.scheduled
    )


def weight_per_sample(run: Run, samples: object) -> float:
    """The largest weight of one sample: its number of tokens, or 1. Unbounded for a stream of the program's own."""
    if not isinstance(samples, data.Samples):
        return run.data.sequence_length or math.inf
    one = samples.batch([0]).values() if len(samples) else ()
    tokens = [value[0].numel() for value in one if value.dtype in (torch.int64, torch.int32)]
    return max(1, run.data.sequence_length or 1, *tokens)
