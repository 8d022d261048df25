"""The folder and transport of a run with workers. A database of the run's own (`host: embedded`) is started here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from shoal.config import Run
from shoal.config.fields import Secret
from shoal.config.schema.cluster import Postgres, Transport
from shoal.errors import ShoalError
from shoal.files import secret_in
from shoal.launch.postgres.data_folder import processes_above
from shoal.launch.postgres.server import EmbeddedPostgres
from shoal.runs.build_run import find_run_to_resume
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.invitation import Invitation
from shoal.transports.addresses import to_tell
from shoal.transports.database_address import CLASS_ROLE
from shoal.transports.keys import new_typed_token

_CHECK_S = 0.5
Report = Callable[[str], None]
_TOKEN_FILE = "class_token"
_MOST_BYTES = 512 << 20
"""Memory limit of a student's connection: many times what Shoal's statements need."""


class RunLocation(NamedTuple):
    """The folder and transport of a run with workers."""

    run_dir: str | None
    transport: Transport
    invitation: Invitation | None = None
    """How workers of this machine join, where they need another address than the coordinator itself."""
    outside: Invitation | None = None
    """How workers of other machines join, where the address differs."""
    role: str = ""
    """In a database that others administer: the role that workers connect as."""
    fresh: bool = False
    """Whether the folder was created for this run."""
    report_to: Callable[[Report], None] = lambda report: None
    """Names the function that receives a text when the run's own database has ended, from a thread."""


@contextmanager
def run_location(run: Run, run_dir: str | None, resume: bool, hosts: tuple[str, ...], invite: bool) -> Iterator[RunLocation]:
    """The location of a run. An embedded database runs until the context ends."""
    settings = run.transport
    if settings.kind == "in-process":
        yield RunLocation(run_dir, settings)
    elif not isinstance(settings, Postgres):
        # addresses that were asked for count more than the configuration, and workers of this machine need no particular port
        if not invite:
            settings = settings.replace(host=None, port=0)
        elif hosts != ("0.0.0.0",):
            settings = settings.replace(host=None)
        yield RunLocation(run_dir, settings)
    elif settings.host != "embedded":
        yield RunLocation(run_dir, settings, role="STUDENT")
    else:
        with _embedded(run, settings, run_dir, resume, hosts[0]) as location:
            yield location


@contextmanager
def _embedded(run: Run, settings: Postgres, run_dir: str | None, resume: bool, host: str) -> Iterator[RunLocation]:
    """A PostgreSQL of the run's own, in its folder, with a role for those who join."""
    directory = find_run_to_resume(run, run_dir, lambda text: None).occupied() if resume else RunDirectory.create(run, run_dir)
    password = settings.password.reveal() if settings.password else None
    server = EmbeddedPostgres(
        directory.path, host=host, port=settings.port or 0, database=settings.database, user=settings.user, password=password
    )
    with directory.kept_if_begun(), server:
        here = settings.replace(host=server.access.host, port=server.access.port, password=Secret(server.access.password or ""))
        token = _create_class_role(server)
        near, far = (where._replace(user=CLASS_ROLE, password=token) for where in (server.access, server.access_from(to_tell(host))))
        invitations = Invitation(near.address, "", None), Invitation(far.address, "", None)
        with _kept_alive(server) as watch:
            yield RunLocation(str(directory.path), here, *invitations, fresh=directory.fresh, report_to=watch.report_to)


def _create_class_role(server: EmbeddedPostgres) -> str:
    """Prepare the database for a class. Return the class's token, which is random and stays the same when the run is resumed."""
    from shoal.transports.postgres import schema
    from shoal.transports.postgres.access import connect

    token = secret_in(server.folder / _TOKEN_FILE, new_typed_token)
    with connect(server.access) as connection:
        schema.init(connection)
        schema.close_other_databases(connection)
        schema.grant(connection, CLASS_ROLE, token, "class")
    return token


class _DatabaseWatch:
    """Restarts a database that was killed, and ends students' connections that use too much memory. The run waits for the database."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._server, self._reported = server, set[str]()
        self._report: Report = lambda text: None

    def report_to(self, report: Report) -> None:
        self._report = report

    def check(self) -> None:
        server = self._server
        if server.was_killed:
            self._tell(f"warning: the run's PostgreSQL has ended and is started again; its last words are in {server.log}")
            try:
                server.restart()
            except ShoalError as error:
                self._tell(f"warning: {error}; trying again")
                return
        self._reported.clear()
        with suppress(ShoalError):  # the run reports a database that does not answer
            _end_greedy(server)

    def _tell(self, text: str) -> None:
        """Report a text, once for each time that the server ends."""
        if text not in self._reported:
            self._reported.add(text)
            self._report(text)


@contextmanager
def _kept_alive(server: EmbeddedPostgres) -> Iterator[_DatabaseWatch]:
    """Watches a database in a thread."""
    ending, made = threading.Event(), _DatabaseWatch(server)

    def watch() -> None:
        while not ending.wait(_CHECK_S):
            made.check()

    thread = threading.Thread(target=watch, name="database", daemon=True)
    thread.start()
    try:
        yield made
    finally:
        ending.set()
        thread.join()


def _end_greedy(server: EmbeddedPostgres) -> None:
    """PostgreSQL lets any role use any amount of memory. The database knows whose connections these are: only students' are ended."""
    if greedy := processes_above(server.data, _MOST_BYTES):
        from shoal.transports.postgres import schema
        from shoal.transports.postgres.access import connect

        with connect(server.access) as connection:
            schema.end_over_memory(connection, greedy)
