"""A student's own role: made with the class's token when the student first joins, and kept on the student's machine.

The password is made here, at random, and never leaves this machine: the database gets what it needs to check it (a SCRAM verifier).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from shoal.errors import ShoalError
from shoal.files import DamagedFileError, JsonFormat, make_folder
from shoal.transports.database_address import Access, split_pin
from shoal.transports.interface import Refused
from shoal.transports.postgres.reconnecting import Connection, ReconnectingConnection

_FORMAT = JsonFormat("student role file", 1, ("user", "password"), private=True)
_LONGEST_PART = 40


def own_access(
    access: Access, name: str | None, folder: Path, patience_s: float, warn: Callable[[str], None] = lambda text: None
) -> Access:
    """How this student connects: with the role in the invitation, or with a role of its own made with the class's token, which is saved in
    `folder`. `warn` is called if a role that was saved before no longer exists."""
    file = folder / f"class-{_class_of(access, name)}.json"
    kept = _kept(file, access)
    if kept is not None and _is_still_enrolled(kept, patience_s):
        return kept
    with contextlib.closing(ReconnectingConnection(access.address)) as line:
        if line.run(_kind, patience_s) != "class":
            return access
        made = line.run(lambda connection: _enroll(connection, access, name), patience_s)
    make_folder(folder, private=True)
    _FORMAT.write(file, {"user": made.user, "password": made.password})
    if kept is not None:
        warn(f"the class does not know `{kept.user}` any more: it may have been dropped for another. The new role is `{made.user}`")
    return made


def _class_of(access: Access, name: str | None) -> str:
    """Tells classes apart, and workers of one machine: a class by its certificate where it has one, since its address may change."""
    place = split_pin(access.address)[1] or f"{access.host}:{access.port}"
    return hashlib.sha256(f"{place} {access.database} {access.user} {name or ''}".encode()).hexdigest()[:16]


def _kept(file: Path, access: Access) -> Access | None:
    try:
        saved = _FORMAT.read(file)
    except DamagedFileError:
        return None  # a new role is made
    return access._replace(user=str(saved["user"]), password=str(saved["password"])) if saved else None


def _is_still_enrolled(access: Access, patience_s: float) -> bool:
    """Whether the role still exists. Raises ShoalError for a role that is shut out: no new role is made to get around that."""
    try:
        with contextlib.closing(ReconnectingConnection(access.address)) as line:
            return line.run(_kind, patience_s) == "student"
    except Refused as problem:
        if "not permitted to log in" in str(problem):
            raise ShoalError(
                f"`{access.user}` is shut out of this class: ask the teacher (`shoal db grant student {access.user} …`)"
            ) from None
        return False


def _kind(connection: Connection) -> str:
    row = connection.execute("SELECT shoal.role_kind()").fetchone()
    return str(row[0]) if row else ""


def _enroll(connection: Connection, access: Access, name: str | None) -> Access:
    password = secrets.token_urlsafe(24)
    # The verifier does not depend on the role's name, which the database chooses.
    verifier = connection.pgconn.encrypt_password(password.encode(), b"student", b"scram-sha-256").decode()
    row = connection.execute("SELECT shoal.enroll(%t, %t)", (_role_part(name), verifier)).fetchone()
    assert row is not None
    return access._replace(user=row[0], password=password)


def _role_part(name: str | None) -> str | None:
    """The part of the role's name that comes from the worker's, which may have letters that roles do not have."""
    return re.sub(r"[^a-z0-9._-]+", "-", (name or "").lower()).strip("._-")[:_LONGEST_PART] or None
