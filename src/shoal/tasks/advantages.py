"""Advantages: how the score of an answer is distributed over its tokens. Every function is pure, and ignores what is beyond an answer's
end.

Shapes: B answers, T tokens, G answers to one prompt.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def kl_penalty(difference_BT: Tensor, kind: Literal["kl", "abs", "mse"]) -> Tensor:
    """The distance of two log-probabilities of a token: log π − log π₀ itself, its size, or half its square."""
    if kind == "kl":
        return difference_BT
    return difference_BT.abs() if kind == "abs" else 0.5 * difference_BT.square()


def token_rewards(scores_B: Tensor, penalty_BT: Tensor, coefficient: float, real_BT: Tensor) -> Tensor:
    """−coefficient × penalty at each token, and the score at an answer's last one, whether it stopped or was cut. 0 after the end."""
    rewards_BT = torch.where(real_BT, -coefficient * penalty_BT, 0.0)
    last_B1 = real_BT.sum(1, keepdim=True) - 1
    return rewards_BT.scatter_add(1, last_B1, scores_B[:, None].to(rewards_BT.dtype))


def gae(rewards_BT: Tensor, values_BT: Tensor, real_BT: Tensor, gamma: float, decay: float) -> Tensor:
    """Advantages Σ (γλ)^k δ_{t+k} with δ_t = r_t + γ V_{t+1} − V_t. After an answer's last token nothing follows: V is 0 there."""
    values_BT, rewards_BT = values_BT * real_BT, rewards_BT * real_BT
    advantages_BT, following_B = torch.zeros_like(values_BT), torch.zeros_like(values_BT[:, 0])
    next_value_B = torch.zeros_like(following_B)
    for t in range(values_BT.shape[1] - 1, -1, -1):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        following_B = (delta_B + gamma * decay * following_B) * real_BT[:, t]
        advantages_BT[:, t], next_value_B = following_B, values_BT[:, t]
    return advantages_BT


def leave_one_out(totals_B: Tensor, group: int) -> Tensor:
    """Each answer's total less the mean of the other answers to its prompt; groups stand together."""
    totals_NG = totals_B.view(-1, group)
    others_NG = (totals_NG.sum(1, keepdim=True) - totals_NG) / (group - 1)
    return (totals_NG - others_NG).flatten()


def group_relative(totals_B: Tensor, group: int) -> Tensor:
    """Each answer's total less the mean of its group, by the group's standard deviation; 0 where all are equal."""
    totals_NG = totals_B.view(-1, group)
    centred_NG = totals_NG - totals_NG.mean(1, keepdim=True)
    deviation_N1 = totals_NG.std(1, keepdim=True)
    return torch.where(deviation_N1 > 1e-8, centred_NG / deviation_N1.clamp(min=1e-8), 0.0).flatten()


def whiten(values_BT: Tensor, real_BT: Tensor, *, shift: bool = True) -> Tensor:
    """Mean 0 (unless not `shift`) and variance 1 over the real tokens; 0 elsewhere."""
    count = real_BT.sum().clamp(min=1)
    mean = (values_BT * real_BT).sum() / count
    variance = ((values_BT - mean).square() * real_BT).sum() / count
    white_BT = (values_BT - mean) * (variance + 1e-8).rsqrt()
    return torch.where(real_BT, white_BT if shift else white_BT + mean, 0.0)


def adapted(coefficient: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """The next coefficient of the penalty: × (1 + clip(KL/target − 1, ±0.2) · samples/horizon), with the KL of a whole answer."""
    return coefficient * (1 + max(-0.2, min(0.2, kl / target - 1)) * samples / horizon)


class RunningDeviation:
    """The standard deviation of all numbers so far (Welford's algorithm, several at a time), whose state a checkpoint can hold."""

    def __init__(self, count: int = 0, mean: float = 0.0, squares: float = 0.0) -> None:
        self.count, self.mean, self.squares = count, mean, squares

    def add(self, values: Tensor) -> None:
        values = values.double()
        count, mean = self.count + values.numel(), float(values.mean())
        self.squares += float((values - mean).square().sum()) + (mean - self.mean) ** 2 * self.count * values.numel() / count
        self.mean += (mean - self.mean) * values.numel() / count
        self.count = count

    @property
    def deviation(self) -> float:
        """1 as long as all numbers are equal."""
        deviation = (self.squares / max(1, self.count)) ** 0.5
        return deviation if deviation > 1e-8 else 1.0
