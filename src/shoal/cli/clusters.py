"""Runs with workers, as `shoal train --workers` and `shoal coordinate` start them."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from shoal.cli.train import conclude, download, stopping_on_signals
from shoal.config.load import Loaded
from shoal.config.plugins import needed_by
from shoal.config.schema.cluster import Collectives, Postgres, Zmq
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.config import Run
    from shoal.config.schema.cluster import Transport
    from shoal.launch import EmbeddedPostgres
    from shoal.launch.fleet import Fleet
    from shoal.runs.coordinating import Coordinating
    from shoal.runs.inviting import Invitation
    from shoal.watch.progress import Progress

_LOOK_S = 0.5
_STUDENT = "student"
"""The role of all who join a run with a database of its own."""


def coordinate(
    loaded: Loaded,
    run_dir: str | None,
    resume: bool,
    *,
    workers: int = 0,
    invite: bool = False,
    netem: str | None = None,
    slowdown: list[str] | None = None,
    hosts: tuple[str, ...] = (),
    fleet: Fleet | None = None,
) -> int:
    """Coordinate a run, with so many workers on this machine; `invite` lets others join. `fleet`: the others are torchrun's processes."""
    from shoal.launch import wait_quietly

    wait_quietly()
    from shoal.runs.coordinating import prepare
    from shoal.watch.progress import progress_for
    from shoal.watch.sinks import sinks_for

    run = loaded.run
    if isinstance(run.transport, Postgres) and len(hosts) > (run.transport.host == "embedded"):
        raise ShoalError("--host: a database of the run's own listens at one address, and another one listens where it does")
    if run.transport.kind == "in-process":
        raise ShoalError("transport.kind: workers are processes of their own, which in-process does not reach: choose zmq or xmlrpc")
    if run.transport.kind == "collectives" and invite:
        raise ShoalError("transport.kind: who meets in collectives starts together: use `torchrun … -m shoal train`, or choose zmq")
    progress = progress_for(sys.stderr, run.log_level, cluster=True)
    listening = (hosts or ("0.0.0.0",)) if invite else fleet.hosts if fleet is not None else ("127.0.0.1",)
    with _ground(run, run_dir, resume, listening, invite) as ground:
        coordinating = prepare(
            loaded,
            run_dir=ground.run_dir,
            resume=resume,
            reporters=[progress, *sinks_for(run)],
            progress=download,
            workers=run.cluster.num_workers + run.coordinator.trains if invite and run.cluster.num_workers else workers,
            hosts=listening,
            transport=ground.transport,
        )
        if ground.invitation is not None:
            coordinating = coordinating._replace(invitation=ground.invitation)
        return _run(coordinating, ground, progress, workers, invite, netem, slowdown or [], fleet)


def _run(
    coordinating: Coordinating,
    ground: Ground,
    progress: Progress,
    workers: int,
    invite: bool,
    netem: str | None,
    slowdown: list[str],
    fleet: Fleet | None,
) -> int:
    from shoal.launch.local import names_for
    from shoal.launch.training import train_with

    loop, run = coordinating.loop, coordinating.loop.run
    if not invite and not workers:  # a run that goes on has as many as it was begun for
        workers = loop.coordinator.plan.expected
    if workers:
        import torch

        torch.set_num_threads(1)  # the workers here need the others more
    progress.message(f"{run.strategy.kind}, {loop.engine.size:,} parameters, in {loop.directory.path}")
    if invite:
        _invite(coordinating, ground)
    names = names_for(workers, (run.cluster.server or "here",) if invite else run.cluster.workers)
    factors = _factors(slowdown, names)
    common = ["--netem", netem] if netem else []
    arguments = {name: [*common, *(["--slowdown", factors[name]] if name in factors else [])] for name in names}
    with stopping_on_signals(loop):
        summary = train_with(coordinating, arguments, fleet)
    return conclude(loop, summary)


class Ground(NamedTuple):
    """Where a run with workers takes place."""

    run_dir: str | None
    transport: Transport
    invitation: Invitation | None = None
    """What to tell workers, where the coordinator's own way in is not for them."""
    role: str = ""
    """In a database that others look after: whom students connect as."""


@contextmanager
def _ground(run: Run, run_dir: str | None, resume: bool, hosts: tuple[str, ...], invite: bool) -> Iterator[Ground]:
    """Have a database run where one is asked for and nobody else does it."""
    if not isinstance(run.transport, Postgres):
        yield Ground(run_dir, _transport(run.transport, invite, invite and hosts != ("0.0.0.0",)))
    elif run.transport.host != "embedded":
        yield Ground(run_dir, run.transport, role="STUDENT")
    else:
        with _embedded(run, run_dir, resume, hosts[0]) as ground:
            yield ground


@contextmanager
def _embedded(run: Run, run_dir: str | None, resume: bool, host: str) -> Iterator[Ground]:
    """A PostgreSQL of the run's own, in its folder, with a role for those who join."""
    from shoal.config.fields import Secret
    from shoal.launch import EmbeddedPostgres
    from shoal.runs.assembly import continued
    from shoal.runs.inviting import Invitation
    from shoal.runs.run_directory import RunDirectory
    from shoal.transports.addresses import to_tell
    from shoal.transports.postgres import schema
    from shoal.transports.postgres.access import connect

    settings = run.transport
    assert isinstance(settings, Postgres)
    folder = continued(run, run_dir, lambda text: None)[0].path if resume else RunDirectory.create(run, run_dir).path
    password = settings.password.reveal() if settings.password else None
    with EmbeddedPostgres(
        folder, host=host, port=settings.port or 0, database=settings.database, user=settings.user, password=password
    ) as server:
        access = server.access
        # The same one whenever the run goes on, so that whoever joined before is let in again.
        students = hashlib.sha256(f"{_STUDENT} of {access.password}".encode()).hexdigest()[:20]
        with connect(access) as connection:
            schema.init(connection)
            schema.grant(connection, _STUDENT, students, "student")
        theirs = access._replace(host=to_tell(host), user=_STUDENT, password=students)
        here = settings.replace(host=access.host, port=access.port, password=Secret(access.password or ""))
        with _kept_alive(server):
            yield Ground(str(folder), here, Invitation(theirs.address, "", None))


@contextmanager
def _kept_alive(server: EmbeddedPostgres) -> Iterator[None]:
    """Start the database again if somebody kills it: from a thread of its own, since everybody else waits for it then."""
    closing = threading.Event()

    def watch() -> None:
        while not closing.wait(_LOOK_S):
            with suppress(ShoalError):  # the run tells, when its patience is at an end
                server.ensure()

    thread = threading.Thread(target=watch, name="database", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()


def _transport(settings: Transport, invite: bool, hosts: bool) -> Transport:
    """Where to listen: `--host` counts more than the configuration, and workers of this machine need no particular port."""
    if isinstance(settings, Collectives):  # for the one of them that speaks for all
        return Zmq(port=0)
    if invite and not hosts:
        return settings
    elsewhere = {"host": None} if invite else {"host": None, "port": 0}
    changed: Transport = settings.replace(**{name: value for name, value in elsewhere.items() if name in settings.fields()})
    return changed


def _factors(slowdown: list[str], names: list[str]) -> dict[str, str]:
    factors = dict(text.partition("=")[::2] for text in slowdown)
    for name, factor in factors.items():
        if name not in names:
            raise ShoalError(f"--slowdown: there is no worker `{name}`; there are {', '.join(names)}")
        try:
            good = float(factor) >= 1
        except ValueError:
            good = False
        if not good:
            raise ShoalError(f"--slowdown: write {name}=8 to make it 8 times slower")
    return factors


def _invite(coordinating: Coordinating, ground: Ground) -> None:
    """The one line that a worker needs; for machines that reach this one under an address of their own, theirs."""
    from shoal.transports.addresses import parse as parse_address
    from shoal.transports.databases import is_address
    from shoal.transports.databases import parse as parse_database
    from shoal.transports.keys import key_text

    invitation, cluster = coordinating.invitation, coordinating.loop.run.cluster
    plugins = "".join(f" --plugin {name}" for name in needed_by(coordinating.loop.run))
    if is_address(invitation.address):
        access = parse_database(invitation.address)
        if ground.role:
            print("`shoal db grant student NAME FILE` lets somebody in, and prints the command:")
            access = access._replace(user=ground.role, password=None)
        print(f"workers join with:\n  shoal join {access.address}{plugins}", flush=True)
        return
    rest = f"--token {invitation.token}" + (f" --key {key_text(invitation.key)}" if invitation.key else "") + plugins
    here = parse_address(invitation.address)
    print(f"workers join with:\n  shoal join {here} {rest}")
    for name in cluster.workers:
        host = cluster.hosts.get(name)
        if host is not None and (host.server_address or host.server_port):
            own = here._replace(host=host.server_address or here.host, port=host.server_port or here.port)
            print(f"{name} joins with:\n  shoal join {own} --name {name} {rest}")
    sys.stdout.flush()
