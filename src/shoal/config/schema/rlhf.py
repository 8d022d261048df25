"""Learning from human preferences: a reward model, and PPO against it."""

from typing import Literal, Union

from shoal.config.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Share


class TrainedReward(Section):
    """A reward model trained on pairs of a chosen and a rejected answer."""

    kind: Literal["trained"] = "trained"
    preferences: str
    """File with the pairs, one JSON object a line."""
    epochs: PositiveInt = 1
    """Passes over the pairs."""
    learning_rate: PositiveFloat = 1e-5
    """Step size."""
    batch_size: PositiveInt = 8
    """Pairs per step."""


class JudgeReward(Section):
    """A model that is asked how good an answer is."""

    kind: Literal["judge"] = "judge"
    model: str
    """Name on the hub, or a folder."""


class SentimentReward(Section):
    """How positive an answer sounds (offline, for tests)."""

    kind: Literal["sentiment"] = "sentiment"


class Kl(Section):
    """What keeps the policy near the model it started from."""

    penalty: Literal["kl", "abs", "mse"] = "kl"
    """How the distance of a token's log-probabilities is measured."""
    coefficient: NonNegativeFloat = 0.2
    """Weight of the penalty (at the start, if adaptive)."""
    adaptive: bool = True
    """Move the coefficient so that the divergence stays near `target`."""
    target: PositiveFloat = 6.0
    """Divergence to stay near, in nats per answer."""
    horizon: PositiveInt = 10_000
    """Samples over which the coefficient adapts."""


class Ppo(Section):
    """Proximal policy optimization."""

    rollout_size: PositiveInt = 64
    """Answers generated before each round of updates."""
    mini_batch_size: PositiveInt = 8
    """Answers per gradient."""
    epochs: PositiveInt = 4
    """Passes over each set of answers."""
    clip_range: PositiveFloat = 0.2
    """How far the policy's ratio may move and still count."""
    value_clip_range: PositiveFloat = 0.2
    """The same for the value."""
    value_weight: NonNegativeFloat = 0.1
    """Weight of the value loss."""
    entropy_weight: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    gamma: Share = 1.0
    """Discount per token."""
    gae_lambda: Share = 0.95
    """Decay of generalised advantage estimation."""
    whiten_advantages: bool = True
    """Bring advantages to mean 0 and variance 1."""
    whiten_rewards: bool = False
    """Bring rewards to variance 1."""
    prompt_length: PositiveInt = 32
    """Most tokens of a prompt."""
    response_length: PositiveInt = 32
    """Most tokens of an answer."""
    temperature: PositiveFloat = 1.0
    """Temperature of generation."""
    steps: NonNegativeInt = 100
    """Rounds of generating and learning."""


class Rlhf(Section):
    """Reinforcement learning from human feedback."""

    reward: Union[TrainedReward, JudgeReward, SentimentReward] = SentimentReward()
    prompts: str | None = None
    """File of prompts, one a line or JSON objects; null: from the preference pairs."""
    ppo: Ppo = Ppo()
    kl: Kl = Kl()
