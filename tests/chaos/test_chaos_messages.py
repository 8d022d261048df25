"""A hundred thousand messages that no worker of ours would send, to a coordinator that goes on working."""

from __future__ import annotations

import heapq
import itertools
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.protocol.messages import ACTIONS, KINDS, PROTOCOL, Message, Request, parse
from shoal.transports import wire
from tests.coordinator.test_driver import STRATEGIES, Walker, World
from tests.support.small_cluster import nameplate

MESSAGES = 120_000
LIMITS = wire.Limits(1 << 20, 64 << 10)
ODD: list[Any] = [None, True, -1, 0, 1, 2**31 - 1, 2**53, 2**64 - 1, -(2**63), 0.5, 1e308, float("nan"), float("inf"), "", "x" * 300, "w0"]
ODD += ["\x1b[2J", b"", [], {}, {"a": 1}, {"loss": 1e308}, {"\x1b": 1.0}, [[[[]]]]]


def valid(dice: random.Random, kind: str, sessions: list[str]) -> dict[str, Any]:
    """A question of this kind as a worker or an owner might ask it; often with a session that there is."""
    session = {"session": dice.choice([*sessions, "none"]), "number": dice.randrange(10**9)}
    identity = {
        "key": nameplate(dice.choice(("w0", "w1", "eve"))).key,
        "nonce": dice.choice(("", "n")),
        "proof": dice.choice(("", "0" * 128)),
    }
    place = {"seq": dice.randrange(70), "base": dice.randrange(4), "round": dice.randrange(9), "epoch": 0, "position": dice.randrange(80)}
    claims = {
        "samples": 2,
        "batches": 1,
        "have": dice.randrange(-1, 9),
        "weight": 1.0,
        "metrics": {"loss": 1.0},
        "unit": dice.randrange(-1, 9),
    }
    made: dict[str, dict[str, Any]] = {
        "join": {"name": dice.choice((None, "w0", "eve")), "protocol": PROTOCOL, "about": {}, "instance": "i"} | identity,
        "gone": {"name": "w0"} | identity,
        "order": {"action": dice.choice(ACTIONS), "name": dice.choice((None, "w0", "eve"))} | identity,
        "leave": {"reason": dice.choice(("", "so"))} | session,
        "heartbeat": {"state": "computing", "figures": {"samples": 1.0}} | session,
        "hold": {"experts": [dice.randrange(9) for _ in range(dice.randrange(4))]} | session,
        "pull": {"have": dice.randrange(-1, 99)} | session,
        "contribute": session | place | claims,
        "claim": {"have": dice.randrange(-1, 9)} | session,
        "giveback": {"unit": dice.randrange(20)} | session,
        "fail": {"unit": dice.randrange(20), "reason": "so"} | session,
    }
    return {"kind": kind} | made[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_message_is_among_them_and_right_before_it_is_changed(kind: str) -> None:
    parse(valid(random.Random(1), kind, []))


def mutated(dice: random.Random, sessions: list[str]) -> list[bytes]:
    """A field that is odd, missing or too many; or bytes that are."""
    header = valid(dice, dice.choice(KINDS), sessions)
    for _ in range(dice.randrange(3)):
        name = dice.choice([*header, "more"])
        if dice.random() < 0.2 and len(header) > 1:
            header.pop(name, None)
        else:
            header[name] = dice.choice(ODD)
    frames = tuple(dice.randbytes(dice.choice((0, 1, 7, 8, 8, 8, 9, 400))) for _ in range(dice.choice((0, 1, 1, 1, 2, 5))))
    parts = [bytes(part) for part in wire.encode(Message(header, frames), dice.randrange(99), LIMITS)]
    if dice.random() < 0.3:
        changed = bytearray(parts[0])
        for _ in range(dice.randrange(1, 4)):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        parts[0] = bytes(changed)
    return parts


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["async", "workunits"])
def test_no_message_hurts_and_none_is_remembered(tmp_path: Path, name: str) -> None:
    world = World(tmp_path, STRATEGIES[name], 1, steps=10**9)
    if world.plan.cut is not None:
        world.plan = world.plan._replace(total_batches=None)
    walkers = [Walker(world, f"w{number}", 1.0) for number in range(2)]
    dice, sizes = random.Random(7), list[int]()
    coordinator, answers = world.driver.coordinator, itertools.count()
    tracemalloc.start()
    for number in range(MESSAGES // 2):
        try:
            _, message = wire.decode(mutated(dice, [*coordinator.members.by_session]), LIMITS)
        except wire.Malformed:
            continue
        asked = Request(b"enemy", -1 - number, message)
        world.wire.answers[asked.number] = lambda answer: next(answers)
        world.driver.serve([asked])
        if number % 20 == 0:  # the others go on meanwhile
            world.now, _, what = heapq.heappop(world.heap)
            what()
        if number % (MESSAGES // 8) == MESSAGES // 8 - 1:
            world.driver.snapshot()
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert next(answers) > MESSAGES // 8
    assert sizes[-1] - sizes[0] < 3_000_000, sizes
    assert torch.isfinite(coordinator.learner.vector).all()
    assert len(coordinator.state.seats) < 100
    assert walkers
    world.driver.close()
