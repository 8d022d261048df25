"""The number of inner steps of a worker before its next contribution."""

from __future__ import annotations

import statistics
from itertools import islice

from shoal.coordinator.members.table import Member, MemberTable
from shoal.coordinator.round_policies import CoordinatorPolicies
from shoal.coordinator.run_plan import RunPlan

LEAST_SHARE = 1 / 8
"""Least share of the fastest worker's steps. A worker that is slower still is awaited, or comes too late."""
_ENOUGH = 256
"""Sample size for the progress of a round: it is computed for each newcomer, so not all of thousands of workers are looked at."""


def steps_for(policies: CoordinatorPolicies, plan: RunPlan, version: int, worker: Member, members: MemberTable, now: float) -> int:
    """The strategy's steps, fewer for a slower worker or a newcomer in mid-round if the strategy says so, and no more than are left."""
    contribution = policies.contribution
    steps = contribution.inner_steps
    if version > 0 and policies.rounds.closes_early:
        steps = max(1, round(steps * _left_of_round(worker, members, now)))
    if contribution.balances_speeds and worker.pace is not None:
        steps = max(1, round(steps * max(LEAST_SHARE, worker.pace / members.paces.largest)))
    left = plan.worker_steps - version * contribution.inner_steps
    return min(steps, left) if plan.total_batches is None and left > 0 else steps


def _left_of_round(worker: Member, members: MemberTable, now: float) -> float:
    """The share of a round that is left to the others, so that a worker of unknown pace ends together with them."""
    if worker.pace is not None:
        return 1.0
    left = [
        0.0 if one.began_at is None else 1 - (now - one.began_at) * one.pace / one.batches
        for one in islice(members.by_name.values(), 0, None, max(1, len(members.by_name) // _ENOUGH))
        if one is not worker and one.pace is not None
    ]
    return min(1.0, max(0.0, statistics.median(left))) if left else 1.0
