"""A round whose experts are weighed by reported tokens: what the records say is all that the new weights follow from."""

from __future__ import annotations

from typing import Any

import torch

from shoal.config.schema.strategy import DiLoCo
from shoal.config.schema.updates import NoCodec, Updates
from shoal.coordinator.durable.replayed_state import ReplayedState
from shoal.coordinator.run_plan import RunPlan
from shoal.updates import codecs
from shoal.updates.experts import ExpertBlocks
from tests.support.small_cluster import RATE, Numbers, strategy_of

BLOCKS = ExpertBlocks((((1, 2),), ((2, 3),)), layers=1, per_token=1, loads_at=0, cap=1.5, size=4)
"""Four numbers: the second and the third are experts."""


def after_a_round(*reports: list[float]) -> torch.Tensor:
    """The weights after one round, taken from records as a journal has them: each worker moved all its numbers by its own number."""
    learner: Any = Numbers()
    learner.buffers = torch.zeros(2)
    plan = RunPlan(Updates(), 0, 2, 1, 100, None, 16, 5.0, 0.5, experts=BLOCKS)
    replayed = ReplayedState(plan, strategy_of(DiLoCo(expert_weight_cap=1.5, rounds=4), 2), learner)
    for number, report in enumerate(reports):
        frames = [codecs.encode(NoCodec(), values, None)[0] for values in (torch.full((4,), float(number)), torch.tensor(report))]
        about = {"worker": f"w{number}", "seq": 0, "seat": number, "base": 0, "round": 0, "share": 1.0, "weight": 1.0, "samples": 2}
        replayed.apply({"kind": "accepted", **about, "epoch": 0, "position": 1, "batches": 1, "metrics": {}}, frames)
    replayed.apply({"kind": "closed", "round": 0, "contributions": [(f"w{number}", 0) for number in range(len(reports))]})
    return -learner.vector / RATE


def test_a_round_weighs_each_expert_by_what_its_records_hold() -> None:
    found = after_a_round([0.6, 0.4], [0.4, 0.6])
    torch.testing.assert_close(found, torch.tensor([0.5, 0.4, 0.6, 0.5]))


def test_a_worker_that_claims_everything_counts_up_to_the_cap() -> None:
    found = after_a_round([0.5, 0.5], [3e38, 3e38])
    torch.testing.assert_close(found, torch.tensor([0.5, 0.5, 0.5, 0.5]))
    found = after_a_round([0.1, 0.9], [3e38, 0.0])
    torch.testing.assert_close(found, torch.tensor([0.5, 0.75, 0.25, 0.5]))


def test_one_contribution_alone_is_taken_as_it_is() -> None:
    torch.testing.assert_close(after_a_round([0.0, 1.0]), torch.zeros(4))


def test_loads_that_cannot_be_true_are_cut_where_they_are_read() -> None:
    report = torch.tensor([7.0, 3e38, float("nan")])
    torch.testing.assert_close(BLOCKS._replace(loads_at=1).checked(report), torch.tensor([7.0, 1.0, 0.0]))
