"""What a run leaves behind: evaluation, checkpoints, logs, and copies on the hub."""

from typing import Literal

from shoal.config.fields import NonNegativeInt, PositiveInt, Secret, Section
from shoal.config.parts import Part

Cadence = Literal["steps", "epoch", "never"]


class Evaluation(Section):
    """When and on how much held-out data the model is judged."""

    strategy: Cadence | None = None
    """Every `every_steps` steps, after each epoch (or outer round), or never; null: steps where every_steps is given, else epoch."""
    every_steps: PositiveInt | None = None
    """Steps between evaluations; null: 500."""
    batches: NonNegativeInt | None = None
    """Batches looked at; null: all of the held-out data; 0: no evaluation."""
    batch_size: PositiveInt | None = None
    """null: the training batch size."""


class Checkpoint(Section):
    """When the run is saved, and what it continues from."""

    strategy: Cadence | None = None
    """Every `every_steps` steps, after each epoch (or outer round), or only at the end; null: as for evaluation."""
    every_steps: PositiveInt | None = None
    """Steps between checkpoints; null: 1000."""
    keep_last: PositiveInt = 3
    """Checkpoints kept."""
    resume_from: str | None = None
    """Checkpoint or run folder to continue from."""


class Sink(Part, noun="sink", shorthand=True):
    """Where metrics go besides the run's own folder. Built by a function of its settings and of the run: a `Reporter`."""


class TensorBoard(Sink, built_by="shoal.reporters.sinks:TensorBoard"):
    """Event files for TensorBoard."""

    kind: Literal["tensorboard"] = "tensorboard"


class Wandb(Sink, built_by="shoal.reporters.sinks:Wandb"):
    """Weights & Biases; works offline, too."""

    kind: Literal["wandb"] = "wandb"


class Logging(Section):
    """What is recorded while it runs; metrics.jsonl is always written."""

    every_steps: PositiveInt = 10
    """Steps between records."""
    sinks: tuple[Sink, ...] = ()
    """Where metrics go besides the run's own folder: words, or mappings with a `kind` where one has settings."""
    directory: str | None = None
    """Folder for TensorBoard's files; null: `logs` in the run's folder."""
    project: str | None = None
    """Name the run is filed under: a folder of runs, and the project on W&B."""
    track_gradients: bool = False
    """Record the gradient norm of every layer."""


class Hub(Section):
    """Copies of the model on the Hugging Face hub."""

    enabled: bool = False
    repo_id: str = ""
    """user/name of the repository."""
    token: Secret | None = None
    """Better in the environment as HF_TOKEN."""
    push_interval: PositiveInt = 5
    """Iterations between uploads."""
    private: bool = False
    """Keep the repository private."""
