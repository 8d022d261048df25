"""The root: everything a run is made of."""

from typing import Annotated, Literal

from shoal.config.fields import NumberBounds, Section
from shoal.config.schema.cluster import Cluster, Coordinator, Launch, Scheduler, Simulation, Transport, Zmq
from shoal.config.schema.data import Data
from shoal.config.schema.engine import Engine, Single
from shoal.config.schema.model import Mlp, Model
from shoal.config.schema.output import Checkpoint, Evaluation, Hub, Logging
from shoal.config.schema.rlhf import Rlhf
from shoal.config.schema.serving import Serving
from shoal.config.schema.strategy import Local, Strategy
from shoal.config.schema.task import Task
from shoal.config.schema.training import Training
from shoal.config.schema.updates import Updates


class Run(Section):
    """A whole run. Frozen: what was checked is what runs."""

    name: str | None = None
    """What to call it; null: made from the date and the model."""
    seed: Annotated[int, NumberBounds(at_least=0, at_most=2**53)] = 42
    """Start of every random number."""
    output_dir: str = "runs"
    """Folder that the run's own folder is made in."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """How much is told while it runs: DEBUG every record, INFO progress, WARNING only warnings, ERROR nothing."""
    log_format: Literal["text", "json"] = "text"
    """What is told on standard error: for people, or a JSON object a line, for programs that collect logs."""
    task: Task | None = None
    """What is learned: a word, or a mapping with a `kind` where the task has settings; null: what the model is for."""
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
    serving: Serving = Serving()
    rlhf: Rlhf | None = None
    """null: no reinforcement learning."""

    @property
    def alone(self) -> bool:
        """Whether nobody else takes part: one worker, and no coordinator."""
        return isinstance(self.strategy, Local)

    @property
    def shares_updates(self) -> bool:
        """Whether workers learn, and send a coordinator what they learned."""
        return not self.alone and not self.strategy.gives_answers

    @property
    def scheduled(self) -> bool:
        """Whether a scheduler gives out shares of the data."""
        return self.scheduler.kind != "none" and not self.alone

    @property
    def placed(self) -> bool:
        """Whether a scheduler places the stages of one model, of which every task is one."""
        return self.alone and self.engine.kind == "pipeline" and bool(self.scheduler.tasks)

    @property
    def chosen_task(self) -> Task:
        """The task: given, or derived when the configuration was loaded."""
        assert self.task is not None
        return self.task
