"""Weights for those who ask: what each worker decodes is what the coordinator thinks it has, to the bit, whatever got lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config.schema.updates import Codec, Fp16Codec, Int4Codec, Int8Codec, NoCodec, TopKCodec
from shoal.coordinator.rounds import weights_publisher as publishing
from shoal.coordinator.rounds.weights_publisher import WeightsFeed, WeightsMessage, WeightsPublisher
from shoal.updates import codecs

CHUNKED = TopKCodec(ratio=0.25, chunk=100, values="2-bit")
CODECS = (NoCodec(), Fp16Codec(), Int8Codec(), Int4Codec(), TopKCodec(ratio=0.05), TopKCodec(values="int4"), CHUNKED)
SIZE = 5000


class Replica:
    """A worker's side: it applies what it is sent."""

    def __init__(self, codec: Codec) -> None:
        self.codec, self.version, self.vector = codec, -1, torch.empty(SIZE)

    def take(self, kind: str, version: int, frames: Sequence[memoryview]) -> int:
        codecs.renew(self.vector, kind, self.codec, frames)
        self.version = version
        return sum(frame.nbytes for frame in frames)


def moved(vector: Tensor, generator: torch.Generator, share: float) -> None:
    chosen = torch.rand(SIZE, generator=generator) < share
    vector[chosen] += torch.randn(int(chosen.sum()), generator=generator) * 0.01


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.kind}{getattr(codec, 'values', '')}")
def test_every_replica_is_what_the_coordinator_thinks_it_is(codec: Codec) -> None:
    chance, generator = random.Random(3), torch.Generator().manual_seed(3)
    publisher, vector = WeightsPublisher(codec), torch.randn(SIZE, generator=generator)
    workers = {f"s{number}": Replica(codec) for number in range(4)}
    for version in range(120):
        moved(vector, generator, 0.02 if chance.random() < 0.8 else 1.0)
        publisher.publish(version, vector, torch.empty(0))
        for session, worker in workers.items():
            if chance.random() < 0.3:
                continue
            fields, frames = publisher.since(session, worker.version)
            if chance.random() < 0.2:  # the answer is lost
                continue
            worker.take(fields["weights"], version, frames)
            known = publisher._held.get(session)
            assert known is None or known[0] != version or torch.equal(worker.vector, known[1].vector)
            if codec.for_weights().kind == "none":
                assert torch.equal(worker.vector, vector), "changes are exact"
            else:
                assert float((worker.vector - vector).abs().max()) < 0.1
        if chance.random() < 0.05:
            session = chance.choice(sorted(workers))
            publisher.forget(session)


@pytest.mark.parametrize(
    ("codec", "share", "kind"),
    [
        (TopKCodec(), 0.01, "changes"),
        (TopKCodec(), 1.0, "full"),
        (Int8Codec(), 1.0, "difference"),
        (TopKCodec(values="int4"), 0.01, "changes"),
        (TopKCodec(values="int4"), 0.3, "difference"),
    ],
)
def test_the_smaller_way_is_taken(codec: Codec, share: float, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    publisher, vector = WeightsPublisher(codec), torch.zeros(SIZE)
    publisher.publish(0, vector, torch.empty(0))
    worker = Replica(codec)
    fields, frames = publisher.since("s", -1)
    whole = worker.take(fields["weights"], 0, frames)
    assert publisher.since("s", 0) == ({"weights": "same"}, ())
    moved(vector, generator, share)
    publisher.publish(1, vector, torch.empty(0))
    fields, frames = publisher.since("s", 0)
    assert fields["weights"] == kind
    assert worker.take(kind, 1, frames) <= whole


def test_what_rounding_lost_is_in_the_next_difference() -> None:
    publisher, vector, worker = WeightsPublisher(Int8Codec()), torch.zeros(SIZE), Replica(Int8Codec())
    generator = torch.Generator().manual_seed(0)
    for version in range(40):
        moved(vector, generator, 1.0)
        publisher.publish(version, vector, torch.empty(0))
        fields, frames = publisher.since("s", worker.version)
        worker.take(fields["weights"], version, frames)
    assert float((worker.vector - vector).abs().max()) < 0.01, "errors do not add up"


def test_an_answer_that_was_lost_is_followed_by_everything() -> None:
    publisher, vector = WeightsPublisher(Int8Codec()), torch.zeros(SIZE)
    publisher.publish(0, vector, torch.empty(0))
    publisher.since("s", -1)
    publisher.publish(1, vector + 1, torch.empty(0))
    assert publisher.since("s", 0)[0]["weights"] == "difference"
    assert publisher.since("s", 0)[0]["weights"] == "full"
    assert publisher.since("stranger", 0)[0]["weights"] == "full"


@pytest.mark.parametrize("codec", CODECS[1:], ids=lambda codec: f"{codec.kind}{getattr(codec, 'values', '')}")
def test_workers_that_were_sent_the_same_share_a_replica_and_what_is_found_for_it(codec: Codec) -> None:
    publisher, generator, vector = WeightsPublisher(codec), torch.Generator().manual_seed(0), torch.zeros(SIZE)
    for version in range(3):
        moved(vector, generator, 1.0)
        publisher.publish(version, vector, torch.empty(0))
        answers = [publisher.since(f"s{number}", version - 1) for number in range(4)]
        assert all(a is b for _, frames in answers[1:] for a, b in zip(frames, answers[0][1], strict=True)), "found once"
        assert len({id(replica) for _, replica in publisher._held.values()}) == 1


def test_replicas_take_no_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are all at different versions have different weights."""
    monkeypatch.setattr(publishing, "MOST_REPLICA_BYTES", 3 * 4 * SIZE)
    publisher, vector = WeightsPublisher(Int8Codec()), torch.zeros(SIZE)
    for version in range(9):
        publisher.publish(version, vector + version, torch.empty(0))
        publisher.since(f"s{version % 6}", version - 6 if version >= 6 else -1)
        assert len({id(replica) for _, replica in publisher._held.values()}) <= 3 + 1
    assert len(publisher._held) >= 3


@pytest.mark.parametrize("spans", [[None], [(0, 2000), (2000, 4000), (4000, SIZE)]], ids=["whole", "fragments"])
def test_two_in_step_keep_getting_differences_with_room_for_one_replica(monkeypatch: pytest.MonkeyPatch, spans: list[Any]) -> None:
    """And after an answer was lost, or the coordinator was started again."""
    monkeypatch.setattr(publishing, "MOST_REPLICA_BYTES", 4 * SIZE)
    publisher, generator, vector = WeightsPublisher(Int8Codec()), torch.Generator().manual_seed(0), torch.zeros(SIZE)
    kinds = []
    for version in range(12):
        moved(vector, generator, 1.0)
        if version == 8:
            publisher = WeightsPublisher(Int8Codec())
        publisher.publish(version, vector, torch.empty(0), spans[version % len(spans)])
        have = version - 2 if version == 4 else version - 1  # what came before was lost on the way to both
        kinds += [publisher.since(session, have)[0]["weights"][0] for session in ("a", "b")]
    assert "".join(kinds) == "ff" + "dd" * 3 + "ff" + "dd" * 3 + "ff" + "dd" * 3


def test_one_that_is_far_behind_does_not_make_it_long_for_the_others() -> None:
    publisher, generator, vector = WeightsPublisher(TopKCodec()), torch.Generator().manual_seed(0), torch.zeros(SIZE)
    kinds: list[str] = []
    for version in range(200):
        moved(vector, generator, 0.05)
        publisher.publish(version, vector, torch.empty(0))
        kinds += [publisher.since(f"s{number}", version - 1)[0]["weights"] for number in range(7)]
        if version % 40 == 0:
            publisher.since("far", version - 40)
    assert kinds.count("full") < 100


def test_what_is_being_sent_does_not_change_with_the_next_version() -> None:
    publisher, vector = WeightsPublisher(NoCodec()), torch.zeros(4)
    publisher.publish(0, vector, torch.ones(2))
    _, frames = publisher.since("s", -1)
    vector += 1
    assert [bytes(frame) for frame in frames] == [bytes(16), torch.ones(2).numpy().tobytes()]


class Board:
    """What hangs out: the newest full weights and what follows, as the database keeps it."""

    def __init__(self) -> None:
        self.hanging: dict[tuple[int, str], WeightsMessage] = {}

    def hang_out(self, version: int, notices: list[WeightsMessage]) -> None:
        for notice in notices:
            self.hanging[version, notice.kind] = notice
            if notice.kind == "full":
                self.hanging = {key: value for key, value in self.hanging.items() if key[0] == version}

    def read(self, worker: Replica) -> None:
        """What a worker does: one difference after the other, or all of it."""
        while True:
            newest = max((version for version, kind in self.hanging if kind == "full"), default=-1)
            if (found := self.hanging.get((worker.version + 1, "difference"))) is not None:
                worker.take(found.header["weights"], worker.version + 1, found.frames)
            elif newest > worker.version:
                worker.take("full", newest, self.hanging[newest, "full"].frames)
            else:
                return


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.kind)
def test_all_who_read_the_bulletin_have_the_same_however_often_they_look(codec: Codec) -> None:
    chance, generator = random.Random(5), torch.Generator().manual_seed(5)
    vector, board = torch.randn(SIZE, generator=generator), Board()
    publisher = WeightsPublisher(codec)
    bulletin = WeightsFeed(publisher)
    readers = [Replica(codec) for _ in range(4)]
    for version in range(150):
        moved(vector, generator, 0.02 if chance.random() < 0.8 else 1.0)
        publisher.publish(version, vector, torch.empty(0))
        board.hang_out(version, bulletin.messages())
        assert bulletin.messages() is bulletin.messages(), "to do it again changes nothing"
        if chance.random() < 0.1:  # the coordinator ends, and goes on from the same version
            publisher = WeightsPublisher(codec)
            publisher.publish(version, vector, torch.empty(0))
            bulletin = WeightsFeed(publisher)
            board.hang_out(version, bulletin.messages())
        else:
            known = publisher._held["all"][1].vector if "all" in publisher._held else vector
            assert float((known - vector).abs().max()) < 0.1
            for reader in readers:
                if chance.random() < 0.5:
                    board.read(reader)
                    assert reader.version == version
                    assert torch.equal(reader.vector, known)
        assert sum(frame.nbytes for notice in board.hanging.values() for frame in notice.frames) <= 3 * 4 * SIZE


def test_differences_hang_out_and_everything_now_and_then() -> None:
    publisher, vector = WeightsPublisher(Int8Codec()), torch.zeros(SIZE)
    bulletin = WeightsFeed(publisher)
    kinds = []
    for version in range(11):
        moved(vector, torch.Generator().manual_seed(version), 1.0)
        publisher.publish(version, vector, torch.empty(0))
        kinds.append([notice.kind for notice in bulletin.messages()])
    alone, both = ["difference"], ["full", "difference"]
    assert kinds == [["full"], ["full"], alone, alone, alone, both, alone, alone, alone, both, alone]


def test_with_sparse_differences_a_worker_that_joins_gets_the_replica_of_others() -> None:
    publisher, generator, vector = WeightsPublisher(CHUNKED), torch.Generator().manual_seed(0), torch.zeros(SIZE)
    workers = [Replica(CHUNKED) for _ in range(3)]
    for version in range(6):
        moved(vector, generator, 1.0)
        publisher.publish(version, vector, torch.empty(0))
        for number, worker in enumerate(workers[: 2 if version < 4 else 3]):
            fields, frames = publisher.since(f"s{number}", worker.version)
            worker.take(fields["weights"], version, frames)
    assert not torch.equal(workers[0].vector, vector), "sparse differences leave something out"
    assert torch.equal(workers[2].vector, workers[0].vector)
    assert publisher._kept == 1, "one replica, so one difference for each version"


def test_what_sparse_differences_leave_out_comes_with_later_ones() -> None:
    """Error feedback: without further changes the replica becomes the weights."""
    publisher, vector = WeightsPublisher(CHUNKED), torch.zeros(SIZE)
    worker = Replica(CHUNKED)
    for version in range(40):
        if version == 1:
            moved(vector, torch.Generator().manual_seed(0), 1.0)
        publisher.publish(version, vector, torch.empty(0))
        fields, frames = publisher.since("s", worker.version)
        sent = worker.take(fields["weights"], version, frames)
        assert version == 0 or sent <= codecs.encoded_bytes(CHUNKED, SIZE)
    assert float((worker.vector - vector).norm()) < 1e-3 * float(vector.norm())
