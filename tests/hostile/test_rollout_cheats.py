"""Workers that want their answers counted without making them: copies, replays, other units, other versions, made-up probabilities.

What cannot be said here: a worker sends no probability, no score and no prompt. The coordinator computes them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.protocol.frames import frame_of
from shoal.updates.answer_frames import pack
from shoal.worker.session import LeasedUnit
from tests.coordinator.test_rollout_leases import LENGTH, Room, answers_to, settings
from tests.support.small_cluster import FakeWorker

Cheat = Callable[[Room, FakeWorker, LeasedUnit, LeasedUnit, list[memoryview]], str | None]


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(settings(tmp_path, ppo={"rollout_size": 8}))


def leased(room: Room, worker: FakeWorker) -> LeasedUnit:
    unit = room.claim(worker)
    assert unit is not None
    return unit


def copies(room: Room, eve: FakeWorker, own: LeasedUnit, other: LeasedUnit, answers: list[memoryview]) -> str | None:
    return room.send(eve, own, answers)


def takes_the_unit_of_another(room: Room, eve: FakeWorker, own: LeasedUnit, other: LeasedUnit, answers: list[memoryview]) -> str | None:
    return room.send(eve, other, answers)


def names_a_unit_that_nobody_leased(
    room: Room, eve: FakeWorker, own: LeasedUnit, other: LeasedUnit, answers: list[memoryview]
) -> str | None:
    return room.send(eve, own._replace(number=max(own.number, other.number) + 7), answers)


def names_an_older_version(room: Room, eve: FakeWorker, own: LeasedUnit, other: LeasedUnit, answers: list[memoryview]) -> str | None:
    return room.send(eve, own._replace(version=own.version - 1), pack(answers_to(room, own, model=room.old)))


def adds_probabilities(room: Room, eve: FakeWorker, own: LeasedUnit, other: LeasedUnit, answers: list[memoryview]) -> str | None:
    certain = frame_of(np.zeros((len(own.given["prompts"]) * room.strategy.contribution.group, LENGTH), np.float32))
    return room.send(eve, own, [*pack(answers_to(room, own)), certain])


def sends_ids_that_are_no_tokens(room: Room, eve: FakeWorker, own: LeasedUnit, other: LeasedUnit, answers: list[memoryview]) -> str | None:
    return room.send(eve, own, pack(torch.full((len(own.given["prompts"]) * room.strategy.contribution.group, LENGTH), 2**31 - 1)))


def answers_fewer_prompts(room: Room, eve: FakeWorker, own: LeasedUnit, other: LeasedUnit, answers: list[memoryview]) -> str | None:
    return room.send(eve, own, pack(answers_to(room, own)[:-1]))


@pytest.mark.parametrize(
    ("cheat", "outcome"),
    [
        (copies, "inexact"),
        (takes_the_unit_of_another, "late"),
        (names_a_unit_that_nobody_leased, "late"),
        (names_an_older_version, "late"),
        (adds_probabilities, "malformed"),
        (sends_ids_that_are_no_tokens, "malformed"),
        (answers_fewer_prompts, "malformed"),
    ],
)
def test_no_cheat_is_learned_from_or_takes_work_from_others(room: Room, cheat: Cheat, outcome: str) -> None:
    honest, eve = room.join("honest"), room.join("eve")
    for _ in range(2):  # one version
        unit = leased(room, honest)
        assert room.send(honest, unit, pack(answers_to(room, unit))) == "accepted"
    assert room.coordinator.state.version == 1
    other, own = leased(room, honest), leased(room, eve)
    answers, records = pack(answers_to(room, other)), len(room.records)
    assert cheat(room, eve, own, other, answers) == outcome
    assert {record["kind"] for record, _ in room.records[records:]} <= {"inexact", "blamed"}
    assert room.send(honest, other, answers) == "accepted"
    assert "eve" not in {one[0] for line in room.ledger if "version" in line for one in line["from"]}


def test_answers_that_were_accepted_count_once_however_often_they_are_sent(room: Room) -> None:
    eve = room.join("eve")
    unit = leased(room, eve)
    frames = pack(answers_to(room, unit))
    assert room.send(eve, unit, frames) == "accepted"
    records = len(room.records)
    for _ in range(3):  # as new contributions, with numbers of their own
        room.send(eve, unit, frames)
    assert len(room.records) == records
    assert room.coordinator.state.version == 0, "a version needs a second unit"
