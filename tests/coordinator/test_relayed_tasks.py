"""Relays that do the tasks of a scheduler, on the virtual clock: blocks of consecutive batches, whichever worker does them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.config.schema.strategy import Async, Edp, SyncPs
from shoal.coordinator.audit.files import gather
from shoal.coordinator.audit.run import audit
from tests.coordinator.test_driver import World
from tests.coordinator.test_relays import Learner, Relay, lines, told_above
from tests.coordinator.test_scheduled_tasks import Tasked, TaskedWorld, cut
from tests.support.small_cluster import strategy_of


class OneSource(TaskedWorld):
    """A run whose data is one long task at a time, for a relay alone."""

    tasks = cut(24, epochs=2)


def batches_of(folder: Path) -> list[tuple[int, int, int, int]]:
    """Epoch, first batch, end and number of each contribution that was learned from."""
    found = [line for line in lines(folder) if "from" in line and line.get("upstream", ["", 0, "accepted"])[2] == "accepted"]
    return [(one[6], one[7] - one[8], one[7], one[1]) for line in found for one in line["from"]]


def learned(folder: Path) -> Counter[tuple[int, int]]:
    return Counter((epoch, batch) for epoch, first, end, _ in batches_of(folder) for batch in range(first, end))


def violations(folder: Path) -> list[str]:
    found: list[str] = []
    evidence = gather(folder / "coordinator", (folder / "workers").glob("*.jsonl"), found)
    return audit(evidence, found, tasks=True).violations


def finished(world: World, *relays: Any) -> None:
    """Run to the end; no level of the tree lacks anything, or has a batch twice."""
    world.run()
    above: Any = SimpleNamespace(folder=world.folder)
    for relay in relays:
        relay.driver.snapshot()
        relay.driver.close()
        assert violations(relay.folder) == []
        assert told_above(above, relay) == []
    assert violations(world.folder) == []
    assert set(learned(world.folder).values()) == {1}


@pytest.mark.parametrize("dies", ["", "combined", "sent", "snapshot"])
@pytest.mark.parametrize("settings", [Async(), Edp(pull_every_steps=2), SyncPs(round_timeout_s=5.0)])
def test_a_relay_does_tasks_beside_a_worker_and_no_batch_counts_twice(tmp_path: Path, settings: Any, dies: str) -> None:
    world = TaskedWorld(tmp_path, strategy_of(settings, 2), seed=3)
    relay = Relay(world, "left", 0, "syncps", dies)
    Learner(world, "own", 1.5)
    finished(world, relay)
    assert (relay.deaths > 0) == bool(dies)
    assert learned(relay.folder) <= learned(tmp_path)
    assert world.driver.coordinator.state.batches >= 48
    assert any(end - first == 2 for _, first, end, _ in batches_of(tmp_path)), "two workers make two batches of one contribution"


def relay_alone(folder: Path, workers: int = 3, dies: str = "") -> tuple[World, Relay]:
    world = OneSource(folder, strategy_of(Async()), seed=5)
    return world, Relay(world, "left", 0, "syncps", dies, workers)


def test_what_a_relay_sends_covers_its_task_in_order_and_without_gaps(tmp_path: Path) -> None:
    world, relay = relay_alone(tmp_path, dies="sent")
    finished(world, relay)
    assert relay.deaths >= 3
    spans = sorted((epoch, first, end) for epoch, first, end, _ in batches_of(tmp_path))
    assert all(before[2] == after[1] for before, after in pairwise(spans) if before[0] == after[0])
    assert learned(relay.folder) == learned(tmp_path)


def vanish(relay: Relay) -> None:
    """A worker is gone, without a word."""
    relay.workers[1].speak = lambda: None  # type: ignore[method-assign]


def stand_still(relay: Relay) -> None:
    """A worker never sends, and shows all the same that it is alive."""
    worker = relay.workers[1]
    worker.speak = lambda: None  # type: ignore[method-assign]

    def beat() -> None:
        assert relay.driver is not None
        member = relay.driver.coordinator.members.by_name.get(worker.protocol.name)
        if member is not None:
            relay.driver.coordinator.members.touch(member, relay.driver.coordinator.now)
        relay.at(1.0, beat)

    beat()


def come_late(relay: Relay) -> None:
    relay.workers.append(Learner(relay, "late", 1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("event", [vanish, stand_still, come_late])
def test_others_do_the_part_of_a_missing_worker_and_newcomers_get_one(tmp_path: Path, event: Callable[[Relay], None]) -> None:
    world, relay = relay_alone(tmp_path)
    world.at(5.2, lambda: event(relay))
    finished(world, relay)
    assert learned(relay.folder) == learned(tmp_path)
    sizes = [end - first for _, first, end, _ in batches_of(tmp_path)]
    assert sizes[-3] == (4 if event is come_late else 2), sizes


def test_a_relay_below_a_relay_does_tasks_too(tmp_path: Path) -> None:
    world, middle = relay_alone(tmp_path, workers=1, dies="sent")
    lowest: Any = Relay(middle, "lowest", 0, "syncps")  # type: ignore[arg-type]  # it asks of what is above only what a relay has, too
    finished(world, middle)
    assert middle.deaths >= 3
    lowest.driver.snapshot()
    lowest.driver.close()
    assert violations(lowest.folder) == []
    assert told_above(middle, lowest) == []  # type: ignore[arg-type]
    assert learned(lowest.folder) <= learned(tmp_path)
    assert sum(learned(lowest.folder).values()) > 8


def test_a_relay_that_has_sent_nothing_counts_as_all_of_its_workers() -> None:
    cluster = Tasked(cut(2, 8))
    one, relay = cluster.join("one", pull=False), cluster.join("relay", pull=False, workers=6)
    cluster.pull(one)
    cluster.pull(relay)
    assert (cluster.holder(one), cluster.holder(relay)) == ("t0", "t1")


def test_taking_over_the_end_of_a_relays_task_leaves_it_the_round_that_it_computes() -> None:
    cluster = Tasked(cut(40, 1))
    relay, fast = cluster.join("relay", workers=6), cluster.join("fast")
    assert cluster.holder(relay) == "t0"
    cluster.pass_time(1.0)
    relay.epoch, relay.position = 0, 5
    cluster.step(relay, batches=6)
    for _ in range(2):
        cluster.work(fast)
    piece = cluster.coordinator.state.pieces[cluster.coordinator.members.by_name["relay"].seat]
    assert piece.end >= 6 + 2 * 6
