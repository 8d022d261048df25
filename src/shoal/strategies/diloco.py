"""DiLoCo: every worker takes many inner steps; an outer optimizer then applies the mean pseudo-gradient.

Holds: all workers start a round at the same weights θ₀, and return to them before the outer step; the outer gradient is the mean of θ₀ − θ
over the workers, weighted by what they learned from, or in an expert of a mixture by the tokens that it saw. Inner optimizers and their
schedule continue through all rounds.
"""

from __future__ import annotations

from shoal.config import Run
from shoal.config.schema.strategy import DiLoCo
from shoal.config.schema.training import Schedule
from shoal.coordinator import Barrier, Discounted, Everything
from shoal.engines.learners.apply import OuterStep
from shoal.strategies.policy_set import Policies
from shoal.strategies.run_length import in_rounds
from shoal.worker.producers import PseudoGradientContribution
from shoal.worker.step_policies import PullPolicy


def policies(run: Run, expected: int) -> Policies:
    settings = run.strategy
    assert isinstance(settings, DiLoCo)
    weighs, steps = settings.late == "weigh", settings.inner_steps // settings.fragments
    quorum = None if settings.quorum is None else min(settings.quorum, expected)
    schedule = Schedule(kind=settings.outer_schedule, power=settings.outer_power)
    rounds = Barrier(deadline_s=settings.round_timeout_s, quorum=quorum, grace_s=settings.grace_s, late_count=weighs)
    return Policies(
        rounds=rounds,
        length=in_rounds(run, rounds, steps, by_data=settings.quorum is not None or settings.balance_speeds),
        contribution=PseudoGradientContribution(
            inner_steps=steps,
            balances_speeds=settings.balance_speeds,
            fragments=settings.fragments,
            sync_delay=settings.overlap_steps,
            sends_weights=averages(run),
        ),
        admission=Discounted() if weighs else Everything(),
        apply=OuterStep(settings.outer, schedule, settings.outer_clip_norm, averages(run)),
        pull=PullPolicy(blend=settings.overlap_blend if settings.overlap_steps else 1.0),
        expert_cap=settings.expert_weight_cap,
    )


def averages(run: Run) -> bool:
    """Whether the outer step is exactly the mean of the workers' weights. θ₀ − 1·(θ₀ − θ) equals θ, but not in 32-bit floats: if the
    difference is not changed on its way, the weights are sent, so a run with one worker is plain training, bit for bit."""
    settings, updates = run.strategy, run.updates
    assert isinstance(settings, DiLoCo)
    outer = settings.outer
    plain_step = outer.name == "SGD" and outer.learning_rate == 1 and outer.momentum == 0 and not outer.kwargs
    plain_course = settings.outer_schedule == "constant" and settings.outer_clip_norm is None and settings.late == "drop"
    plain_way = updates.codec.kind == "none" and updates.clip_norm is None and not updates.privacy.enabled
    return plain_step and plain_course and plain_way and updates.aggregation.kind == "mean" and not updates.memory
