"""Rewards, advantages and losses against figures that TRL's own code gave, in float64, for the numbers that are made below.

From trl 0.11.4, `PPOTrainer` of trl/trainer/ppo_trainer.py: `compute_rewards` with each penalty, `compute_advantages`, `loss`,
`_early_stop`; and `AdaptiveKLController` of utils.py. From trl 1.12.0, trl/experimental/ppo/ppo_trainer.py: the parts of `train` from
"4. compute rewards" to "6. compute advantages", and the losses of a mini-batch with their gradients. Its scores stand one token after an
answer that stopped, and ours at its last one, so answers are as long as they may be there. TRL's whitening divides by n − 1.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config.schema.rlhf import Ppo, Rlhf
from shoal.tasks import advantages
from shoal.tasks.policy_gradient import PolicyGradient

PLACES_BT = torch.arange(15, dtype=torch.float64).view(3, 5)
OLD_BT, REFERENCE_BT = -1.5 + torch.sin(PLACES_BT), -1.5 + torch.sin(PLACES_BT + 0.3)
NEW_BT = OLD_BT + 0.3 * torch.cos(2 * PLACES_BT)
VALUES_BT = 0.4 * torch.cos(PLACES_BT)
NEW_VALUES_BT = VALUES_BT + 0.5 * torch.sin(3 * PLACES_BT)
SCORES_B = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
WHOLE_BT = torch.ones(3, 5, dtype=torch.bool)
UNEQUAL_BT = torch.arange(5) < torch.tensor([5, 3, 1])[:, None]
COEFFICIENT, GAMMA, DECAY = 0.3, 0.98, 0.9

PENALISED = {
    "kl": [0.0886561, 0.0366262, -0.0490777, -0.0896597, 0.952191, 0.037997, 0.0888688, -0.441965, 0.1829006],
    "abs": [-0.0886561, -0.0366262, -0.0490777, -0.0896597, 0.952191, -0.037997, -0.0888688, -0.558035, 0.1829006],
    "mse": [-0.0130998, -0.0022358, -0.0040144, -0.0133981, 0.9961905, -0.0024063, -0.0131628, -0.5056134, 0.2424961],
}
"""The rewards of real tokens, row after row (0.11.4)."""
ADVANTAGES = {
    "kl": [-0.1452098, 0.042346, 0.6413098, 1.2060942, 1.3365971, -0.7531597, -1.2833812, -1.4068263, 0.36223],
    "abs": [-0.2819182, 0.0878982, 0.6999024, 1.1925322, 1.3063625, -0.9113942, -1.3213751, -1.2284845, 0.4564767],
}
RETURNS = {
    "kl": [0.5565187, 0.5064431, 0.5511676, 0.7245499, 0.952191, -0.1637314, -0.2713913, -0.441965, 0.1829006],
    "abs": [0.314598, 0.4331907, 0.5511676, 0.7245499, 0.952191, -0.4867838, -0.5515027, -0.558035, 0.1829006],
}
LOSSES = {"kl": (0.024073462365, 0.377597853326, 2 / 9), "abs": (0.026805204728, 0.43683723992, 2 / 9)}
"""The policy's loss, the value's, and the share that was clipped."""
NEWER_ADVANTAGES = [
    *[0.016398257, 0.2398845397, 0.9535928748, 1.6265741184, 1.7820776889, -0.729289286, -1.3639322022, -1.5142524851, -1.114878905],
    *[-0.6155702714, 0.769011629, 0.3928732727, -0.1709722028, -0.3507767918, 0.0792597638],
]
NEWER_RETURNS = [
    *[0.5565186899, 0.5064430584, 0.5511676352, 0.7245498928, 0.9521909676, -0.1764669375, -0.2858306831, -0.458336135, -0.5789881409],
    *[-0.5862992185, 0.2714871421, 0.3836882817, 0.3818797273, 0.299666072, 0.2488493826],
]
SLOPES = [
    *[0.0, -0.0141153587, -0.0522528031, 0.0, -0.1137308842, 0.0, 0.1171239902, 0.1051773688, 0.0, 0.0500285539, -0.0579442018],
    *[-0.0194034066, 0.0129449337, 0.0283939387, -0.0039586325],
]
VALUE_SLOPES = [
    *[-0.0010434579, -0.0014650809, -0.0057155608, 0.0, -0.0098795658, 0.0041005049, 0.0, 0.0078548324, 0.0, 0.0046669005],
    *[-0.0073408771, 0.0, -0.0036015171, 0.0036347356, -0.0043494351],
]


def credited(kind: Any, real_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, advantages as TRL whitens them, and returns."""
    penalty_BT = advantages.kl_penalty(OLD_BT - REFERENCE_BT, kind)
    rewards_BT = advantages.token_rewards(SCORES_B, penalty_BT, COEFFICIENT, real_BT)
    advantages_BT = advantages.gae(rewards_BT, VALUES_BT, real_BT, GAMMA, DECAY)
    count = int(real_BT.sum())
    whitened_BT = advantages.whiten(advantages_BT, real_BT) * math.sqrt((count - 1) / count)
    return rewards_BT, whitened_BT, advantages_BT + VALUES_BT * real_BT


def learned(advantages_BT: Tensor, returns_BT: Tensor, new_BT: Tensor, values_BT: Tensor, real_BT: Tensor) -> tuple[Any, Tensor]:
    """The policy's loss with its figures, and the value's loss."""
    task = PolicyGradient({}, Rlhf(ppo=Ppo(clip_range=0.2, value_clip_range=0.2, value_weight=0.1)))
    batch = {"log_probs": OLD_BT, "advantages": advantages_BT, "values": VALUES_BT * real_BT, "returns": returns_BT}
    policy = task.policy_loss(new_BT, torch.zeros_like(new_BT), batch, real_BT)
    return policy, task.value_loss(values_BT, batch, real_BT)


@pytest.mark.parametrize("kind", list(PENALISED))
def test_every_penalty_gives_the_rewards_of_trl(kind: str) -> None:
    assert credited(kind, UNEQUAL_BT)[0][UNEQUAL_BT].tolist() == pytest.approx(PENALISED[kind], abs=1e-7)


@pytest.mark.parametrize("kind", list(ADVANTAGES))
def test_advantages_returns_and_losses_are_those_of_trl_for_unequal_lengths(kind: str) -> None:
    _, advantages_BT, returns_BT = credited(kind, UNEQUAL_BT)
    assert advantages_BT[UNEQUAL_BT].tolist() == pytest.approx(ADVANTAGES[kind], abs=1e-7)
    assert returns_BT[UNEQUAL_BT].tolist() == pytest.approx(RETURNS[kind], abs=1e-7)
    (loss, figures), value_loss = learned(advantages_BT, returns_BT, NEW_BT, NEW_VALUES_BT, UNEQUAL_BT)
    found = (float(loss), float(value_loss), float(figures["clip_share"]))
    assert found == pytest.approx(LOSSES[kind], abs=1e-7)


def test_losses_and_gradients_are_those_of_trls_newer_trainer() -> None:
    _, advantages_BT, returns_BT = credited("kl", WHOLE_BT)
    assert advantages_BT.flatten().tolist() == pytest.approx(NEWER_ADVANTAGES, abs=1e-7)
    assert returns_BT.flatten().tolist() == pytest.approx(NEWER_RETURNS, abs=1e-9)
    new_BT, values_BT = NEW_BT.clone().requires_grad_(), NEW_VALUES_BT.clone().requires_grad_()
    (loss, _), value_loss = learned(advantages_BT, returns_BT, new_BT, values_BT, WHOLE_BT)
    assert float(loss.detach()) == pytest.approx(0.019181345139, abs=1e-8)
    assert float(value_loss.detach()) == pytest.approx(0.289732484129, abs=1e-8)
    slope_BT, value_slope_BT = torch.autograd.grad(loss + 0.1 * value_loss, [new_BT, values_BT])
    assert slope_BT.flatten().tolist() == pytest.approx(SLOPES, abs=1e-8)
    assert value_slope_BT.flatten().tolist() == pytest.approx(VALUE_SLOPES, abs=1e-8)


def test_the_adaptive_coefficient_goes_the_way_of_trls_controller() -> None:
    coefficient, found = 0.2, []
    for kl, samples in ((0.5, 64), (6.0, 64), (6.6, 256), (20.0, 64), (-1.0, 128), (5.7, 512)):
        coefficient = advantages.adapted(coefficient, kl, 6.0, samples, 10_000)
        found.append(coefficient)
    assert found == pytest.approx([0.199744, 0.199744, 0.20025534464, 0.2005116714811392, 0.19999836160214746, 0.19948636579644596])
