"""Outputs of a run: evaluation, checkpoints, metrics, uploads to the hub."""

from typing import Literal

from shoal.config.fields import NonNegativeInt, PositiveFloat, PositiveInt, Secret, Section
from shoal.config.parts import Part

Cadence = Literal["steps", "epoch", "never"]
_LOWER, _HIGHER = (
    ("loss", "perplexity", "error", "kl"),
    ("accuracy", "score", "reward", "margin", "f1", "precision", "recall", "auc", "bleu"),
)
"""Words in names of metrics of which a lower or a higher value is better."""


class Evaluation(Section):
    """When the model is evaluated, and on how much held-out data."""

    strategy: Cadence | None = None
    """Every `every_steps` steps, after each epoch (or outer round), or never; null: steps where every_steps is given, else epoch."""
    every_steps: PositiveInt | None = None
    """Steps between evaluations; null: 500."""
    batches: NonNegativeInt | None = None
    """Batches to evaluate on; null: all held-out data; 0: no evaluation."""
    batch_size: PositiveInt | None = None
    """Samples per batch; null: as training.batch_size."""


class Checkpoint(Section):
    """When checkpoints are saved, and from which one the run starts."""

    strategy: Cadence | None = None
    """Every `every_steps` steps, after each epoch (or outer round), or only at the end; null: as for evaluation."""
    every_steps: PositiveInt | None = None
    """Steps between checkpoints; null: once a round of diloco, else 1000."""
    keep_last: PositiveInt = 3
    """Checkpoints kept."""
    resume_from: str | None = None
    """Checkpoint or run folder to continue from."""
    best: str | None = None
    """Metric of the evaluations, such as `loss` or `accuracy`: the weights of the best evaluation are kept in the run's folder `best`, and
    exported, served and evaluated in place of the last. `max NAME` or `min NAME` for a metric of which the name does not say whether higher
    or lower is better. Early stopping goes by it. null: with early stopping the task's main metric, else none."""

    @property
    def best_metric(self) -> tuple[str, bool | None]:
        """The name of `best`, and whether a higher value is better; None: the name does not say."""
        how, _, name = (self.best or "").rpartition(" ")
        if how in ("max", "min"):
            return name, how == "max"
        words = name.split("_")
        lower, higher = (any(word in words for word in known) for known in (_LOWER, _HIGHER))
        return name, higher if lower != higher else None


class Sink(Part, noun="sink", shorthand=True):
    """A destination for metrics besides the run's folder. Built by a function of the settings and the run, which returns a `Reporter`."""


class TensorBoard(Sink, built_by="shoal.reporters.sinks:TensorBoard"):
    """Event files for TensorBoard."""

    kind: Literal["tensorboard"] = "tensorboard"


class Wandb(Sink, built_by="shoal.reporters.sinks:Wandb"):
    """Weights & Biases, also offline."""

    kind: Literal["wandb"] = "wandb"


class Logging(Section):
    """Metrics; the run's metrics.jsonl is always written."""

    every_steps: PositiveInt = 10
    """Steps between records."""
    sinks: tuple[Sink, ...] = ()
    """Further destinations for metrics: names, or mappings with a `kind` and settings."""
    directory: str | None = None
    """Folder for TensorBoard's files; null: `logs` in the run's folder."""
    project: str | None = None
    """Name of the folder of runs, and of the project on W&B."""
    track_gradients: bool = False
    """Record the gradient norm of every layer."""
    peak_tflops: PositiveFloat | None = None
    """Peak of each device in TFLOP/s, of which records show the utilisation (mfu); null: what its maker says of a known GPU in bf16 or
    fp16, else records have no utilisation."""


class Hub(Section):
    """Uploads of the model to the Hugging Face hub."""

    enabled: bool = False
    repo_id: str = ""
    """user/name of the repository."""
    token: Secret | None = None
    """Access token. Set it in the environment as HF_TOKEN instead."""
    push_interval: PositiveInt = 5
    """Iterations between uploads."""
    private: bool = False
    """Keep the repository private."""
