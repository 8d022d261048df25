"""How many steps a worker takes alone before its next contribution."""

from __future__ import annotations

from shoal.coordinator.membership import Membership, Worker
from shoal.coordinator.policies import Inner
from shoal.coordinator.state import Plan

LEAST_SHARE = 1 / 8
"""Of the steps of the fastest worker: who is slower still is waited for, or comes too late."""


def inner_steps(inner: Inner, plan: Plan, version: int, worker: Worker, members: Membership) -> int:
    """The strategy's number: fewer for a slower worker where speeds are balanced, and no more than are left of the run."""
    steps = inner.steps
    if inner.balanced and worker.pace is not None:
        fastest = max(one.pace for one in members.by_name.values() if one.pace is not None)
        steps = max(1, round(steps * max(LEAST_SHARE, worker.pace / fastest)))
    left = plan.worker_steps - version * inner.steps
    return min(steps, left) if plan.total_batches is None and left > 0 else steps
