"""What is learned."""

from typing import ClassVar, Literal

from shoal.config.fields import PositiveFloat, Share
from shoal.config.parts import Part

Need = Literal["labels", "images", "tokens", "pairs", "prompts", "samples"]
TEXT: tuple[Need, ...] = ("tokens", "pairs", "prompts")
"""What is made of text; the others are made of images."""


class Task(Part, noun="task", shorthand=True):
    """What is learned: losses, metrics, evaluation. Built by a function of its settings, the run, the networks and the data's shapes."""

    needs: ClassVar[Need] = "labels"
    """What it learns from. It fits every model that learns a task with the same needs."""
    shows: ClassVar[Literal["images", "text", ""]] = ""
    """What the run saves at each evaluation: images that the task draws (`Task.images`), text that the model writes, or nothing."""
    does: ClassVar[str] = ""
    """What a model that has learned it does, in a model card: "a model that …"."""
    pipeline: ClassVar[str] = ""
    """The hub's name for such models, where it has one."""
    scores: ClassVar[bool] = False
    """Whether its network ends in one number for a text, in place of logits."""
    drops: ClassVar[bool] = True
    """Whether it is learned with the model's dropout, and with mixtures that route as in training."""


class Classification(Task, built_by="shoal.tasks.classification:build"):
    """Which class is it?"""

    kind: Literal["classification"] = "classification"
    needs = "labels"
    does = "classifies images"
    pipeline = "image-classification"


class LanguageModelling(Task, built_by="shoal.tasks.language:build"):
    """Which token comes next?"""

    kind: Literal["language-modelling"] = "language-modelling"
    needs = "tokens"
    shows = "text"
    does = "writes text"
    pipeline = "text-generation"


class Gan(Task, built_by="shoal.tasks.gan:build"):
    """A generator of images learns against a discriminator."""

    kind: Literal["gan"] = "gan"
    needs = "images"
    shows = "images"
    does = "draws images"
    pipeline = "unconditional-image-generation"


class Reward(Task, built_by="shoal.tasks.reward:build"):
    """Which of two answers is the better one? (Bradley and Terry's model: a score for each.)"""

    kind: Literal["reward"] = "reward"
    needs = "pairs"
    scores = True
    drops = False
    does = "scores answers"
    pipeline = "text-classification"
    head_only: bool = False
    """Train nothing but the row of weights that makes the score; the network below stays as it is."""


class Dpo(Task, built_by="shoal.tasks.dpo:build"):
    """Make chosen answers more probable than rejected ones, against the model of the beginning (direct preference optimization)."""

    kind: Literal["dpo"] = "dpo"
    needs = "pairs"
    drops = False
    shows = "text"
    does = "writes text"
    pipeline = "text-generation"
    beta: PositiveFloat = 0.1
    """How closely the model is held to the one it started from: the higher, the closer."""
    label_smoothing: Share = 0.0
    """How probable it is that a pair is the wrong way round; below 0.5."""


class PpoTask(Task, built_by="shoal.tasks.policy_gradient:build"):
    """Reinforcement learning from feedback: the section `rlhf` says how."""

    kind: Literal["ppo"] = "ppo"
    needs = "prompts"
    drops = False
    shows = "text"
    does = "writes text"
    pipeline = "text-generation"


class CustomTask(Task, built_by="shoal.tasks.user_task:build"):
    """What a loss of one's own says, on data of one's own."""

    kind: Literal["custom"] = "custom"
    needs = "samples"
    does = "does what its own loss asks for"
