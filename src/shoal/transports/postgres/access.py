"""Connect to a database, or explain in one line why that failed; and what is done before there is a schema."""

from __future__ import annotations

import logging
from typing import Any

import psycopg
from psycopg import conninfo as conninfos
from psycopg import sql

from shoal.errors import ShoalError
from shoal.transports.addresses import bracketed
from shoal.transports.database_address import CLASS_ROLE, Access, split_pin
from shoal.transports.interface import WrongToken
from shoal.transports.postgres.certificate_pin import pinned_certificate

# psycopg logs each lost connection. Shoal reports that itself, so only a program that configures logging sees those lines.
logging.getLogger("psycopg").addHandler(logging.NullHandler())

Connection = psycopg.Connection[tuple[Any, ...]]
Error = psycopg.Error
OLDEST_SERVER = 13
_MAINTENANCE = "postgres"
_UNREACHABLE = ("refused", "could not translate", "failed to resolve", "timeout", "timed out", "No route", "unreachable")


class NoDatabase(ShoalError):
    """The server answers, and has no such database."""


def connect(access: Access, *, timeout_s: int = 10) -> Connection:
    """A connection that commits each statement, to a server that is new enough. Raises ShoalError, NoDatabase."""
    address, pin = split_pin(access.address)
    try:
        where = conninfos.make_conninfo(address, **trust(access, pin))
        connection: Connection = psycopg.connect(where, connect_timeout=timeout_s, autocommit=True, application_name="shoal")
    except psycopg.Error as error:
        raise explained(error, access) from None
    if connection.info.server_version < OLDEST_SERVER * 10_000:
        version = connection.info.parameter_status("server_version")
        connection.close()
        raise ShoalError(f"{access.shown} is PostgreSQL {version}; Shoal needs {OLDEST_SERVER} or newer")
    return connection


def trust(access: Access, pin: str | None) -> dict[str, str]:
    """The options for libpq where an invitation names the server's certificate."""
    if pin is None:
        return {}
    return {"sslmode": "verify-ca", "sslrootcert": pinned_certificate(access.host, access.port, pin), "gssencmode": "disable"}


def explained(error: Exception, access: Access) -> ShoalError:
    """A ShoalError that says what an error of psycopg means and what to do. Unknown messages are quoted."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text, said = " ".join(lines), lines[0].rpartition("FATAL: ")[2].strip()
    server = f"{bracketed(access.host)}:{access.port}"
    if "does not exist" in text and f'database "{access.database}"' in text:
        return NoDatabase(f"there is no database `{access.database}` at {server}: `shoal db init` creates it")
    if "password authentication failed" in text or "no password supplied" in text:
        of_class, missing = access.user == CLASS_ROLE, "no password" in text
        if of_class:
            what = "a token is needed" if missing else "the token is wrong"
            return WrongToken(f"{what}: {server} needs the class's token, which the teacher's screen shows (type it, or set SHOAL_TOKEN)")
        what = "a password is needed" if missing else "the password is wrong"
        return WrongToken(f"{what}: PostgreSQL at {server} needs the password of `{access.user}` (set DB_PASSWORD)")
    if "not yet accepting connections" in text or "is starting up" in text or "in recovery mode" in text:
        return ShoalError(f"PostgreSQL at {server} is starting, and does not answer yet: try again in a few seconds")
    if "pg_hba.conf" in text:
        return ShoalError(f"PostgreSQL at {server} does not let `{access.user}` in from this machine (its pg_hba.conf): {said}")
    if "not permitted to log in" in text:
        return ShoalError(
            f"`{access.user}` is shut out of this class and not permitted to log in: it exceeded what a student may use, or the teacher"
            f" revoked it. The teacher can let it in again (`shoal db grant student {access.user} WHERE`)"
        )
    if "permission denied" in text:
        return ShoalError(f"`{access.user}` may not do this at {access.shown}: {said}; the database's owner may, or can grant it")
    if ("too many" in text and "connections" in text) or "remaining connection slots" in text:
        return ShoalError(f"PostgreSQL at {server} has no connection left: {said}; raise its max_connections")
    if any(sign in text for sign in _UNREACHABLE):
        return ShoalError(f"no PostgreSQL answers at {server}: is it running, and can this machine reach it? ({said})")
    return ShoalError(f"{access.shown}: {said}")


def create_database(access: Access) -> bool:
    """Create the database if it is missing; returns whether it was."""
    try:
        connection = connect(access._replace(database=_MAINTENANCE))
    except NoDatabase:
        connection = connect(access._replace(database="template1"))
    name = sql.Identifier(access.database)
    with connection:
        exists = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [access.database]).fetchone()
        if exists:
            return False
        try:
            connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C'").format(name))
        except psycopg.errors.DuplicateDatabase:  # another process was faster
            return False
        except psycopg.errors.InsufficientPrivilege:
            raise ShoalError(
                f"`{access.user}` may not create databases; an administrator of that server types: "
                f"createdb --host {access.host} --port {access.port} --owner {access.user} {access.database}"
            ) from None
    return True


def set_password(connection: Connection, role: str, password: str) -> None:
    """Change a role's password. It is hashed here, so that no log of the server ever holds it."""
    hashed = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
    connection.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), sql.Literal(hashed)))
