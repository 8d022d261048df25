"""Who takes part, how they reach each other, and who does what."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from shoal.config.fields import (
    EMPTY,
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Secret,
    Section,
    Share,
)
from shoal.config.parts import Part


class Transport(Part, noun="transport"):
    """How workers reach the coordinator. Built by a module or a class that has `serve` and `connect` (`shoal.transports.interface`)."""

    schemes: ClassVar[tuple[str, ...]] = ()
    """What addresses of its servers begin with, before `://`."""
    own_keys: ClassVar[bool] = False
    """Whether it sees to secrecy between machines itself, or never leaves this one."""


class Zmq(Transport, built_by="shoal.transports.zeromq"):
    """ZeroMQ: a small header and raw frames."""

    kind: Literal["zmq"] = "zmq"
    schemes = ("tcp",)
    host: str | None = None
    """Address the coordinator listens on; null: all this machine has, or this machine alone where `shoal train` starts the workers."""
    port: Port = 65432
    """0 lets the system choose."""
    connections: PositiveInt = 4096
    """Connections that the coordinator takes in all; a worker has two. Fewer where the system allows fewer open files."""
    connections_per_address: PositiveInt = 2048
    """Connections from one address; a school behind one router has one address. Never more than three quarters of all."""


class XmlRpc(Transport, built_by="shoal.transports.xmlrpc"):
    """XML-RPC over HTTP, for debugging: the same results, slower."""

    kind: Literal["xmlrpc"] = "xmlrpc"
    schemes = ("http",)
    host: str | None = None
    """Address the coordinator listens on; null: all this machine has, or this machine alone where `shoal train` starts the workers."""
    port: Port = 65432
    """0 lets the system choose."""


class Postgres(Transport, built_by="shoal.transports.postgres"):
    """A PostgreSQL database that every machine reaches."""

    kind: Literal["postgres"] = "postgres"
    schemes = ("postgresql", "postgres")
    own_keys = True
    host: str = "embedded"
    """Server address; `embedded` starts a server of the run's own, in the run's folder."""
    port: Port | None = None
    """Port of the server; null: 5432, or for an embedded server a free one, which the run keeps."""
    database: str = "shoal"
    """Name of the database."""
    user: str = "shoal"
    """Role to connect as."""
    password: Secret | None = None
    """Better in the environment as DB_PASSWORD."""
    poll_interval_s: PositiveFloat = 5.0
    """Seconds between looks at the database where notifications do not get through."""


class InProcess(Transport, built_by="shoal.transports.in_process"):
    """Workers are threads of the process that coordinates."""

    kind: Literal["in-process"] = "in-process"
    schemes = ("in-process",)
    own_keys = True


class Host(Section):
    """One machine."""

    server_address: str | None = None
    """Address under which this machine reaches the server."""
    server_port: Port | None = None
    """Port under which this machine reaches the server; null: the transport's."""
    user: str | None = None
    """Whom `shoal up` with launch.kind ssh logs in as; null: as your ssh configuration says."""
    host: str | None = None
    """Address of this machine, which `shoal up` with launch.kind ssh logs in to; null: its name. Its worker calls the coordinator and
    listens nowhere: the address tells people whom a run waits for."""
    port: Port | None = None
    """Port of this machine, told with its address; 0 tells none."""
    memory_gb: PositiveFloat | None = None
    """Memory, in GB: a scheduler gives this machine no task and no stage that needs more. null: every one fits."""
    flops: PositiveFloat | None = None
    """Compute a second, in the units of the tasks' required_flops: what a scheduler goes by until it has measured the machine."""
    bandwidth_mbps: PositiveFloat | None = None
    """Network bandwidth, in Mbit/s, which a scheduler goes by likewise."""


class Cluster(Section):
    """The machines of the run."""

    server: str | None = None
    """Name of the host that coordinates."""
    workers: tuple[str, ...] = ()
    """Names of the hosts that work."""
    num_workers: PositiveInt | None = None
    """How many workers to expect; null: as many as are listed."""
    hosts: Mapping[str, Host] = EMPTY
    """What is known of each machine, by name."""


class Coordinator(Section):
    """The one who holds the weights."""

    trains: bool = False
    """Whether the coordinator's machine works, too: it starts a worker of its own beside it."""
    heartbeat_interval_s: PositiveFloat = 5.0
    """Seconds between a worker's signs of life; one that misses three is taken for dead."""
    telemetry_alpha: PositiveShare = 0.2
    """Weight of the newest measurement in a worker's smoothed speed."""
    joins_per_minute: PositiveInt = 600
    """Workers that may join for the first time within a minute; those that come back are not counted."""
    workers_at_once: PositiveInt = 10_000
    """Workers that may take part at a time; whoever comes beyond them is told that the run is full."""
    failures_per_worker: PositiveInt = 5
    """Units of work in a row that a worker may fail while others manage theirs; then it is kept out for ten minutes."""
    devices_per_worker: PositiveInt | None = None
    """Devices that a worker's contributions may count for; null: 8, or as many as launch.devices_per_node × launch.nodes."""
    metrics_port: Port | None = None
    """Port on which the coordinator shows its figures to Prometheus, at /metrics; null: it does not."""
    metrics_host: str = "127.0.0.1"
    """Address for that port. Beyond this machine, readers need the token that is in the run's metrics-token file."""
    state_path: str | None = None
    """Where its state is kept; null: in the run's folder."""
    checkpoint_path: str | None = None
    """File the weights are saved to and continued from; null: in the run's folder."""


class Ssh(Section):
    """Workers on machines that your own ssh reaches, with your keys and your configuration."""

    python: str = "python3"
    """The Python there that has Shoal: a command, or a path such as `~/shoal/bin/python`."""
    wheel: str | None = None
    """A wheel of this very version (`make dist`), installed into `~/.shoal` on machines whose Python lacks it; null: none is installed."""
    options: tuple[str, ...] = ()
    """More options for ssh, such as `-p`, `2222`."""


class Ray(Section):
    """Workers as actors of a Ray cluster. Settings and invitations travel through Ray; updates do not."""

    address: str = "auto"
    """The cluster: `auto` for the one of this machine, or `ray://host:10001`."""
    cpus: PositiveFloat = 1.0
    """CPUs that each worker asks Ray for; its GPUs are launch.devices_per_node."""


class Slurm(Section):
    """A batch script for Slurm."""

    options: tuple[str, ...] = ()
    """Lines for `#SBATCH`, such as `--partition=gpu`."""
    setup: tuple[str, ...] = ()
    """Shell commands before anything starts, such as `source ~/shoal/bin/activate`."""


class Kubernetes(Section):
    """Manifests for Kubernetes."""

    image: str = "shoal:latest"
    """A container image that has Shoal."""
    namespace: str = "default"
    """Where everything is made."""
    storage_gb: PositiveInt = 20
    """Size of the volume for the run's folder."""
    storage_class: str | None = None
    """Class of that volume; null: the cluster's default."""


class Launch(Section):
    """What starts workers, and how many processes a worker is made of."""

    kind: Literal["local", "ssh", "ray", "slurm", "kubernetes"] = "local"
    """What `shoal up` starts workers with: processes here, ssh, a Ray cluster; for Slurm and Kubernetes it writes what they are given."""
    ssh: Ssh = Ssh()
    ray: Ray = Ray()
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()
    devices_per_node: PositiveInt | None = None
    """Devices to use on each machine; null: all of them."""
    nodes: PositiveInt | None = None
    """Machines the engine spans; null: as torchrun says, else 1."""

    @property
    def elsewhere(self) -> bool:
        """Whether this program starts workers on other machines itself."""
        return self.kind in ("ssh", "ray")

    @property
    def written(self) -> bool:
        """Whether another program starts everything, and is given a file."""
        return self.kind in ("slurm", "kubernetes")


class ScheduledTask(Section):
    """A piece of work to be matched with a worker."""

    id: str
    """Its name."""
    model_share: Share = 1.0
    """Share of the model it holds: memory needed = share × what training the model takes (weights, gradients, optimizer, activations).
    With engine.kind pipeline and strategy.kind local, a task is a stage that has this share of the weights, in the order of the tasks."""
    data_share: PositiveShare | None = None
    """Share of the data it works on: whoever has the task learns from it. null: an equal part of what the other tasks leave."""
    required_flops: NonNegativeFloat = 0.0
    """Compute that an epoch of it needs, in the units of the hosts' flops; 0: in proportion to its data."""
    priority: NonNegativeInt = 1
    """Larger is more urgent."""


class Scheduler(Section):
    """Which worker does which task."""

    kind: Literal["none", "priority", "capability", "gale-shapley"] = "none"
    """`priority`: the most urgent task takes the first worker it fits; `capability`: by score; `gale-shapley`: a stable matching.
    `none`: every worker has a share of the data of its own."""
    tasks: tuple[ScheduledTask, ...] = ()
    """What the tasks leave of the data is cut into further ones. Without any, the data is cut by itself. With engine.kind pipeline and
    strategy.kind local they are the stages of the model, and what they leave of it is cut into further stages."""


class Simulation(Section):
    """A run in virtual time: what `shoal simulate` does where it is not told for how many hours."""

    heartbeats: PositiveInt = 5
    """Rounds of heartbeats to simulate."""
    heartbeat_interval_s: PositiveFloat = 1.0
    """Virtual seconds between heartbeats."""
    scheduling_rounds: PositiveInt = 3
    """Rounds of scheduling to simulate."""
    scheduling_interval_s: PositiveFloat = 2.0
    """Virtual seconds between rounds of scheduling."""
