"""The machines of a run: transports, hosts, coordinator, launchers, scheduler, simulation."""

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
    """How workers reach the coordinator. Built by a module or a class with `serve` and `connect` (docs/extending.md)."""

    schemes: ClassVar[tuple[str, ...]] = ()
    """Address schemes of its servers, such as `tcp`."""
    own_keys: ClassVar[bool] = False
    """Whether it encrypts by itself, or never leaves this machine; otherwise it gets keys."""


class TcpTransport(Transport, shared=True):
    """Settings of the transports whose coordinator listens on a port of its own."""

    host: str | None = None
    """Address the coordinator listens on; null: every address of this machine, or only 127.0.0.1 where `shoal train` starts the workers."""
    port: Port = 65432
    """0 lets the system choose."""


class Zmq(TcpTransport, built_by="shoal.transports.zeromq"):
    """ZeroMQ: a small header and raw frames."""

    kind: Literal["zmq"] = "zmq"
    schemes = ("tcp",)
    connections: PositiveInt = 4096
    """Most connections to the coordinator; a worker has two. Fewer where the system allows fewer open files."""
    connections_per_address: PositiveInt = 2048
    """Most connections from one address; a school behind one router has one address. At most three quarters of `connections`."""
    uploads_at_once: PositiveInt | None = None
    """Messages of 32 MB and more that are on their way to the coordinator at a time, since it holds each in memory until it is whole; other
    workers wait for a permit, which does not outlast a slow worker's turn by much. null: as many of the largest as a quarter of the free
    memory holds, and 2 at least."""


class XmlRpc(TcpTransport, built_by="shoal.transports.xmlrpc"):
    """XML-RPC over HTTP, for debugging: the same results, slower."""

    kind: Literal["xmlrpc"] = "xmlrpc"
    schemes = ("http",)


class Postgres(Transport, built_by="shoal.transports.postgres"):
    """A PostgreSQL database that every machine reaches."""

    kind: Literal["postgres"] = "postgres"
    schemes = ("postgresql", "postgres")
    own_keys = True
    host: str = "embedded"
    """Server address; `embedded` starts a server for this run alone, with its data in the run's folder."""
    port: Port | None = None
    """Port of the server; null: 5432, or for an embedded server a free one, which the run keeps."""
    database: str = "shoal"
    """Name of the database."""
    user: str = "shoal"
    """Role to connect as."""
    password: Secret | None = None
    """Password of that role. Set it in the environment as DB_PASSWORD instead."""
    poll_interval_s: PositiveFloat = 5.0
    """Seconds between polls of the database where notifications do not get through."""


class InProcess(Transport, built_by="shoal.transports.in_process"):
    """Workers are threads of the coordinator's process."""

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
    """User name with which `shoal up` (launch.kind ssh) logs in; null: as your ssh configuration says."""
    host: str | None = None
    """Address of this machine, to which `shoal up` (launch.kind ssh) logs in; null: its name. The worker connects to the coordinator and
    listens nowhere; messages show the address while the run waits for this machine."""
    port: Port | None = None
    """Port that messages show with the address; 0: none."""
    memory_gb: PositiveFloat | None = None
    """Memory, in GB: a scheduler gives this machine no task and no stage that needs more. null: no limit."""
    flops: PositiveFloat | None = None
    """Compute a second, in the units of the tasks' required_flops: what a scheduler assumes until it has measured the machine."""
    bandwidth_mbps: PositiveFloat | None = None
    """Network bandwidth, in Mbit/s; used by a scheduler in the same way."""


class Cluster(Section):
    """The machines of the run."""

    server: str | None = None
    """Name of the host that runs the coordinator."""
    workers: tuple[str, ...] = ()
    """Names of the hosts that run workers."""
    num_workers: PositiveInt | None = None
    """Number of workers to expect; null: as many as are listed."""
    hosts: Mapping[str, Host] = EMPTY
    """What is known of each machine, by name."""


class Coordinator(Section):
    """The process that holds the weights and combines the workers' updates."""

    trains: bool = False
    """Also start a worker on the coordinator's machine."""
    heartbeat_interval_s: PositiveFloat = 5.0
    """Seconds between a worker's heartbeats; a worker that misses three counts as dead."""
    telemetry_alpha: PositiveShare = 0.2
    """Weight of the newest measurement in a worker's smoothed speed."""
    joins_per_minute: PositiveInt = 600
    """Most workers that may join for the first time within a minute; returning workers are not counted."""
    workers_at_once: PositiveInt = 10_000
    """Most workers at a time; further ones are refused because the run is full."""
    failures_per_worker: PositiveInt = 5
    """Units in a row that a worker may fail while other workers succeed; then it is refused for ten minutes."""
    devices_per_worker: PositiveInt | None = None
    """Most devices that one worker's contributions may count for; null: 8, or launch.devices_per_node × launch.nodes."""
    held_in: Literal["memory", "file"] | None = None
    """Where contributions wait for their round: decoded in memory, or as they arrived in files, of which one is decoded at a time (rules
    that compare contributions read a larger file). The weights are the same, bit for bit. null: in files if those of all expected workers
    would take more than a quarter of the free memory."""
    metrics_port: Port | None = None
    """Port of the coordinator's Prometheus page, /metrics; null: none."""
    metrics_host: str = "127.0.0.1"
    """Address of that port. Other machines need the token in the run's metrics-token file."""
    state_path: str | None = None
    """Folder of the coordinator's state; null: in the run's folder."""
    checkpoint_path: str | None = None
    """File the weights are saved to and continued from; null: in the run's folder."""


class Ssh(Section):
    """Workers on machines that your ssh reaches, with your keys and your configuration."""

    python: str = "python3"
    """Python with Shoal on those machines: a command, or a path such as `~/shoal/bin/python`."""
    wheel: str | None = None
    """Wheel of this same version (`make dist`) to install into `~/.shoal` on machines without Shoal; null: install nothing."""
    options: tuple[str, ...] = ()
    """More options for ssh, such as `-p`, `2222`."""


class Ray(Section):
    """Workers as actors of a Ray cluster. Settings and invitations travel through Ray; updates do not."""

    address: str = "auto"
    """The cluster: `auto` for the one of this machine, or `ray://host:10001`."""
    cpus: PositiveFloat = 1.0
    """CPUs requested from Ray for each worker; its GPUs are launch.devices_per_node."""


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
    """Namespace of all objects."""
    storage_gb: PositiveInt = 20
    """Size of the volume for the run's folder."""
    storage_class: str | None = None
    """Class of that volume; null: the cluster's default."""


class Launch(Section):
    """How workers are started, and on how many devices each runs."""

    kind: Literal["local", "ssh", "ray", "slurm", "kubernetes"] = "local"
    """How `shoal up` starts workers: processes here, ssh or Ray; for slurm and kubernetes it writes a batch script or manifests."""
    ssh: Ssh = Ssh()
    ray: Ray = Ray()
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()
    devices_per_node: PositiveInt | None = None
    """Devices to use on each machine; null: all of them."""
    nodes: PositiveInt | None = None
    """Machines that one engine spans; null: as torchrun says, else 1."""

    @property
    def elsewhere(self) -> bool:
        """Whether Shoal itself starts workers on other machines."""
        return self.kind in ("ssh", "ray")

    @property
    def written(self) -> bool:
        """Whether Shoal only writes a file with which another program starts everything."""
        return self.kind in ("slurm", "kubernetes")


class ScheduledTask(Section):
    """A piece of work to be matched with a worker."""

    id: str
    """Its name."""
    model_share: Share = 1.0
    """Share of the model it holds: memory needed = share × what training the model takes (weights, gradients, optimizer, activations).
    With engine.kind pipeline and strategy.kind local, a task is a stage that has this share of the weights, in the order of the tasks."""
    data_share: PositiveShare | None = None
    """Share of the data that the task's worker learns from. null: an equal part of what the other tasks leave."""
    required_flops: NonNegativeFloat = 0.0
    """Compute that an epoch of it needs, in the units of the hosts' flops; 0: in proportion to its data."""
    priority: NonNegativeInt = 1
    """Larger is more urgent."""


class Scheduler(Section):
    """Which worker does which task."""

    kind: Literal["none", "priority", "capability", "gale-shapley"] = "none"
    """`priority`: the most urgent task takes the first worker it fits; `capability`: the worker with the best score; `gale-shapley`: a
    stable matching. `none`: every worker has its own share of the data."""
    tasks: tuple[ScheduledTask, ...] = ()
    """The tasks. Data that they leave over is cut into further tasks; without any, Shoal cuts all data. With engine.kind pipeline and
    strategy.kind local the tasks are the stages of the model, and layers that they leave over are cut into further stages."""
    interval_s: NonNegativeFloat = 1.0
    """With a scheduler: seconds that a worker waits for its first task, unless all expected workers are here. Those that join within this
    time are matched with tasks together, whatever their order of arrival. 0: no worker waits."""


class Simulation(Section):
    """Length of a simulation (`shoal simulate`) that is started without --hours."""

    heartbeats: PositiveInt = 5
    """Rounds of heartbeats to simulate."""
    heartbeat_interval_s: PositiveFloat = 1.0
    """Virtual seconds between heartbeats."""
    scheduling_rounds: PositiveInt = 3
    """Rounds of scheduling to simulate."""
    scheduling_interval_s: PositiveFloat = 2.0
    """Virtual seconds between rounds of scheduling."""
