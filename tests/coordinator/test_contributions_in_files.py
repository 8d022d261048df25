"""Contributions that wait in files make the same weights as those that wait in memory, and take no memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from shoal.config.schema import updates as schema
from shoal.config.schema.strategy import DiLoCo, Edp, SyncPs
from shoal.config.schema.updates import Updates
from shoal.coordinator.durable.contribution_files import ContributionFiles
from shoal.coordinator.state import HeldContribution
from shoal.errors import ShoalError
from shoal.protocol.frames import frame_of
from shoal.updates import codecs
from shoal.updates.parallel_blocks import BLOCK
from tests.support.small_cluster import Cluster, Numbers, strategy_of

SIZE = BLOCK + 1000
CODECS = [schema.NoCodec(), schema.Fp16Codec(), schema.Int8Codec(), schema.TopKCodec()]
RULES = [
    (schema.Mean(), schema.NoMixing()),
    (schema.Mean(), schema.Bucketing(size=2)),
    (schema.TrimmedMean(trim_ratio=0.4), schema.NoMixing()),
    (schema.Median(), schema.NearestNeighbours(byzantine=1)),
    (schema.GeometricMedian(), schema.NoMixing()),
    (schema.Krum(byzantine=1), schema.NoMixing()),
    (schema.CenteredClipping(), schema.NoMixing()),
]


def weights_after(updates: Updates, rounds: int, files: ContributionFiles | None) -> tuple[torch.Tensor, Cluster]:
    """The weights that five workers make, one of which sends twice, and one is late by a round."""
    cluster = Cluster(strategy_of(SyncPs(window=1), 5), 5, updates=updates, learner=Numbers(SIZE), held_files=files)
    workers = [cluster.join(name) for name in ("ann", "bo", "cy", "dee", "eve")]
    draws = torch.Generator().manual_seed(3)
    for number in range(rounds):
        calls = []
        for worker in workers:
            frames = codecs.encode(updates.codec, torch.randn(SIZE, generator=draws), None)
            calls.append((worker, cluster.contribute(worker, frames=frames)))
        for worker, call in calls:
            cluster.hear(worker, call)
        assert cluster.coordinator.state.version == number + 1
    return cluster.learner.vector, cluster


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.kind)
@pytest.mark.parametrize(("rule", "mixing"), RULES, ids=lambda part: part.kind)
def test_the_weights_are_the_same_bit_for_bit(rule: schema.Aggregation, mixing: schema.Mixing, codec: schema.Codec, tmp_path: Path) -> None:
    updates = Updates(codec=codec, aggregation=rule, mixing=mixing)
    in_memory, _ = weights_after(updates, 2, None)
    in_files, cluster = weights_after(updates, 2, ContributionFiles(tmp_path))
    assert torch.equal(in_memory, in_files)
    assert in_memory.abs().sum() > 0
    assert not list(tmp_path.iterdir()), "the files have no names"
    assert all(not held.vector.numel() for one in cluster.coordinator.replayed.rounds.open.values() for held in one.held.values())


def test_a_single_contribution_of_less_weight_is_the_same(tmp_path: Path) -> None:
    def after(files: ContributionFiles | None) -> tuple[torch.Tensor, list[float]]:
        cluster = Cluster(strategy_of(Edp()), 1, learner=Numbers(SIZE), held_files=files)
        ann, bo = cluster.join("ann"), cluster.join("bo")
        assert [cluster.step(ann, 3.0), cluster.step(bo, 5.0)] == ["accepted", "accepted"]
        return cluster.learner.vector, [record["share"] for record, _ in cluster.records if record["kind"] == "accepted"]

    weights, shares = after(ContributionFiles(tmp_path))
    assert torch.equal(weights, after(None)[0])
    assert shares == [1.0, 0.5]


def test_late_contributions_among_others_are_the_same(tmp_path: Path) -> None:
    def after(files: ContributionFiles | None) -> torch.Tensor:
        cluster = Cluster(strategy_of(DiLoCo(late="weighted"), 2), 2, learner=Numbers(SIZE), held_files=files)
        replayed = cluster.coordinator.replayed
        for name, share in (("ann", 1.0), ("bo", 0.5), ("cy", 1 / 3)):
            frames = codecs.encode(schema.NoCodec(), torch.full((SIZE,), 3.0), None)
            record = {"worker": name, "seq": 0, "round": 0, "share": share, "weight": 2.0}
            replayed.rounds.hold(0, HeldContribution(record, replayed._kept(frames), *replayed.decode(frames)))
        return replayed._combine(list(replayed.rounds.open[0].held.values()))[0].clone()

    assert torch.equal(after(ContributionFiles(tmp_path)), after(None))


def test_what_waits_is_checked_when_it_arrives_and_journaled_whole(tmp_path: Path) -> None:
    cluster = Cluster(strategy_of(SyncPs(), 2), 2, learner=Numbers(8), held_files=ContributionFiles(tmp_path))
    ann, bo = cluster.join("ann"), cluster.join("bo")
    bad = codecs.encode(schema.NoCodec(), torch.full((8,), float("nan")), None)
    assert cluster.status(cluster.contribute(ann, frames=bad)) == "malformed"
    good = codecs.encode(schema.NoCodec(), torch.arange(8.0), None)
    cluster.contribute(bo, frames=good)
    ((record, frames),) = cluster.coordinator.replayed.pending()
    assert (record["worker"], b"".join(map(bytes, frames))) == ("bo", bytes(good[0]))


def test_frames_of_any_length_come_back_from_their_file(tmp_path: Path) -> None:
    frames = (b"", memoryview(b"abc"), frame_of(torch.arange(5.0).numpy()), b"")
    kept = ContributionFiles(tmp_path).keep(frames)
    assert [bytes(view) for view in kept] == [bytes(memoryview(frame)) for frame in frames]
    assert all(view.readonly for view in kept if view.nbytes)
    assert ContributionFiles(tmp_path).keep((b"",)) == (memoryview(b""),)


def test_a_full_disk_is_told_with_the_folder_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(os, "posix_fallocate", full)
    files = ContributionFiles(tmp_path)
    with pytest.raises(ShoalError, match=r"No space left on device.*coordinator.held_in"):
        files.keep((b"x",))
    with pytest.raises(ShoalError, match="No space left"):
        files.rows(2, 2)
