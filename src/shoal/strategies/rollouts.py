"""Rollouts: workers answer the prompts that they lease, and the coordinator learns from the answers.

Holds: every token of an answer is determined by the version that its unit was leased with and by a random draw that no worker can
influence. So a unit can be leased again, and a worker that withholds one only causes delay. Each unit is checked with one forward pass
before it is accepted; rewards are computed by the coordinator. A unit that is a few versions old still counts, with the probabilities of
its own version, so a quorum of short answers does not exclude long ones.
"""

from __future__ import annotations

from shoal.config import Run
from shoal.config.schema.strategy import Rollouts
from shoal.coordinator import UnitQuorum
from shoal.engines.learners.answers import RolloutStep
from shoal.strategies.policy_set import Policies
from shoal.strategies.run_length import in_rollouts
from shoal.worker.producers import RolloutContribution
from shoal.worker.step_policies import FeedPolicy


def policies(run: Run, expected: int) -> Policies:
    settings, rlhf = run.strategy, run.rlhf
    assert isinstance(settings, Rollouts)
    assert rlhf is not None  # checked by the configuration's rules
    ppo, prompts = rlhf.ppo, settings.prompts_per_unit
    return Policies(
        rounds=UnitQuorum(ppo.rollout_size // rlhf.group // prompts),
        length=in_rollouts(run, prompts),
        feed=FeedPolicy(
            leased=True,
            batches=prompts,
            lease_s=settings.lease_timeout_s,
            attempts=settings.max_retries,
            most_lag=settings.max_lag,
            given=True,
        ),
        contribution=RolloutContribution(group=rlhf.group, length=ppo.response_length, temperature=ppo.temperature, seed=run.seed),
        apply=RolloutStep(ppo.response_length, ppo.temperature, run.seed, settings.max_lag, settings.inexact_share),
    )
