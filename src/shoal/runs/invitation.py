"""The address and secrets with which workers join a coordinator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shoal.config import Run
from shoal.config.environment import coordinator_secrets
from shoal.config.schema.cluster import Transport
from shoal.errors import ShoalError
from shoal.files import DamagedFileError, JsonFormat
from shoal.runs.folder.run_reader import INVITATION
from shoal.transports import Server
from shoal.transports.addresses import PublicAddress, parse
from shoal.transports.connect import needs_keys, serve
from shoal.transports.database_address import is_address as is_database
from shoal.transports.database_address import parse as parse_database
from shoal.transports.interface import Guest, ListenOptions
from shoal.transports.keys import Keys, keys_from_secret, new_keys, new_token

_SECRETS = JsonFormat("secrets file", 1, ("token", "secret", "port", "expected", "address", "encrypted", "public"), private=True)
_GUESTS = JsonFormat("guest list", 1, ("guests",), private=True)


class Invitation(NamedTuple):
    """What a worker needs to join."""

    address: str
    token: str
    key: str | None
    identity: str | None = None
    """The worker's secret key, where the launcher created it: all processes of an island are one worker."""


def write_join_command(folder: Path, line: str, token: str = "") -> None:
    """Write invitation.json: the command with which workers join, and a token that the command asks for separately."""
    INVITATION.write(folder / "invitation.json", {"line": line, "token": token})


class CoordinatorSecrets(NamedTuple):
    """The token and keys of a coordinator, kept with the run so that workers recognise a coordinator that restarts."""

    token: str
    keys: Keys
    port: int = 0
    expected: int = 0
    """Workers that the run was begun for, which is the number of shards of the data from then on."""
    address: str = ""
    encrypted: bool = False
    """`address`: where the coordinator listened last; `encrypted`: whether workers need its public key."""
    public: str = ""
    """HOST[:PORT] by which machines elsewhere reach it; empty: by `address`."""

    @property
    def shown_address(self) -> str:
        """The address in the command for workers."""
        return reached_address(self.address, self.public) if self.public else self.address

    @classmethod
    def of(cls, folder: Path) -> CoordinatorSecrets:
        saved = _SECRETS.read(folder / "secrets.json")
        if saved is not None:
            return cls._of_file(folder / "secrets.json", saved)
        given = coordinator_secrets()
        return cls(new_token(), new_keys()) if given is None else cls(given[0], keys_from_secret(given[1]))

    @classmethod
    def _of_file(cls, path: Path, saved: Mapping[str, Any]) -> CoordinatorSecrets:
        kinds = {"token": str, "secret": str, "port": int, "expected": int, "address": str, "encrypted": bool, "public": str}
        try:
            if any(type(saved[name]) is not kind for name, kind in kinds.items()):
                raise ValueError
            keys, public = keys_from_secret(saved["secret"]), PublicAddress.parse(saved["public"]).text if saved["public"] else ""
        except (ValueError, ShoalError):
            raise DamagedFileError(f"{path} is not a valid {_SECRETS.kind}: put it back from a backup") from None
        return cls(saved["token"], keys, saved["port"], saved["expected"], saved["address"], saved["encrypted"], public)

    def save(self, folder: Path) -> None:
        fields = self._asdict() | {"secret": self.keys.secret}
        _SECRETS.write(folder / "secrets.json", {name: fields[name] for name in _SECRETS.required})


def keep_public_address(folder: Path, given: str | None) -> str:
    """HOST[:PORT] as given, or else as the coordinator's state in this folder has it; empty: there is none. The folder keeps a new one, for
    `shoal invite` and for a run that is resumed."""
    public = "" if given is None else PublicAddress.parse(given).text
    if not (folder / "secrets.json").exists():  # a database holds the state
        return public
    known = CoordinatorSecrets.of(folder)
    if given is not None:
        known._replace(public=public).save(folder)
    return public or known.public


def reached_address(address: str, public: str) -> str:
    """The address for machines that reach a server by `public`, HOST[:PORT], which listens at `address`. Raises ShoalError."""
    parsed = PublicAddress.parse(public)
    if is_database(address):
        access = parse_database(address)
        return access._replace(host=parsed.host, port=parsed.port or access.port).address
    listening = parse(address)
    return str(listening._replace(host=parsed.host, port=parsed.port or listening.port))


class GuestList(Mapping[str, int]):
    """Guests with an own token, and how many workers each may run at a time. `shoal invite` writes the file; a running coordinator reads
    it again when it has changed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "guests.json"
        self._read_at, self._guests = -1, dict[str, Guest]()

    def all(self) -> list[Guest]:
        return [*self._known().values()]

    def _known(self) -> dict[str, Guest]:
        try:
            changed_at = self.path.stat().st_mtime_ns
            if changed_at != self._read_at:
                saved = _GUESTS.read(self.path) or {"guests": {}}
                self._guests = {name: Guest(name, token, workers) for name, (token, workers) in saved["guests"].items()}
                self._read_at = changed_at
        except FileNotFoundError:
            self._guests = {}
        return self._guests

    def __getitem__(self, name: str) -> int:
        return self._known()[name].workers

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def invite(self, name: str, workers: int) -> Guest:
        """Add a guest, or change a guest's number of workers; the token of an earlier invitation stays."""
        known = dict(self._known())
        guest = known[name] = Guest(name, known[name].token if name in known else new_token(), workers)
        self._save(known)
        return guest

    def withdraw(self, name: str) -> bool:
        """Remove a guest. Return whether there was such a guest; another invitation would have another token."""
        known = dict(self._known())
        if known.pop(name, None) is None:
            return False
        self._save(known)
        return True

    def _save(self, known: Mapping[str, Guest]) -> None:
        _GUESTS.write(self.path, {"guests": {one.name: [one.token, one.workers] for one in known.values()}})


def listen(run: Run, transport: Transport, hosts: tuple[str, ...], folder: Path, largest: int, expected: int) -> tuple[Server, Invitation]:
    """Listen for workers, at the same port as before for a resumed run. `largest`: the most bytes of a frame."""
    known = CoordinatorSecrets.of(folder)
    if known.port and getattr(transport, "port", None) == 0:
        transport = transport.replace(port=known.port)
    keys = known.keys if needs_keys(transport, hosts) else None
    own_port = getattr(transport, "port", 0)
    further = sorted({host.server_port for host in run.cluster.hosts.values() if host.server_port} - {own_port}) if own_port else []
    server = serve(transport, ListenOptions(hosts, known.token, keys, largest, further, insecure=True, guests=GuestList(folder).all))
    port = int(server.address.rpartition(":")[2]) if server.address.rpartition(":")[2].isdigit() else 0
    known._replace(port=port, expected=expected, address=server.address, encrypted=keys is not None).save(folder)
    return server, Invitation(server.address, known.token, keys.public if keys else None)
