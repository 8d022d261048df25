"""The address of a database, taken apart and put together. Nothing here needs a driver."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote, unquote

from shoal.config.schema.cluster import Postgres
from shoal.errors import ShoalError
from shoal.transports.addresses import bracketed

SCHEMES = ("postgresql://", "postgres://")
DEFAULT_PORT = 5432
CLASS_ROLE = "class"
"""The role that students enrol with. Its password is the class's token."""
_PIN = "pin="


class Access(NamedTuple):
    """Everything it takes to connect."""

    host: str
    port: int
    database: str
    user: str
    password: str | None = None
    options: str = ""
    """What follows `?` in an address: `sslmode=require`; `pin=…` names the certificate that the server must show."""

    @property
    def address(self) -> str:
        """As psycopg, psql and `shoal join` take it. It holds the password."""
        secret = f":{quote(self.password, safe='')}" if self.password is not None else ""
        return self._address(secret) + (f"?{self.options}" if self.options else "")

    @property
    def shown(self) -> str:
        """The address without password and options."""
        return self._address("")

    def _address(self, secret: str) -> str:
        host = quote(self.host, safe="") if self.host.startswith("/") else bracketed(self.host)
        return f"postgresql://{quote(self.user, safe='')}{secret}@{host}:{self.port}/{quote(self.database, safe='')}"


def split_pin(address: str) -> tuple[str, str | None]:
    """An address as libpq takes it, and the pin that only Shoal knows: the digest of the certificate that the server must show."""
    where, _, options = address.partition("?")
    kept = [option for option in options.split("&") if option and not option.startswith(_PIN)]
    pins = [option.removeprefix(_PIN) for option in options.split("&") if option.startswith(_PIN)]
    return where + (f"?{'&'.join(kept)}" if kept else ""), pins[0] if pins else None


def access_of(settings: Postgres) -> Access:
    """The database that is configured, on a server that is there."""
    password = settings.password.reveal() if settings.password else None
    return Access(settings.host, settings.port or DEFAULT_PORT, settings.database, settings.user, password)


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
