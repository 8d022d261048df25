"""Learning from feedback: rewards, PPO and its relatives."""

from typing import Annotated, Literal

from shoal.config.fields import NonNegativeFloat, NonNegativeInt, NumberBounds, PositiveFloat, PositiveInt, Secret, Section, Share
from shoal.config.parts import Part


class Reward(Part, noun="reward", shorthand=True):
    """A score for each answer. Built by a function of the settings and the run, which returns a function from answers to scores."""

    @property
    def each(self) -> "tuple[Reward, ...]":
        """The rewards of a sum; otherwise this one."""
        return (self,)

    @property
    def untrained(self) -> "tuple[TrainedReward, ...]":
        """The reward models that an earlier phase has to train, on pairs."""
        return ()


class TrainedReward(Reward, built_by="shoal.runs.rlhf.rewards.trained:build"):
    """A reward model, trained on pairs of a chosen and a rejected answer (task `reward`)."""

    kind: Literal["trained"] = "trained"
    run: str | None = None
    """Folder of the run that trained it; null: a first phase trains it on `preferences`."""
    preferences: str | None = None
    """File with the pairs, one JSON object a line."""
    epochs: PositiveInt = 1
    """Passes over the pairs."""
    learning_rate: PositiveFloat = 1e-5
    """Step size."""
    batch_size: PositiveInt = 8
    """Pairs per step."""

    @property
    def untrained(self) -> "tuple[TrainedReward, ...]":
        return () if self.run else (self,)


class JudgeReward(Reward, built_by="shoal.runs.rlhf.rewards.judge:build"):
    """Another model judges the answer: the score is the probability of `yes` against `no`."""

    kind: Literal["judge"] = "judge"
    model: str
    """Folder of a run, name on the hub, or folder of a Transformers model; with an address, the model's name at that server."""
    address: str | None = None
    """A server with an OpenAI-compatible API, such as http://127.0.0.1:8000/v1; null: the model is loaded in this process."""
    key: Secret | None = None
    """API key of that server."""
    question: str = "{prompt}{answer}\n\nIs this a good answer? Say yes or no:"
    """The judge's prompt; {prompt} and {answer} are replaced by the texts."""


class ClassifierReward(Reward, built_by="shoal.runs.rlhf.rewards.classifier:build"):
    """A reward model of Transformers: a sequence classifier that reads prompt and answer."""

    kind: Literal["classifier"] = "classifier"
    model: str
    """Name on the hub, or its folder."""
    label: NonNegativeInt | None = None
    """Label whose log-probability is the score; null: the model has one label, and its output is the score."""


class SentimentReward(Reward, built_by="shoal.runs.rlhf.rewards.sentiment:build"):
    """How positive an answer sounds, from -1 to 1 (vaderSentiment; offline)."""

    kind: Literal["sentiment"] = "sentiment"


class ExactReward(Reward, built_by="shoal.runs.rlhf.rewards.exact:build"):
    """1 if the first line of the answer equals the `answer` beside the prompt in rlhf.prompts, else 0."""

    kind: Literal["exact"] = "exact"
    ignore_case: bool = False
    """Ignore upper and lower case."""


class FunctionReward(Reward, built_by="shoal.runs.rlhf.rewards.function:build"):
    """A function in Python, `function(prompt, answer, **columns)`: the score of an answer, with the other columns of the prompt's row."""

    kind: Literal["function"] = "function"
    function: str | None = None
    """The function as `module:function`, called where answers are scored: by the run itself, or its coordinator. null: a program passes it
    to `shoal.train` as `reward=`."""


class WeightedReward(Section):
    """One reward of a sum."""

    reward: Reward
    """Any reward, also one of a plugin."""
    weight: float = 1.0
    """Factor of its score."""


class SumReward(Reward, built_by="shoal.runs.rlhf.rewards.combined:build"):
    """The weighted sum of several rewards."""

    kind: Literal["sum"] = "sum"
    parts: tuple[WeightedReward, ...]
    runs: tuple[str, ...] = ()
    """Folders of the runs that trained the parts with `preferences` and no `run`, in their order; empty: a first phase trains them."""

    @property
    def each(self) -> tuple[Reward, ...]:
        return tuple(one for part in self.parts for one in part.reward.each)

    @property
    def untrained(self) -> tuple[TrainedReward, ...]:
        return () if self.runs else tuple(one for part in self.each for one in part.untrained)


class Kl(Section):
    """The KL penalty, which keeps the policy near the model it started from."""

    penalty: Literal["kl", "abs", "mse"] = "kl"
    """Penalty for the difference d of a token's log-probabilities: d, |d| or d²/2. Near the reference, mse has about 3 % of the effect of
    kl, and abs about 35 %. The metrics always contain d."""
    coefficient: NonNegativeFloat = 0.2
    """Weight of the penalty (at the start, if adaptive)."""
    adaptive: bool = True
    """Adapt the coefficient so that the divergence stays near `target`."""
    target: PositiveFloat = 6.0
    """Target divergence, in nats per answer."""
    horizon: PositiveInt = 10_000
    """Samples over which the coefficient adapts."""


class Ppo(Section):
    """Generation and optimisation of PPO, RLOO, GRPO and online DPO."""

    rollout_size: PositiveInt = 64
    """Answers generated before each round of updates."""
    mini_batch_size: PositiveInt = 8
    """Answers per gradient; training.gradient_accumulation_steps splits it further."""
    epochs: PositiveInt = 4
    """Passes over each set of answers."""
    clip_range: PositiveFloat = 0.2
    """Clip range of the policy's probability ratio."""
    value_clip_range: PositiveFloat = 0.2
    """Clip range of the value."""
    value_weight: NonNegativeFloat = 0.1
    """Weight of the value loss."""
    entropy_weight: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    gamma: Share = 1.0
    """Discount per token."""
    gae_lambda: Share = 0.95
    """Decay of generalised advantage estimation."""
    whiten_advantages: bool = True
    """Scale advantages to mean 0 and variance 1, over the tokens of all answers."""
    whiten_rewards: bool = False
    """Scale rewards to variance 1, over the tokens of all answers."""
    scale_scores: bool = False
    """Divide scores by their standard deviation over all answers so far."""
    stop_kl: PositiveFloat | None = None
    """Skip the rest of a rollout once the policy has moved this far since it was generated, in nats per token; null: never."""
    prompt_length: PositiveInt = 32
    """Most tokens of a prompt; a longer one loses its beginning."""
    response_length: PositiveInt = 32
    """Most tokens of an answer."""
    temperature: PositiveFloat = 1.0
    """Temperature of generation and of the log-probabilities in the loss."""
    steps: NonNegativeInt = 100
    """Rounds of generating and learning in the policy's phase, in place of training.epochs and training.max_steps."""


class FineTune(Section):
    """Supervised fine-tuning of the policy on chosen answers; the loss is on the answers only."""

    preferences: str
    """File with pairs, one JSON object a line; their chosen answers are learned."""
    epochs: PositiveInt = 1
    """Passes over the answers."""
    learning_rate: PositiveFloat = 1e-5
    """Step size."""
    batch_size: PositiveInt = 8
    """Answers per step."""


class Rlhf(Section):
    """Reinforcement learning from feedback."""

    fine_tune: FineTune | None = None
    """A phase of supervised fine-tuning before the others; null: none."""

    reward: Reward = SentimentReward()
    prompts: str | None = None
    """File of prompts, one a line, or JSON objects with `prompt` and, for the reward `exact`, `answer`, and for cross-attention `context`;
    null: those of the preference pairs where data.source has some, else the beginnings of its texts."""
    policy: str | None = None
    """Folder of the run whose model is trained further; null: a Hugging Face model as it is, or a small model that a first phase trains."""
    algorithm: Literal["ppo", "rloo", "grpo", "online-dpo"] = "ppo"
    """Baseline of the advantage: a learned value (ppo), the other answers to the same prompt (rloo), or their mean, divided by their
    deviation (grpo). online-dpo makes the better of two answers to a prompt more probable than the other, as the task dpo does."""
    beta: PositiveFloat = 0.1
    """For online-dpo: how strongly the policy is held to the model it started from (rlhf.kl for the others)."""
    group_size: Annotated[int, NumberBounds(at_least=2)] = 4
    """Answers to each prompt, for rloo and grpo."""
    value: Literal["network", "head"] = "network"
    """Value function of ppo: a separate network, or one output row on the policy."""
    stop_penalty: NonNegativeFloat = 0.0
    """Subtracted from the score of an answer that did not end before its length limit."""
    ppo: Ppo = Ppo()
    kl: Kl = Kl()

    @property
    def group(self) -> int:
        """Answers to each prompt."""
        return {"ppo": 1, "online-dpo": 2}.get(self.algorithm, self.group_size)

    @property
    def row(self) -> int:
        """Answers that stay in one mini-batch: 2 (a pair) for online-dpo, else 1."""
        return 2 if self.algorithm == "online-dpo" else 1
