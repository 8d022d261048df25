"""The owner of a run: whoever has its owner.json, from this machine or another one, gives orders to its coordinator.

The file holds the way to the coordinator and a key. An order is signed with the key, which itself never travels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import ShoalError
from shoal.protocol.identities import Identity
from shoal.protocol.messages import Order, header_of
from shoal.runs.folder.run_reader import UNFINISHED_STATES, RunFolder, clean, complete_status
from shoal.runs.invitation import Invitation
from shoal.transports.connect import connect
from shoal.transports.interface import Client, Message, Unreachable
from shoal.transports.private_files import write_private

FILE = "owner.json"
_ANSWER_S = 10.0
_MOST_BYTES = 16 << 20


class OwnerFile(NamedTuple):
    """What owner.json holds."""

    address: str
    token: str
    key: str | None
    """The coordinator's public key; None: nothing is encrypted, or a database has keys of its own."""
    secret: str
    """The owner's key."""

    @classmethod
    def read(cls, path: Path) -> OwnerFile | None:
        """None where there is no such file. Raises ShoalError where it is no file of an owner's."""
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            return cls(*(saved[name] for name in cls._fields))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ShoalError(f"{path} cannot be read: {error.strerror}. Only whoever started the run may") from None
        except (ValueError, KeyError, TypeError):
            raise ShoalError(f"{path} is not the owner.json of a run") from None


def write_owner_file(folder: Path, invitation: Invitation) -> str:
    """Write owner.json into a run's folder, with the key that was there if one was. Return the public half of the key."""
    before = OwnerFile.read(folder / FILE)
    identity = Identity.new() if before is None else Identity(before.secret)
    owner = OwnerFile(invitation.address, invitation.token, invitation.key, identity.secret)
    write_private(folder / FILE, json.dumps(owner._asdict()))
    return identity.key


def read_owner_file(path: Path) -> OwnerFile:
    """The owner by a run's folder or by an owner.json that was copied. Raises ShoalError where nobody would hear an order."""
    if not path.is_dir():
        found = OwnerFile.read(path)
        if found is None:
            raise ShoalError(f"there is no {path}: name a run's folder, or a copy of the owner.json in it")
        return found
    folder = RunFolder(path)
    found, state = OwnerFile.read(path / FILE), folder.status()["state"]
    if state not in UNFINISHED_STATES:
        raise ShoalError(f"{path} is over ({state}): there is no coordinator to hear this")
    if found is None:
        raise ShoalError(f"{path} has no coordinator: a run of one process is ended with Ctrl-C")
    return found


def send_command(owner: OwnerFile, action: str, name: str | None = None) -> str:
    """Have the coordinator do something. Return what it says. Raises ShoalError."""
    return str(clean(_ask(owner, action, name).header.get("text", "done")))


def fetch_status(owner: OwnerFile) -> dict[str, Any]:
    """How the run goes, as its coordinator tells."""
    answer = _ask(owner, "status", None)
    return complete_status(json.loads(bytes(answer.frames[0])) if answer.frames else {})


def _ask(owner: OwnerFile, action: str, name: str | None) -> Message:
    identity = Identity(owner.secret)
    client = connect(owner.address, token=owner.token, server_key=owner.key, max_frame_bytes=_MOST_BYTES, insecure=True)
    try:
        wanted = Order(action, name, identity.key)
        nonce = str(_call(client, wanted).header.get("nonce", ""))
        return _call(client, wanted._replace(nonce=nonce, proof=identity.prove(f"order {action}", name or "", nonce)))
    except Unreachable as error:
        raise ShoalError(f"no coordinator answers at {_shown(owner.address)}: {error}") from None
    finally:
        client.close()


def _call(client: Client, wanted: Order) -> Message:
    answer = client.call(Message(header_of(wanted)), _ANSWER_S)
    if answer.header.get("kind") == "refused":
        raise ShoalError(f"the coordinator refused: {clean(answer.header.get('detail') or answer.header.get('reason'))}")
    return answer


def _shown(address: str) -> str:
    """An address without the password in it."""
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
