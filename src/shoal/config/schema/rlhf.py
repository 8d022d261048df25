"""Learning from human preferences: rewards, and what learns from them."""

from typing import Annotated, Literal

from shoal.config.fields import NonNegativeFloat, NonNegativeInt, NumberBounds, PositiveFloat, PositiveInt, Secret, Section, Share
from shoal.config.parts import Part


class Reward(Part, noun="reward", shorthand=True):
    """How good an answer is, as one number. Built by a function of its settings and the run: it gives a function from answers to scores."""

    @property
    def each(self) -> "tuple[Reward, ...]":
        """The rewards that it is made of."""
        return (self,)


class TrainedReward(Reward, built_by="shoal.runs.rlhf.rewards.trained:build"):
    """A reward model that has learned from pairs of a chosen and a rejected answer (the task `reward`)."""

    kind: Literal["trained"] = "trained"
    run: str | None = None
    """Folder of the run that trained it; null: it is trained first, from `preferences`."""
    preferences: str | None = None
    """File with the pairs, one JSON object a line."""
    epochs: PositiveInt = 1
    """Passes over the pairs."""
    learning_rate: PositiveFloat = 1e-5
    """Step size."""
    batch_size: PositiveInt = 8
    """Pairs per step."""


class JudgeReward(Reward, built_by="shoal.runs.rlhf.rewards.judge:build"):
    """A model is asked whether an answer is good: the score is how probable it finds `yes` against `no`."""

    kind: Literal["judge"] = "judge"
    model: str
    """Folder of a run, name on the hub, or a folder with a model of transformers; with an address, the model's name there."""
    address: str | None = None
    """Where a server answers that speaks as OpenAI's does, such as http://127.0.0.1:8000/v1; null: the model is loaded here."""
    key: Secret | None = None
    """What the server asks for as a key."""
    question: str = "{prompt}{answer}\n\nIs this a good answer? Say yes or no:"
    """What the judge reads before it says yes or no; {prompt} and {answer} stand for the texts."""


class ClassifierReward(Reward, built_by="shoal.runs.rlhf.rewards.classifier:build"):
    """A reward model of transformers: a classifier of sequences, which reads prompt and answer."""

    kind: Literal["classifier"] = "classifier"
    model: str
    """Name on the hub, or its folder."""
    label: NonNegativeInt | None = None
    """The label whose log-probability is the score; null: the model has one label, and its number is the score."""


class SentimentReward(Reward, built_by="shoal.runs.rlhf.rewards.sentiment:build"):
    """How positive an answer sounds, from -1 to 1 (vaderSentiment; offline)."""

    kind: Literal["sentiment"] = "sentiment"


class ExactReward(Reward, built_by="shoal.runs.rlhf.rewards.exact:build"):
    """1 where the first line of an answer is the one that the prompt's file gives as `answer`, else 0."""

    kind: Literal["exact"] = "exact"
    ignore_case: bool = False
    """Whether capital and small letters are the same."""


class WeightedReward(Section):
    """One reward of a sum."""

    reward: Reward
    """Any reward; a plugin's, too."""
    weight: float = 1.0
    """What its score is multiplied by."""


class SumReward(Reward, built_by="shoal.runs.rlhf.rewards.combined:build"):
    """Several rewards, each times its weight, added up."""

    kind: Literal["sum"] = "sum"
    parts: tuple[WeightedReward, ...]
    runs: tuple[str, ...] = ()
    """Folders of the runs that trained those parts which have `preferences` and no `run`, in their order; empty: they are trained first."""

    @property
    def each(self) -> tuple[Reward, ...]:
        return tuple(one for part in self.parts for one in part.reward.each)


class Kl(Section):
    """What keeps the policy near the model it started from."""

    penalty: Literal["kl", "abs", "mse"] = "kl"
    """How the distance d of a token's log-probabilities is measured: d, |d| or d²/2. Near the reference, mse gives about 3 % of the force
    of kl, and abs about 35 %. The record always has d itself."""
    coefficient: NonNegativeFloat = 0.2
    """Weight of the penalty (at the start, if adaptive)."""
    adaptive: bool = True
    """Move the coefficient so that the divergence stays near `target`."""
    target: PositiveFloat = 6.0
    """Divergence to stay near, in nats per answer."""
    horizon: PositiveInt = 10_000
    """Samples over which the coefficient adapts."""


class Ppo(Section):
    """How answers are made, and how much is learned from them."""

    rollout_size: PositiveInt = 64
    """Answers generated before each round of updates."""
    mini_batch_size: PositiveInt = 8
    """Answers per gradient; training.gradient_accumulation_steps cuts it into pieces."""
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
    """Bring advantages to mean 0 and variance 1, over the tokens of all answers."""
    whiten_rewards: bool = False
    """Bring rewards to variance 1, over the tokens of all answers."""
    scale_scores: bool = False
    """Divide scores by their standard deviation over all answers so far."""
    stop_kl: PositiveFloat | None = None
    """Learn no more from a set of answers once the policy has moved so far from the one that gave them (in nats per token); null: never."""
    prompt_length: PositiveInt = 32
    """Most tokens of a prompt; of a longer one the end is kept."""
    response_length: PositiveInt = 32
    """Most tokens of an answer."""
    temperature: PositiveFloat = 1.0
    """Temperature of generation, and of the log-probabilities that are learned from."""
    steps: NonNegativeInt = 100
    """Rounds of generating and learning: how long the policy's phase is, whatever training.epochs and training.max_steps are."""


class FineTune(Section):
    """The policy learns chosen answers first, as a language model does; the loss is on the answers alone."""

    preferences: str
    """File with pairs, one JSON object a line, of which the chosen answers are learned."""
    epochs: PositiveInt = 1
    """Passes over the answers."""
    learning_rate: PositiveFloat = 1e-5
    """Step size."""
    batch_size: PositiveInt = 8
    """Answers per step."""


class Rlhf(Section):
    """Reinforcement learning from feedback."""

    fine_tune: FineTune | None = None
    """A phase before all others; null: there is none."""

    reward: Reward = SentimentReward()
    prompts: str | None = None
    """File of prompts, one a line, or JSON objects with `prompt` and, for the reward `exact`, `answer`, and for cross-attention `context`;
    null: those of the preference pairs where data.source has some, else the beginnings of its texts."""
    policy: str | None = None
    """Folder of the run whose model goes on learning; null: a model of Hugging Face as it is, or a small one that is trained first."""
    algorithm: Literal["ppo", "rloo", "grpo", "online-dpo"] = "ppo"
    """How a score becomes the advantage of a token: against a learned value (ppo), against the other answers to the same prompt (rloo),
    or against their mean, by their deviation (grpo). Or the better of two answers to a prompt is made more probable than the other, as the
    task dpo does with pairs (online-dpo)."""
    beta: PositiveFloat = 0.1
    """For online-dpo: how closely the policy is held to the one it started from, as rlhf.kl does for the others."""
    group_size: Annotated[int, NumberBounds(at_least=2)] = 4
    """Answers to each prompt, for rloo and grpo."""
    value: Literal["network", "head"] = "network"
    """What predicts scores for ppo: a network of its own, or one row of weights on the policy."""
    stop_penalty: NonNegativeFloat = 0.0
    """What an answer loses that did not stop by itself."""
    ppo: Ppo = Ppo()
    kl: Kl = Kl()

    @property
    def group(self) -> int:
        """Answers to each prompt."""
        return {"ppo": 1, "online-dpo": 2}.get(self.algorithm, self.group_size)

    @property
    def row(self) -> int:
        """Answers that are learned from together, and never apart: a pair, or one."""
        return 2 if self.algorithm == "online-dpo" else 1
