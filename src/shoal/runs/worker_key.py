"""A worker's secret key: created once for a run and a name, and kept in a file, so that a worker that returns is recognised."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path

from shoal.config.environment import state_folder
from shoal.errors import ShoalError
from shoal.protocol.identities import Identity
from shoal.runs.invitation import Invitation

_SECRET = re.compile(r"[0-9a-f]{64}")


class WorkerKeyFile:
    """The file of the key for a run and a name, in the worker's state folder or else in the user's."""

    def __init__(self, folder: Path | None, invitation: Invitation, name: str) -> None:
        whose = f"{invitation.token}\0{invitation.key}" if invitation.token else invitation.address
        run = hashlib.sha256(whose.encode()).hexdigest()[:16]
        self.path = (folder or state_folder()) / f"identity-{run}-{name}"

    def read(self) -> Identity | None:
        """The key; None where there is no file yet. Raises ShoalError where it cannot be read."""
        try:
            secret = self.path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeError) as error:
            raise ShoalError(f"the worker's key in {self.path} cannot be read: {error}") from None
        if not _SECRET.fullmatch(secret):
            raise ShoalError(f"the worker's key in {self.path} is damaged: delete the file to take part as a new worker")
        return Identity(secret)

    def write(self, identity: Identity) -> None:
        """Write the key, readable by this user only. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")  # so that the file is never incomplete
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
            file.write(identity.secret)
        os.replace(partial, self.path)
