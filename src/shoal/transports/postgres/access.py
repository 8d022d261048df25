"""The way into a database: an address, a connection, and one line for what stands in the way."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from shoal.errors import ShoalError
from shoal.transports.addresses import bracketed

if TYPE_CHECKING:
    from psycopg import Connection

SCHEMES = ("postgresql://", "postgres://")
DEFAULT_PORT = 5432
OLDEST_SERVER = 13
_MAINTENANCE = "postgres"


class NoDatabase(ShoalError):
    """The server is there, the database is not."""


class Access(NamedTuple):
    """Everything it takes to connect."""

    host: str
    port: int
    database: str
    user: str
    password: str | None = None
    options: str = ""
    """What follows `?` in an address: `sslmode=require`."""

    @property
    def address(self) -> str:
        """As psycopg, psql and `shoal join` take it. It holds the password."""
        secret = f":{quote(self.password, safe='')}" if self.password is not None else ""
        return self._address(secret)

    @property
    def shown(self) -> str:
        """The address without the password."""
        return self._address("")

    def _address(self, secret: str) -> str:
        host = quote(self.host, safe="") if self.host.startswith("/") else bracketed(self.host)
        options = f"?{self.options}" if self.options else ""
        return f"postgresql://{quote(self.user, safe='')}{secret}@{host}:{self.port}/{quote(self.database, safe='')}{options}"


def is_address(text: str) -> bool:
    return text.startswith(SCHEMES)


def parse(address: str, password: str | None = None) -> Access:
    """An address taken apart. `password` counts where the address has none; what else is missing is `shoal`, and port 5432."""
    scheme, _, rest = address.partition("://")
    rest, _, options = rest.partition("?")
    where, _, database = rest.partition("/")
    who, _, where = where.rpartition("@")
    user, colon, secret = who.partition(":")
    host, port = _host_and_port(where)
    if f"{scheme}://" not in SCHEMES or not host or port is None:
        raise ShoalError("this is not the address of a database: something like postgresql://student@192.168.1.10:5432/shoal is expected")
    return Access(host, port, unquote(database) or "shoal", unquote(user) or "shoal", unquote(secret) if colon else password, options)


def _host_and_port(where: str) -> tuple[str, int | None]:
    """The port is None where it is none."""
    if where.startswith("["):
        host, _, port = where[1:].partition("]")
        port = port.removeprefix(":")
    else:
        host, _, port = where.partition(":")
    good = not port or (port.isascii() and port.isdigit() and 0 < int(port) < 65536)
    return unquote(host), (int(port or DEFAULT_PORT) if good else None)


def driver() -> ModuleType:
    """psycopg, or how to get it."""
    try:
        import psycopg
    except ImportError as error:
        raise ShoalError(f"a PostgreSQL database needs the Python package psycopg ({error}): pip install 'shoal[classroom]'") from None
    return psycopg


def connect(access: Access, *, timeout_s: int = 10) -> Connection[tuple[Any, ...]]:
    """A connection that commits each statement, to a server that is new enough. Raises ShoalError, NoDatabase."""
    psycopg = driver()
    try:
        connection: Connection[tuple[Any, ...]] = psycopg.connect(
            access.address, connect_timeout=timeout_s, autocommit=True, application_name="shoal"
        )
    except psycopg.Error as error:
        raise explained(error, access) from None
    if connection.info.server_version < OLDEST_SERVER * 10_000:
        version = connection.info.parameter_status("server_version")
        connection.close()
        raise ShoalError(f"{access.shown} is PostgreSQL {version}; Shoal needs {OLDEST_SERVER} or newer")
    return connection


def explained(error: Exception, access: Access) -> ShoalError:
    """What an error of psycopg means here, and what to do. Servers that speak another language are quoted."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text, said = " ".join(lines), lines[0].rpartition("FATAL: ")[2].strip()
    place = f"{bracketed(access.host)}:{access.port}"
    if "does not exist" in text and f'database "{access.database}"' in text:
        return NoDatabase(f"there is no database `{access.database}` at {place}: `shoal db init` creates it")
    if "password authentication failed" in text or "no password supplied" in text:
        what = "needs a password" if "no password" in text else "does not take this password"
        return ShoalError(f"PostgreSQL at {place} {what} for `{access.user}`: set DB_PASSWORD, or put it into the address, user:password@")
    if "pg_hba.conf" in text:
        return ShoalError(f"PostgreSQL at {place} does not let `{access.user}` in from this machine (its pg_hba.conf): {said}")
    if "permission denied" in text:
        return ShoalError(f"`{access.user}` may not do this at {access.shown}: {said}; the database's owner may, or can grant it")
    if ("too many" in text and "connections" in text) or "remaining connection slots" in text:
        return ShoalError(f"PostgreSQL at {place} has no connection left: {said}; raise its max_connections")
    if any(
        sign in text for sign in ("refused", "could not translate", "failed to resolve", "timeout", "timed out", "No route", "unreachable")
    ):
        return ShoalError(f"no PostgreSQL answers at {place}: is it running, and can this machine reach it? ({said})")
    return ShoalError(f"{access.shown}: {said}")


def create_database(access: Access) -> bool:
    """Create the database where it is missing; whether it was."""
    from psycopg import sql

    psycopg = driver()
    try:
        connection = connect(access._replace(database=_MAINTENANCE))
    except NoDatabase:
        connection = connect(access._replace(database="template1"))
    name = sql.Identifier(access.database)
    with connection:
        there = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [access.database]).fetchone()
        if there:
            return False
        try:
            connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C'").format(name))
        except psycopg.errors.DuplicateDatabase:  # somebody was faster
            return False
        except psycopg.errors.InsufficientPrivilege:
            raise ShoalError(
                f"`{access.user}` may not create databases; an administrator of that server types: "
                f"createdb --host {access.host} --port {access.port} --owner {access.user} {access.database}"
            ) from None
    return True


def set_password(connection: Connection[tuple[Any, ...]], role: str, password: str) -> None:
    """Change a role's password. It is hashed here, so that no log of the server ever holds it."""
    from psycopg import sql

    hashed = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
    connection.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), sql.Literal(hashed)))
