"""Outputs of a run: evaluation, checkpoints, metrics, uploads to the hub, alerts."""

from typing import Literal

from shoal.config.fields import NonNegativeFloat, NonNegativeInt, Port, PositiveFloat, PositiveInt, Secret, Section
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


class Email(Section):
    """Alerts by e-mail (SMTP)."""

    to: tuple[str, ...] = ()
    """Addresses of those who receive it; empty: no e-mail is sent."""
    host: str = "127.0.0.1"
    """The mail server."""
    port: Port | None = None
    """null: 465 with `encryption: tls`, 587 with `starttls`, 25 with `none`."""
    encryption: Literal["starttls", "tls", "none"] = "starttls"
    """How the connection is encrypted. `none` is refused with a password, unless the server is on this machine."""
    sender: str | None = None
    """Address of the sender; null: the user name if it is an address, else the first of `to`."""
    user: str | None = None
    """User name at the mail server; null: it asks for none."""
    password: Secret | None = None
    """Password at the mail server. Set it in the environment as SMTP_PASSWORD instead."""


AlertKind = Literal["no-progress", "loss", "machines-lost", "disk", "ended"]


class Alerts(Section):
    """Messages to people about a run that needs them. Each is sent once, and again only after what it was about had ended."""

    webhook: Secret | None = None
    """Address for POST as JSON, with the fields that Slack (`text`) and Discord (`content`) show. It is not shown, since for many services
    it is the password. Set it in the environment as SHOAL_ALERT_WEBHOOK instead."""
    command: tuple[str, ...] = ()
    """A program of this machine with its arguments; no shell reads them. It gets the text on standard input, and ALERT, ALERT_RUN and
    ALERT_LINK in its environment."""
    desktop: bool = False
    """Notifications on this machine's screen: notify-send on Linux, osascript on macOS, PowerShell on Windows."""
    email: Email = Email()
    about: tuple[AlertKind, ...] = ("no-progress", "loss", "machines-lost", "disk", "ended")
    """What alerts are about: no step for a long time; a loss that jumps or is not finite; workers that vanish without leaving; a disk
    that is nearly full; a run that has ended, with the reason."""
    no_progress_s: PositiveFloat | None = None
    """Seconds without a step; null: ten times the longest of the last steps, and 600 at least."""
    loss_jump: PositiveFloat = 5.0
    """A loss has jumped if it is above the median of the last 20 records by this many times their spread, and by a quarter of it."""
    disk_gb: NonNegativeFloat = 2.0
    """Free GB on the disk of the run's folder below which it is nearly full. Too little room for two checkpoints counts, too."""
    link: str | None = None
    """Address of a dashboard in the messages; null: that of `--watch`, else the command that shows one."""

    @property
    def wanted(self) -> bool:
        """Whether there is anything that sends alerts."""
        return bool(self.webhook or self.command or self.desktop or self.email.to)
