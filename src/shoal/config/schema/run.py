"""The root of the schema: all settings of a run."""

from typing import Annotated, Literal

from shoal.config.fields import NumberBounds, Section
from shoal.config.schema.cluster import Cluster, Coordinator, Launch, Scheduler, Simulation, Transport, Zmq
from shoal.config.schema.data import Data
from shoal.config.schema.engine import Engine, Single
from shoal.config.schema.model import Mlp, Model
from shoal.config.schema.output import Alerts, Checkpoint, Evaluation, Hub, Logging
from shoal.config.schema.rlhf import Rlhf
from shoal.config.schema.serving import Serving
from shoal.config.schema.strategy import Local, Strategy
from shoal.config.schema.task import Task
from shoal.config.schema.training import Training
from shoal.config.schema.updates import Updates


class Run(Section):
    """All settings of a run; frozen after they were checked."""

    name: str | None = None
    """Name of the run; null: made from the date and the model."""
    seed: Annotated[int, NumberBounds(at_least=0, at_most=2**53)] = 42
    """Seed of all random numbers."""
    output_dir: str = "runs"
    """Parent of the run's folder."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Messages on standard error: DEBUG every record, INFO progress, WARNING only warnings, ERROR none."""
    log_format: Literal["text", "json"] = "text"
    """Form of these messages: text, or one JSON object per line for programs that collect logs."""
    task: Task | None = None
    """The task: its kind, or a mapping with a `kind` and settings; null: the model's default task."""
    model: Model = Mlp()
    data: Data = Data()
    training: Training = Training()
    engine: Engine = Single()
    strategy: Strategy = Local()
    updates: Updates = Updates()
    transport: Transport = Zmq()
    cluster: Cluster = Cluster()
    coordinator: Coordinator = Coordinator()
    launch: Launch = Launch()
    scheduler: Scheduler = Scheduler()
    simulation: Simulation = Simulation()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    hub: Hub = Hub()
    alerts: Alerts = Alerts()
    serving: Serving = Serving()
    rlhf: Rlhf | None = None
    """Learning from feedback; null: none."""

    @property
    def alone(self) -> bool:
        """Whether the run is a single worker without a coordinator."""
        return isinstance(self.strategy, Local)

    @property
    def shares_updates(self) -> bool:
        """Whether workers train and send updates to a coordinator."""
        return not self.alone and not self.strategy.gives_answers

    @property
    def reports_loads(self) -> bool:
        """Whether workers report how often each expert was chosen. That would leak information about private data."""
        return self.shares_updates and not self.updates.privacy.enabled

    @property
    def scheduled(self) -> bool:
        """Whether a scheduler assigns shares of the data."""
        return self.scheduler.kind != "none" and not self.alone

    @property
    def placed(self) -> bool:
        """Whether a scheduler places the stages of a pipeline; every task is a stage."""
        return self.alone and self.engine.kind == "pipeline" and bool(self.scheduler.tasks)

    @property
    def chosen_task(self) -> Task:
        """The task, as written or as derived when the configuration was loaded."""
        assert self.task is not None
        return self.task
