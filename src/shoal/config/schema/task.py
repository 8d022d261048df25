"""Tasks: what a model is trained for."""

from typing import ClassVar, Literal

from shoal.config.fields import NonNegativeFloat, PositiveFloat, Share
from shoal.config.parts import Part

Need = Literal["labels", "images", "tokens", "pairs", "prompts", "samples"]
TEXT: tuple[Need, ...] = ("tokens", "pairs", "prompts")
"""Needs that are met by text."""


class Task(Part, noun="task", shorthand=True):
    """Losses, metrics and evaluation. Built by a function of the settings, the run, the networks and the data's shapes."""

    needs: ClassVar[Need] = "labels"
    """Kind of data that it learns from. The task fits every model that learns a task with the same needs."""
    shows: ClassVar[Literal["images", "text", ""]] = ""
    """Samples that are saved at each evaluation: generated images, generated text, or none."""
    does: ClassVar[str] = ""
    """Completes "a model that …" in a model card."""
    pipeline: ClassVar[str] = ""
    """Pipeline tag of the hub."""
    scores: ClassVar[bool] = False
    """Whether the network gives one score per text instead of logits."""
    drops: ClassVar[bool] = True
    """Whether dropout and the routers' training mode are used."""
    measures: ClassVar[tuple[str, ...]] = ()
    """Metrics of its evaluations; none: they depend on more than the task."""

    @property
    def unpaired(self) -> bool:
        """Whether it learns from single answers with a label, where `needs` is `pairs`."""
        return False


class Classification(Task, built_by="shoal.tasks.classification:build"):
    """Classification of images."""

    kind: Literal["classification"] = "classification"
    needs = "labels"
    does = "classifies images"
    pipeline = "image-classification"
    measures = ("loss", "accuracy")


class TextTask(Task, shared=True):
    """What tasks have in common whose models write text."""

    shows = "text"
    does = "writes text"
    pipeline = "text-generation"


class LanguageModelling(TextTask, built_by="shoal.tasks.language:build"):
    """Prediction of the next token."""

    kind: Literal["language-modelling"] = "language-modelling"
    needs = "tokens"
    measures = ("loss", "perplexity", "loss_without_context", "loss_without_retrieval", "loss_without_memory")


class Gan(Task, built_by="shoal.tasks.gan:build"):
    """A generative adversarial network: a generator of images against a discriminator."""

    kind: Literal["gan"] = "gan"
    needs = "images"
    shows = "images"
    does = "draws images"
    pipeline = "unconditional-image-generation"
    measures = ("discriminator_loss", "generator_loss", "discriminator_accuracy")


class RewardTask(Task, built_by="shoal.tasks.reward:build"):
    """A reward model that learns which of two answers is better (Bradley-Terry model)."""

    kind: Literal["reward"] = "reward"
    needs = "pairs"
    scores = True
    drops = False
    does = "scores answers"
    pipeline = "text-classification"
    measures = ("loss", "accuracy", "margin")
    head_only: bool = False
    """Train only the output row that gives the score; the network below is frozen."""


class Dpo(TextTask, built_by="shoal.tasks.dpo:build"):
    """Preference optimization: chosen answers become more probable than rejected ones, or good ones than bad ones."""

    kind: Literal["dpo"] = "dpo"
    needs = "pairs"
    drops = False
    loss: Literal["sigmoid", "ipo", "hinge", "robust", "kto", "orpo", "simpo"] = "sigmoid"
    """`sigmoid` (DPO), `ipo`, `hinge` and `robust` compare pairs, relative to the initial model. `kto` learns from single answers that are
    labelled good or bad, relative to the initial model. `orpo` and `simpo` compare pairs and use no initial model."""
    beta: PositiveFloat = 0.1
    """How strongly the model is held to the initial one; higher is stronger. For orpo the weight of the odds ratio (λ in the paper), for
    simpo the scale of the margin (2 to 2.5 in the paper)."""
    label_smoothing: Share = 0.0
    """Assumed probability that a pair is labelled the wrong way round; below 0.5. For sigmoid, robust and simpo."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of good answers, for kto."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of bad answers, for kto."""
    gamma: NonNegativeFloat = 0.5
    """Margin by which a chosen answer should win, for simpo."""

    @property
    def unpaired(self) -> bool:
        return self.loss == "kto"

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with the initial one."""
        return self.loss not in ("orpo", "simpo")


class PpoTask(TextTask, built_by="shoal.tasks.policy_gradient:build"):
    """Reinforcement learning from feedback, with the settings of `rlhf`."""

    kind: Literal["ppo"] = "ppo"
    needs = "prompts"
    drops = False


class CustomTask(Task, built_by="shoal.tasks.user_task:build"):
    """A user's own loss on a user's own data."""

    kind: Literal["custom"] = "custom"
    needs = "samples"
    does = "does what its own loss asks for"
