"""Through a PostgreSQL database: for machines that reach nothing else, and no port of their own is open.

Two ways to work together over one schema. **Questions and answers**, as in every transport: a question is a row, so is its answer
(`PostgresClient`, `PostgresServer`). **The board**: units of work are leased, done and handed in whether or not the coordinator is there
at the moment (`UnitDesk`, and the board's methods of `PostgresServer`). What the coordinator must remember is there, too (`store.Store`).

Students' credentials may call a few functions and nothing else; the functions are in `migrations/`. Who calls is known by random secrets
that only the caller and the database know. No statement relies on a session: transaction poolers may stand in between. Notifications
only make it quick; where they do not get through, everybody looks again after `poll_interval_s`.
"""

from shoal.config.schema.cluster import Postgres
from shoal.transports.interface import Call, Place
from shoal.transports.postgres.client import PostgresClient
from shoal.transports.postgres.lease_client import Unit, UnitDesk, Weights, stored_run
from shoal.transports.postgres.reconnecting import conninfo_of
from shoal.transports.postgres.server import PostgresServer

__all__ = ["PostgresClient", "PostgresServer", "Unit", "UnitDesk", "Weights", "connect", "serve", "stored_run"]


def serve(settings: Postgres, place: Place) -> PostgresServer:
    return PostgresServer(conninfo_of(settings), max_frame_bytes=place.max_frame_bytes, poll_interval_s=settings.poll_interval_s)


def connect(call: Call) -> PostgresClient:
    """A client. The database knows its users: the token is not for it."""
    return PostgresClient(call.address, max_frame_bytes=call.max_frame_bytes)
