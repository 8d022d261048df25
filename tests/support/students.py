"""Students of a class in a database, with nothing but what a student is given."""

from __future__ import annotations

from pathlib import Path

import psycopg

from shoal.transports.database_address import Access, parse
from shoal.transports.postgres.enrolment import own_access
from tests.support.postgres_server import Database
from tests.support.transport_harness import PATIENCE_S

Student = psycopg.Connection[tuple[object, ...]]


def enrolled(database: Database, name: str, folder: Path) -> Access:
    """A student who came with the class's token, as any does."""
    return own_access(parse(database.conninfo("class")), name, folder, PATIENCE_S)


def dismiss(database: Database, student: Access) -> None:
    with database.connect() as owner:
        ended = "SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity WHERE usename = %s"
        owner.execute(ended, (int(1000 * PATIENCE_S), student.user))
        owner.execute("SELECT shoal.drop_student(%s)", (student.user,))


def connected(student: Access) -> Student:
    return psycopg.connect(student.address, autocommit=True)
