"""The storage of a coordinator's durable state, and the server that its workers connect to.

`FolderStorage` uses the run's folder and a port. `DatabaseStorage` uses a PostgreSQL database, from which a run can be resumed without its
folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from shoal.config import Run
from shoal.config.schema.cluster import Postgres, Transport
from shoal.coordinator.driver_interfaces import CoordinatorStore, LeaseDatabase
from shoal.data.images.transfer import image_chunks, images_to_serve, publish_images
from shoal.errors import ShoalError
from shoal.runs.build_run import find_run_to_resume
from shoal.runs.folder.file_store import FileStore
from shoal.runs.folder.resume_rules import forbidden_changes, format_changes, settings_of
from shoal.runs.folder.run_directory import RunDirectory
from shoal.runs.invitation import CoordinatorSecrets, GuestList, Invitation, listen
from shoal.runs.welcome import stored_configuration, unpack
from shoal.transports import Message, Server
from shoal.transports.database_address import access_of

if TYPE_CHECKING:
    from shoal.transports.postgres import PostgresServer


Warn = Callable[[str], None]


class OpenedStorage(NamedTuple):
    """The storage of a run, with a server that workers can connect to."""

    server: Server
    store: CoordinatorStore
    invitation: Invitation
    board: LeaseDatabase | None = None
    """The server, where it is a database that leases units."""
    guests: Mapping[str, int] = MappingProxyType({})
    """Guests by name, and how many workers each may run."""
    report_to: Callable[[Warn], None] = lambda report: None
    """Names the function that receives a text when the storage does not answer, and when it does again."""


class FolderStorage:
    """Durable state in the run's folder, and a server on a port.

    `directory`: the folder of a resumed run; None for a new one. `expected`: workers that a resumed run was begun for; 0 for a new one.
    """

    def __init__(self, run: Run, run_dir: str | None, resume: bool, transport: Transport, hosts: tuple[str, ...], warn: Warn) -> None:
        self.run, self.resume, self.transport, self.hosts = run, resume, transport, hosts
        self.directory = find_run_to_resume(run, run_dir, warn).occupied() if resume else None
        if self.directory is not None:
            self._refuse_lost_state(self.directory)
        self.expected = CoordinatorSecrets.of(self._state(self.directory)).expected if self.directory else 0

    def _refuse_lost_state(self, directory: RunDirectory) -> None:
        """Raises ShoalError where coordinator.state_path was changed and the state was not moved there."""
        folder, before = self._state(directory), directory.recorded_settings(lambda text: None).get("coordinator.state_path")
        if before != self.run.coordinator.state_path and not (folder / "secrets.json").exists():
            kept = before or directory.path / "coordinator"
            raise ShoalError(
                f"{folder} holds no state of this run, which was kept in {kept}: move it there, or leave coordinator.state_path as it was"
            )
        if (folder / "snapshots").exists() and not (folder / "secrets.json").exists():
            raise ShoalError(
                f"{folder / 'secrets.json'} is missing: it holds the token and the keys by which workers know the coordinator. Put it back "
                f"from a backup; or start a new run with the weights of this one: --set checkpoint.resume_from={directory.path}"
            )

    def _state(self, directory: RunDirectory) -> Path:
        return Path(self.run.coordinator.state_path) if self.run.coordinator.state_path else directory.path / "coordinator"

    def open(self, directory: RunDirectory, welcome: Message, largest: int, expected: int) -> OpenedStorage:
        """Listen for workers. `largest`: the most bytes of a frame."""
        folder = self._state(directory)
        folder.mkdir(parents=True, exist_ok=True)
        if not self.resume and (folder / "secrets.json").exists():
            raise ShoalError(
                f"{folder} holds the state of another run: add --resume to go on with it, or choose another coordinator.state_path"
            )
        server, invitation = listen(self.run, self.transport, self.hosts, folder, largest, expected)
        return OpenedStorage(server, FileStore(folder), invitation, guests=GuestList(folder))


class DatabaseStorage:
    """Durable state and messages in a database. The run's folder holds only logs and figures, and may be lost."""

    def __init__(self, run: Run, run_dir: str | None, resume: bool, transport: Postgres, warn: Warn) -> None:
        from shoal.transports.postgres import stored_run

        self.run, self.resume, self.transport = run, resume, transport
        self.address = access_of(transport).address
        self.directory: RunDirectory | None = None
        self.expected = 0
        if resume:
            stored = stored_run(self.address)
            self.directory = self._go_on(stored, run_dir, warn)
            self.expected = stored.header["shards"]

    def _go_on(self, stored: Message, run_dir: str | None, warn: Warn) -> RunDirectory:
        if different := forbidden_changes(settings_of(stored_configuration(stored.header)), settings_of(self.run)):
            raise ShoalError(
                "the database holds a run with other settings: go on with its own configuration, or `shoal db reset` first. "
                f"These differ:{format_changes(different)}"
            )
        try:
            directory = find_run_to_resume(self.run, run_dir, warn)
        except ShoalError:  # the folder is lost or on another machine, and not needed
            directory = RunDirectory.create(self.run, run_dir)
            unpack(directory.path / "tokenizer", stored.header["tokenizer"], stored.frames)
        return directory.occupied()

    def open(self, directory: RunDirectory, welcome: Message, largest: int, expected: int) -> OpenedStorage:
        from shoal.transports.postgres import PostgresServer
        from shoal.transports.postgres.store import PostgresStore as DatabaseStore

        server = PostgresServer(self.address, max_frame_bytes=largest, poll_interval_s=self.transport.poll_interval_s)
        try:
            if not self.resume:
                welcome = self._with_images(server, welcome)
            server.open_run(welcome, self.resume, silence_s=3 * self.run.coordinator.heartbeat_interval_s)
        except BaseException:
            server.close()
            raise
        return OpenedStorage(server, DatabaseStore(server), Invitation(self.address, "", None), server, report_to=server.report_to)

    def _with_images(self, server: PostgresServer, welcome: Message) -> Message:
        """Copy the images to the database, if the settings say so, and announce them in the welcome message."""
        path = images_to_serve(self.run)
        if path is None or server.stored_run() is not None:
            return welcome
        offer = publish_images(image_chunks(path), ".npz" if path.suffix == ".npz" else ".zip", server.put_piece)
        return welcome._replace(header=welcome.header | {"images": list(offer)})


RunStorage = FolderStorage | DatabaseStorage


def storage_for(run: Run, run_dir: str | None, resume: bool, transport: Transport, hosts: tuple[str, ...], warn: Warn) -> RunStorage:
    if isinstance(transport, Postgres):
        return DatabaseStorage(run, run_dir, resume, transport, warn)
    return FolderStorage(run, run_dir, resume, transport, hosts, warn)
