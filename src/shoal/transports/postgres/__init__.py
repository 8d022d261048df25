"""PostgreSQL as a transport: for machines that can reach a database and have no open port of their own.

One schema serves two ways of working. **Requests and replies**, as in every transport, are rows (`PostgresClient`, `PostgresServer`).
**Units on lease** are claimed, computed and submitted whether or not the coordinator is running at the moment (`LeaseClient`, and the
methods for units of `PostgresServer`). The coordinator's journal, ledger and snapshots are stored there, too (`store.py`).

A student's role may call a few functions of `migrations/` and nothing else. Callers are known by random secrets that only they and the
database have. No statement relies on a session, so a transaction pooler may stand in between. Notifications only make things faster: where
they do not arrive, both sides look again after `poll_interval_s`.
"""

from shoal.config.schema.cluster import Postgres
from shoal.errors import ShoalError
from shoal.transports.database_address import access_of
from shoal.transports.interface import ConnectOptions, ListenOptions

try:
    import psycopg  # noqa: F401 - the modules of this folder need it
except ImportError:
    raise ShoalError("a PostgreSQL database needs the Python package psycopg: pip install 'shoal[classroom]'") from None

from shoal.transports.postgres.client import PostgresClient
from shoal.transports.postgres.lease_client import ClaimedUnit, LeaseClient, PublishedWeights, stored_run
from shoal.transports.postgres.server import PostgresServer

__all__ = ["ClaimedUnit", "LeaseClient", "PostgresClient", "PostgresServer", "PublishedWeights", "connect", "serve", "stored_run"]


def serve(settings: Postgres, options: ListenOptions) -> PostgresServer:
    if settings.host == "embedded":
        raise ShoalError("the run's own database is not running: it must be started first, and its address given as transport.host")
    address = access_of(settings).address
    return PostgresServer(address, max_frame_bytes=options.max_frame_bytes, poll_interval_s=settings.poll_interval_s)


def connect(options: ConnectOptions) -> PostgresClient:
    """A client. The database knows its users: the token is not for it."""
    return PostgresClient(options.address, max_frame_bytes=options.max_frame_bytes)
