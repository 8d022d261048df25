"""A crowd costs no worker more than a few do: no message makes the coordinator walk through all of its workers."""

from __future__ import annotations

import random
from typing import Any, NoReturn

import pytest
import torch

from shoal.config.schema.strategy import Async, DiLoCo, Edp, SyncPs
from shoal.config.schema.updates import Int8Codec, NoCodec, Updates
from shoal.coordinator.rounds.open_rounds import Rounds
from shoal.coordinator.rounds.weights_publisher import WeightsPublisher
from shoal.coordinator.run_plan import MemberLimits
from shoal.coordinator.state import HeldContribution
from tests.support.small_cluster import Cluster, strategy_of

STRATEGIES = {
    "edp": strategy_of(Edp()),
    "syncps": strategy_of(SyncPs()),
    "async": strategy_of(Async()),
    "balanced diloco": strategy_of(DiLoCo(inner_steps=8, balance_speeds=True)),
}


def walks(*_: object) -> NoReturn:
    raise AssertionError("a message makes the coordinator walk through all workers")


class Crowd(dict[Any, Any]):
    """A dictionary that does not let anybody walk through it."""

    values = items = keys = __iter__ = walks  # type: ignore[assignment]


class Names(set[str]):
    """A set that does not let anybody walk through it."""

    __or__ = __ror__ = __iter__ = walks  # type: ignore[assignment]


@pytest.mark.parametrize("codec", [NoCodec(), Int8Codec()], ids=lambda codec: codec.kind)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_contribution_and_a_heartbeat_walk_through_nobody_else(name: str, codec: Any) -> None:
    cluster = Cluster(STRATEGIES[name], 4, updates=Updates(codec=codec))
    workers = [cluster.join(f"w{number}") for number in range(4)]
    for worker in workers:
        cluster.now += 1
        cluster.step(worker)
    coordinator = cluster.coordinator
    coordinator.members.by_name = Crowd(coordinator.members.by_name)
    coordinator.publisher._held = Crowd(coordinator.publisher._held)
    coordinator.rounds.active = Names(coordinator.rounds.active)
    for worker in workers[:2]:
        worker.protocol.pending = None
        cluster.now += 1
        cluster.pull(worker)
        cluster.step(worker)
        cluster.beat(worker)


def test_the_replicas_that_are_held_are_counted_as_they_come_and_go() -> None:
    publisher, dice, have = WeightsPublisher(Int8Codec()), random.Random(0), dict[str, int]()
    for version in range(60):
        publisher.publish(version, torch.full((50,), float(version)), torch.empty(0))
        for name in dice.sample([f"s{number}" for number in range(8)], 3):
            if dice.random() < 0.2:
                publisher.forget(name)
                have.pop(name, None)
            else:
                publisher.since(name, have.get(name, -1))
                have[name] = version
        assert publisher._kept == len({id(replica) for _, replica in publisher._held.values()})


def test_those_who_can_still_send_to_a_round_are_counted_as_they_come_and_go() -> None:
    rounds, dice = Rounds(), random.Random(1)
    for step in range(400):
        name = f"w{dice.randrange(6)}"
        what = dice.choice(["activate", "deactivate", "hold", "miss", "close"])
        if what == "hold":
            rounds.hold(0, HeldContribution({"worker": name, "seq": step, "late": dice.random() < 0.2}, (), torch.empty(0), torch.empty(0)))
        elif what == "close":
            rounds.open.pop(0, None)
        elif what == "miss":
            rounds.miss(0) if 0 in rounds.open else None
        else:
            getattr(rounds, what)(name)
        sent = set(rounds.open[0].sent) if 0 in rounds.open else set()
        assert rounds.reachable(0) == len(rounds.active | sent)


def test_how_many_workers_may_be_here_is_a_matter_of_the_plan() -> None:
    cluster = Cluster(strategy_of(Async()))
    plan = cluster.plan._replace(bounds=MemberLimits(sessions=3))
    assert type(cluster.coordinator)(plan, cluster.strategy, cluster.learner).members.most_sessions == 3
