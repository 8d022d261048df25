"""Schedules of faults for a coordinator and its workers: the strategies, what may happen, and a run that lives through a schedule."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from shoal.config.schema.strategy import Async, DiLoCo, Edp, SyncPs, WorkUnits
from shoal.config.schema.updates import Updates
from shoal.coordinator.run_plan import DataTask, RunPlan, TaskPlan
from shoal.coordinator.units.cut import DataCut
from shoal.scheduling import KINDS
from shoal.strategies import Policies
from tests.support.network_faults import LONGEST, World
from tests.support.small_cluster import strategy_of

STRATEGIES: dict[str, Policies] = {
    "syncps": strategy_of(SyncPs(round_timeout_s=10.0)),
    "syncps, window 3": strategy_of(SyncPs(round_timeout_s=10.0, window=3)),
    "syncps, blending": strategy_of(SyncPs(round_timeout_s=10.0, window=2, pull_every_steps=3), polyak_alpha=0.5),
    "edp": strategy_of(Edp(pull_every_steps=3)),
    "async": strategy_of(Async(max_staleness=3, max_staleness_multiplier=2.0)),
    "async, k = 2": strategy_of(Async(max_staleness=5, contributions_per_update=2)),
    "async, k = 3": strategy_of(Async(max_staleness=50, contributions_per_update=3)),
    "diloco": strategy_of(DiLoCo(inner_steps=1, round_timeout_s=10.0)),
    "diloco, quorum": strategy_of(DiLoCo(inner_steps=1, round_timeout_s=10.0, quorum=2, grace_s=2.0), 4),
    "diloco, late ones weighed": strategy_of(DiLoCo(inner_steps=1, round_timeout_s=10.0, quorum=2, late="weigh"), 4),
    "workunits": strategy_of(WorkUnits(batches_per_unit=2, units_per_update=2)),
    "workunits, no lag": strategy_of(WorkUnits(batches_per_unit=2, units_per_update=2, max_lag=0)),
    "workunits, one at a time": strategy_of(WorkUnits(batches_per_unit=5, units_per_update=1)),
    "diloco, asynchronous": strategy_of(DiLoCo(inner_steps=1, round_timeout_s=10.0, quorum=1, late="weigh"), 4),
    "async, tasks": strategy_of(Async(max_staleness=50)),
    "edp, tasks": strategy_of(Edp(pull_every_steps=3)),
    "syncps, tasks": strategy_of(SyncPs(round_timeout_s=10.0)),
}
TASKS = TaskPlan((DataTask("long", 0, 3), DataTask("short", 3, 4)), 20, 1, KINDS["gale-shapley"], {})
LIKELY = ["go"] * 8 + ["act"] * 5 + ["deliver"] * 5 + ["time"] * 3
WRONG = ["double", "lose", "again", "again", "die", "leave", "crash", "crash", "snapshot", "rest"]
DISK = ["full", "half", "snapshot", "spoil"]
"""What a disk does: it is full, it takes half a snapshot, or the newest snapshot cannot be read."""
SCHEDULE = st.lists(st.tuples(st.sampled_from(LIKELY + WRONG + DISK), st.integers(0, 11)), min_size=20, max_size=120)


def live_through(name: str, schedule: list[tuple[str, int]], workers: int, steps: int) -> World:
    strategy = STRATEGIES[name]
    plan = RunPlan(Updates(), 0, workers, 1, steps, None, 8 * workers, 5.0, 0.5)
    if strategy.feed.leased:
        cut = DataCut(LONGEST, strategy.feed.batches, 30)
        plan = plan._replace(cut=cut, lease_s=20.0, attempts=50, most_lag=strategy.feed.most_lag)
    if "tasks" in name:
        plan = plan._replace(tasks=TASKS)
    world = World(strategy, plan, workers)
    for kind, number in schedule:
        world.happen(kind, number)
    world.calm_down()
    world.crash()
    for worker in world.workers:
        world.act(worker)
    world.settle()
    world.end()
    world.check()
    return world


def examples(count: int) -> Any:
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
