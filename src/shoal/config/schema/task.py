"""What is learned."""

from typing import ClassVar, Literal

from shoal.config.parts import Part

Need = Literal["labels", "images", "tokens", "pairs", "prompts", "samples"]
TEXT: tuple[Need, ...] = ("tokens", "pairs", "prompts")
"""What is made of text; the others are made of images."""


class Task(Part, noun="task", word=True):
    """What is learned: losses, metrics, evaluation. Built by a function of its settings, the run, the networks and the data's shapes."""

    needs: ClassVar[Need] = "labels"
    """What it learns from. It fits every model that learns a task with the same needs."""
    shows: ClassVar[Literal["images", "text", ""]] = ""
    """What the run saves at each evaluation: images that the task draws (`Task.images`), text that the model writes, or nothing."""
    does: ClassVar[str] = ""
    """What a model that has learned it does, in a model card: "a model that …"."""
    pipeline: ClassVar[str] = ""
    """The hub's name for such models, where it has one."""


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


class PpoTask(Task):
    """Reinforcement learning from feedback."""

    kind: Literal["ppo"] = "ppo"
    needs = "prompts"
    shows = "text"
    does = "writes text"
    pipeline = "text-generation"


class CustomTask(Task, built_by="shoal.tasks.custom:build"):
    """What a loss of one's own says, on data of one's own."""

    kind: Literal["custom"] = "custom"
    needs = "samples"
    does = "does what its own loss asks for"
