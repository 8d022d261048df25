"""The schema and who may use it: created, checked, changed and described here.

A migration is a numbered folder of `migrations/`; its files are applied once, in the order of `_FILES`, and never changed after a release.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

from psycopg import errors, sql
from psycopg.rows import dict_row

from shoal.errors import ShoalError
from shoal.transports.postgres.access import set_password
from shoal.transports.postgres.protections import close_other_databases as close_other_databases
from shoal.transports.postgres.protections import grant_coordinators_functions, may_alter_roles, revoke_defaults
from shoal.transports.postgres.protections import missing_protections as missing_protections
from shoal.transports.postgres.reconnecting import Connection

KINDS = ("student", "reader", "coordinator", "class")
STUDENTS_FUNCTIONS = (
    *("schema_version", "role_kind", "put_part", "message_limits", "send_request", "read_reply", "forget_requests"),
    *("read_run", "read_weights", "read_piece", "join_run", "heartbeat", "leave_run", "why_no_work", "run_end"),
    *("claim", "is_lease_valid", "submit", "return_unit", "fail_unit"),
)
READERS_TABLES = ("worker_list", "unit_counts", "progress", "metrics", "picture", "facts")
_FILES = ("tables.sql", "limits.sql", "students.sql", "leases.sql")
"""The files of a migration, in an order in which each uses only what was created before it."""


def migrations() -> dict[int, str]:
    """The statements of each migration by its number."""
    folder = resources.files("shoal.transports.postgres") / "migrations"
    return {
        int(one.name): "".join((one / name).read_text(encoding="utf-8") for name in _FILES if (one / name).is_file())
        for one in folder.iterdir()
        if re.fullmatch(r"\d{3}", one.name)
    }


def latest() -> int:
    return max(migrations())


def init(connection: Connection) -> int:
    """Create the schema, or bring it up to date, and revoke what PostgreSQL grants to every role; returns its version. Safe to call at once
    from several processes."""
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(hashtext('shoal.init'))")
        connection.execute("CREATE SCHEMA IF NOT EXISTS shoal")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS shoal.migrations (version integer PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())"
        )
        version = _value(connection, "SELECT coalesce(max(version), 0) FROM shoal.migrations")
        if version > latest():
            raise ShoalError(_newer(version))
        for number, statements in sorted(migrations().items()):
            if number > version:
                connection.execute(statements.encode())
                connection.execute("INSERT INTO shoal.migrations (version) VALUES (%s)", (number,))
        _wait_for_enrollments(connection)
        connection.execute("DELETE FROM shoal.student_functions")
        connection.execute("INSERT INTO shoal.student_functions SELECT unnest(%s::text[])", (list(STUDENTS_FUNCTIONS),))
        revoke_defaults(connection)
        for name, kind in connection.execute("SELECT name, kind FROM shoal.roles").fetchall():
            _allow(connection, name, kind)
    return latest()


def check(connection: Connection) -> None:
    """Raise ShoalError unless the schema is the one of this version of Shoal."""
    try:
        version = _value(connection, "SELECT shoal.schema_version()")
    except (errors.InvalidSchemaName, errors.UndefinedFunction, errors.UndefinedTable):
        raise ShoalError("this database is not prepared for a run: run `shoal db init` once, as its owner") from None
    if version < latest():
        raise ShoalError(f"this database was prepared by an older Shoal (schema {version}, now {latest()}): run `shoal db init` again")
    if version > latest():
        raise ShoalError(_newer(version))


def reset(connection: Connection) -> None:
    """Delete the run and all its data; roles keep their permissions."""
    with connection.transaction():
        kept = "SELECT name, kind, enrolled_at, enrolled_from FROM shoal.roles"
        exists = _value(connection, "SELECT to_regclass('shoal.roles') IS NOT NULL")
        roles = connection.execute(kept).fetchall() if exists else []
        connection.execute("DROP SCHEMA IF EXISTS shoal CASCADE")
        init(connection)
        for role in roles:
            connection.execute("INSERT INTO shoal.roles (name, kind, enrolled_at, enrolled_from) VALUES (%s, %s, %s, %s)", role)
            _allow(connection, *role[:2])


def end_over_memory(connection: Connection, processes: list[int]) -> None:
    """End connections of students: those of these server processes, which take too much memory."""
    connection.execute("SELECT shoal.end_harmful_connections(%s)", (processes,))


def grant(connection: Connection, role: str, password: str | None, kind: str) -> None:
    """Create a role if it is missing, and grant it what its kind may do. Without a password an existing role keeps its own. This ends a
    quarantine."""
    if kind not in KINDS:
        raise ShoalError(f"`{kind}` is no kind of role: {', '.join(KINDS)} are")
    name = sql.Identifier(role)
    with connection.transaction():
        _wait_for_enrollments(connection)
        if not connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,)).fetchone():
            if password is None:
                raise ShoalError(f"there is no role {role} yet: a new one needs a password")
            connection.execute(sql.SQL("CREATE ROLE {}").format(name))
        connection.execute(sql.SQL("ALTER ROLE {} LOGIN").format(name))
        if password is not None:
            set_password(connection, role, password)
        connection.execute(
            "INSERT INTO shoal.roles (name, kind) VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET kind = excluded.kind", (role, kind)
        )
        connection.execute("DELETE FROM shoal.standings WHERE role = %s", (role,))
        _allow(connection, role, kind)


def revoke(connection: Connection, role: str) -> None:
    """Shut a role out: it may no longer log in, and its connections are ended. `grant` with a password lets it in again."""
    with connection.transaction():
        _wait_for_enrollments(connection)
        if not connection.execute("DELETE FROM shoal.roles WHERE name = %s RETURNING 1", (role,)).fetchone():
            known = [name for (name,) in connection.execute("SELECT name FROM shoal.roles ORDER BY name").fetchall()]
            raise ShoalError(f"`{role}` was not let in here; there are {', '.join(known) or 'none'}")
        connection.execute(sql.SQL("ALTER ROLE {} NOLOGIN").format(sql.Identifier(role)))
    connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (role,))


def describe(connection: Connection) -> dict[str, Any]:
    """The content of the database, for `shoal db status`."""
    check(connection)
    tables = connection.execute(
        "SELECT c.relname, pg_total_relation_size(c.oid) FROM pg_class c"
        " WHERE c.relnamespace = 'shoal'::regnamespace AND c.relkind = 'r' ORDER BY 2 DESC"
    )
    progress = "SELECT begun_at, iteration, version, nullif(coordinator_seen_at, '-infinity') AS coordinator_seen_at FROM shoal.progress"
    return {
        "schema_version": latest(),
        "bytes": dict(tables.fetchall()),
        "run": connection.cursor(row_factory=dict_row).execute(progress).fetchone(),
        "facts": dict(connection.execute("SELECT name, value FROM shoal.facts").fetchall()),
        "units": dict(connection.execute("SELECT state, units FROM shoal.unit_counts").fetchall()),
        "workers": dict(connection.execute("SELECT name, CASE WHEN alive THEN state ELSE 'gone' END FROM shoal.worker_list").fetchall()),
        "roles": dict(connection.execute("SELECT name, kind FROM shoal.roles").fetchall()),
        "orphans": _value(connection, "SELECT count(*) FROM shoal.orphans()"),
    }


def _wait_for_enrollments(connection: Connection) -> None:
    """Until this transaction ends, no student enrolls: of two transactions that change rights on one function, PostgreSQL ends one."""
    connection.execute("SELECT pg_advisory_xact_lock(hashtext('shoal.enroll'))")


def _allow(connection: Connection, role: str, kind: str) -> None:
    """Grant a role exactly what its kind may do, whatever it could do before."""
    name = sql.Identifier(role)
    database = sql.Identifier(connection.info.dbname)

    def do(text: str, **names: sql.Composable) -> None:
        connection.execute(sql.SQL(text).format(role=name, database=database, **names))

    for what in ("TABLES", "SEQUENCES", "FUNCTIONS"):
        do(f"REVOKE ALL ON ALL {what} IN SCHEMA shoal FROM {{role}}")
    do("GRANT CONNECT ON DATABASE {database} TO {role}")
    do("GRANT USAGE ON SCHEMA shoal TO {role}")
    for function in ("schema_version", "role_kind"):
        do("GRANT EXECUTE ON FUNCTION shoal.{function} TO {role}", function=sql.Identifier(function))
    if kind in ("student", "reader", "class") and may_alter_roles(connection):
        connection.execute("SELECT shoal.limit_role(%s)", (role,))
    if kind == "class":
        do("GRANT EXECUTE ON FUNCTION shoal.enroll TO {role}")
        do("ALTER ROLE {role} CONNECTION LIMIT 64")
    elif kind == "student":
        connection.execute("SELECT shoal.grant_student_functions(%s)", (role,))
    elif kind == "reader":
        for table in READERS_TABLES:
            do("GRANT SELECT ON shoal.{table} TO {role}", table=sql.Identifier(table))
    else:
        do("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA shoal TO {role}")
        do("GRANT ALL ON ALL SEQUENCES IN SCHEMA shoal TO {role}")
        do("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA shoal TO {role}")
        grant_coordinators_functions(connection, name)
        for table in ("migrations", "roles"):
            do("REVOKE INSERT, UPDATE, DELETE ON shoal.{table} FROM {role}", table=sql.Identifier(table))
        if connection.info.server_version >= 170000:
            do("GRANT MAINTAIN ON ALL TABLES IN SCHEMA shoal TO {role}")


def _newer(version: int) -> str:
    return (
        f"this database was prepared by a newer Shoal (schema {version}, here {latest()}):"
        " install that version, or delete the run with `shoal db reset`"
    )


def _value(connection: Connection, query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    return row[0] if row else None
