"""Sends the owner's commands (stop, pause, status …) to a running coordinator. The run's owner.json authorises them, on any machine.

The file holds the coordinator's address and a secret key. Commands are signed with the key, which is never sent.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import ShoalError
from shoal.files import JsonFormat
from shoal.protocol.identities import Identity
from shoal.protocol.messages import OwnerCommand, header_of
from shoal.runs.folder.run_reader import UNFINISHED_STATES, RunFolder, clean, complete_status
from shoal.runs.invitation import Invitation, reached_address
from shoal.transports.connect import connect
from shoal.transports.interface import Client, ConnectOptions, Message, Unreachable

FILE = "owner.json"
_ANSWER_S = 10.0
_MOST_BYTES = 16 << 20


class OwnerFile(NamedTuple):
    address: str
    token: str
    key: str | None
    """The coordinator's public key; None where the transport is not encrypted, or is a database."""
    secret: str
    """The owner's secret key."""
    public: str = ""
    """The address for other machines, where it is another one (--public-address)."""

    @classmethod
    def read(cls, path: Path) -> OwnerFile | None:
        """None where there is no such file. Raises ShoalError where it is not an owner.json."""
        saved = _FORMAT.read(path)
        return None if saved is None else cls(**{name: saved[name] for name in _NEEDED}, public=saved.get("public", ""))


_NEEDED = ("address", "token", "key", "secret")
_FORMAT = JsonFormat("owner file", 1, _NEEDED, private=True)


def write_owner_file(folder: Path, invitation: Invitation) -> str:
    """Write owner.json into a run's folder, with the key of an earlier one if there is one. Return the public key."""
    before = OwnerFile.read(folder / FILE)
    identity = Identity.new() if before is None else Identity(before.secret)
    owner = OwnerFile(invitation.address, invitation.token, invitation.key, identity.secret)
    _FORMAT.write(folder / FILE, owner._asdict())
    return identity.key


def write_public_address(folder: Path, public: str) -> None:
    """Add HOST[:PORT], at which other machines reach the coordinator, to the owner.json of a run's folder: copies of it are used there."""
    owner = OwnerFile.read(folder / FILE)
    if owner is not None:
        _FORMAT.write(folder / FILE, owner._replace(public=reached_address(owner.address, public))._asdict())


def read_owner_file(path: Path) -> OwnerFile:
    """Read the owner.json of a run's folder, or a copy of one. Raises ShoalError where the run has no running coordinator."""
    if not path.is_dir():
        found = OwnerFile.read(path)
        if found is None:
            raise ShoalError(f"there is no {path}: name a run's folder, or a copy of the owner.json in it")
        return found._replace(address=found.public or found.address)
    folder = RunFolder(path)
    found, state = OwnerFile.read(path / FILE), folder.status()["state"]
    if state not in UNFINISHED_STATES:
        raise ShoalError(f"{path} is over ({state}): there is no coordinator to receive this command")
    if found is None:
        raise ShoalError(f"{path} has no coordinator: a run of one process is ended with Ctrl-C")
    return found


def send_command(owner: OwnerFile, action: str, name: str | None = None) -> str:
    """Send a command to the coordinator, and return its answer. Raises ShoalError."""
    return str(clean(_ask(owner, action, name).header.get("text", "done")))


def fetch_status(owner: OwnerFile) -> dict[str, Any]:
    """Fetch the status from the coordinator. Raises ShoalError."""
    answer = _ask(owner, "status", None)
    return complete_status(json.loads(bytes(answer.frames[0])) if answer.frames else {})


def _ask(owner: OwnerFile, action: str, name: str | None) -> Message:
    identity = Identity(owner.secret)
    with closing(connect(ConnectOptions(owner.address, owner.token, owner.key, _MOST_BYTES, insecure=True))) as client:
        try:
            wanted = OwnerCommand(action, name, identity.key)
            nonce = str(_call(client, wanted).header.get("nonce", ""))
            return _call(client, wanted._replace(nonce=nonce, proof=identity.prove(f"order {action}", name or "", nonce)))
        except Unreachable as error:
            scheme, _, rest = owner.address.partition("://")
            shown = f"{scheme}://{rest.rpartition('@')[2]}"  # without the password
            raise ShoalError(f"no coordinator answers at {shown}: {error}") from None


def _call(client: Client, wanted: OwnerCommand) -> Message:
    answer = client.call(Message(header_of(wanted)), _ANSWER_S)
    if answer.header.get("kind") == "refused":
        raise ShoalError(f"the coordinator refused: {clean(answer.header.get('detail') or answer.header.get('reason'))}")
    return answer
