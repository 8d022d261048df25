"""The schema and who may use it: made, checked, changed and described here.

Migrations are the files of `migrations/`, in the order of their numbers; each is applied once, and never changed after a release.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Any, NamedTuple

from psycopg import errors, sql

from shoal.errors import ShoalError
from shoal.transports.postgres.line import Connection

KINDS = ("student", "reader", "coordinator")
STUDENTS_FUNCTIONS = (
    *("put_part", "hang_up", "limits", "ask", "answer"),
    *("welcome", "enter", "beat", "claim", "held", "submit", "give_back", "fail", "leave", "read_weights"),
)
READERS_TABLES = ("worker_list", "unit_counts", "progress", "metrics", "picture", "facts")
OLDEST_SERVER = 130000


class Migration(NamedTuple):
    number: int
    name: str
    text: str


def migrations() -> list[Migration]:
    folder = resources.files("shoal.transports.postgres") / "migrations"
    found = [(path.name, path.read_text(encoding="utf-8")) for path in folder.iterdir() if re.fullmatch(r"\d{3}_\w+\.sql", path.name)]
    return [Migration(int(name[:3]), name, text) for name, text in sorted(found)]


def latest() -> int:
    return migrations()[-1].number


def init(connection: Connection) -> int:
    """Create the schema, or bring it up to date; the version it has then. Several may try at once."""
    if connection.info.server_version < OLDEST_SERVER:
        raise ShoalError(f"PostgreSQL {connection.info.server_version // 10000} is too old: Shoal needs 13 or newer")
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(hashtext('shoal.init'))")
        connection.execute("CREATE SCHEMA IF NOT EXISTS shoal")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS shoal.migrations (version integer PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())"
        )
        version = _value(connection, "SELECT coalesce(max(version), 0) FROM shoal.migrations")
        if version > latest():
            raise ShoalError(_newer(version))
        for migration in migrations():
            if migration.number > version:
                connection.execute(migration.text.encode())
                connection.execute("INSERT INTO shoal.migrations (version) VALUES (%s)", (migration.number,))
        _close_doors(connection)
        for name, kind in connection.execute("SELECT name, kind FROM shoal.roles").fetchall():
            _allow(connection, name, kind)
    return latest()


def check(connection: Connection) -> None:
    """Whether the schema is the one this version of Shoal knows. Raises ShoalError."""
    try:
        version = _value(connection, "SELECT shoal.schema_version()")
    except (errors.InvalidSchemaName, errors.UndefinedFunction, errors.UndefinedTable):
        raise ShoalError("this database is not prepared for a run: run `shoal db init` once, as its owner") from None
    if version < latest():
        raise ShoalError(f"this database was prepared by an older Shoal (schema {version}, now {latest()}): run `shoal db init` again")
    if version > latest():
        raise ShoalError(_newer(version))


def reset(connection: Connection) -> None:
    """Delete the run and everything about it; roles keep what they may."""
    with connection.transaction():
        roles = connection.execute("SELECT name, kind FROM shoal.roles").fetchall() if _exists(connection) else []
        connection.execute("DROP SCHEMA IF EXISTS shoal CASCADE")
        init(connection)
        for name, kind in roles:
            connection.execute("INSERT INTO shoal.roles VALUES (%s, %s)", (name, kind))
            _allow(connection, name, kind)


def grant(connection: Connection, role: str, password: str | None, kind: str) -> None:
    """Make a role, where it is not there yet, and let it do what its kind may. Without a password an existing one stays as it is."""
    if kind not in KINDS:
        raise ShoalError(f"`{kind}` is no kind of role: {', '.join(KINDS)} are")
    name = sql.Identifier(role)
    with connection.transaction():
        if not connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,)).fetchone():
            if password is None:
                raise ShoalError(f"there is no role {role} yet: a new one needs a password")
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(name))
        if password is not None:
            connection.execute(sql.SQL("ALTER ROLE {} LOGIN PASSWORD {}").format(name, sql.Literal(password)))
        connection.execute("INSERT INTO shoal.roles VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET kind = excluded.kind", (role, kind))
        _allow(connection, role, kind)


def revoke(connection: Connection, role: str) -> None:
    """Shut a role out, now: it may not log in any more, and who is logged in is thrown out. `grant` with a password lets it in again."""
    with connection.transaction():
        if not connection.execute("DELETE FROM shoal.roles WHERE name = %s RETURNING 1", (role,)).fetchone():
            known = [name for (name,) in connection.execute("SELECT name FROM shoal.roles ORDER BY name").fetchall()]
            raise ShoalError(f"`{role}` was not let in here; there are {', '.join(known) or 'none'}")
        connection.execute(sql.SQL("ALTER ROLE {} NOLOGIN").format(sql.Identifier(role)))
    connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (role,))


def describe(connection: Connection) -> dict[str, Any]:
    """What is in the database, for `shoal db status`."""
    check(connection)
    tables = connection.execute(
        "SELECT c.relname, pg_total_relation_size(c.oid) FROM pg_class c"
        " WHERE c.relnamespace = 'shoal'::regnamespace AND c.relkind = 'r' ORDER BY 2 DESC"
    )
    progress = connection.execute(
        "SELECT begun_at, iteration, version, nullif(coordinator_seen_at, '-infinity') FROM shoal.progress"
    ).fetchone()
    return {
        "schema_version": latest(),
        "bytes": dict(tables.fetchall()),
        "run": dict(zip(("begun_at", "iteration", "version", "coordinator_seen_at"), progress, strict=True)) if progress else None,
        "facts": dict(connection.execute("SELECT name, value FROM shoal.facts").fetchall()),
        "units": dict(connection.execute("SELECT state, units FROM shoal.unit_counts").fetchall()),
        "workers": dict(connection.execute("SELECT name, CASE WHEN alive THEN state ELSE 'gone' END FROM shoal.worker_list").fetchall()),
        "roles": dict(connection.execute("SELECT name, kind FROM shoal.roles").fetchall()),
        "orphans": _value(connection, "SELECT count(*) FROM shoal.orphans()"),
    }


def _allow(connection: Connection, role: str, kind: str) -> None:
    """Exactly what the kind may, whatever the role could do before."""
    name = sql.Identifier(role)
    database = sql.Identifier(connection.info.dbname)

    def do(text: str, **names: sql.Composable) -> None:
        connection.execute(sql.SQL(text).format(role=name, database=database, **names))

    for what in ("TABLES", "SEQUENCES", "FUNCTIONS"):
        do(f"REVOKE ALL ON ALL {what} IN SCHEMA shoal FROM {{role}}")
    do("GRANT CONNECT ON DATABASE {database} TO {role}")
    do("GRANT USAGE ON SCHEMA shoal TO {role}")
    do("GRANT EXECUTE ON FUNCTION shoal.schema_version TO {role}")
    if kind == "student":
        for function in STUDENTS_FUNCTIONS:
            do("GRANT EXECUTE ON FUNCTION shoal.{function} TO {role}", function=sql.Identifier(function))
    elif kind == "reader":
        for table in READERS_TABLES:
            do("GRANT SELECT ON shoal.{table} TO {role}", table=sql.Identifier(table))
    else:
        do("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA shoal TO {role}")
        do("GRANT ALL ON ALL SEQUENCES IN SCHEMA shoal TO {role}")
        do("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA shoal TO {role}")
        for table in ("migrations", "roles"):
            do("REVOKE INSERT, UPDATE, DELETE ON shoal.{table} FROM {role}", table=sql.Identifier(table))
        if connection.info.server_version >= 170000:
            do("GRANT MAINTAIN ON ALL TABLES IN SCHEMA shoal TO {role}")


def _close_doors(connection: Connection) -> None:
    """Everybody may do more in a fresh database than they need: call any function, make tables of their own, and large objects."""
    connection.execute("REVOKE ALL ON SCHEMA shoal FROM PUBLIC")
    connection.execute("REVOKE ALL ON ALL FUNCTIONS IN SCHEMA shoal FROM PUBLIC")
    connection.execute(sql.SQL("REVOKE TEMPORARY ON DATABASE {} FROM PUBLIC").format(sql.Identifier(connection.info.dbname)))
    if _value(connection, "SELECT pg_has_role(nspowner, 'USAGE') FROM pg_namespace WHERE nspname = 'public'"):
        connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    if _value(connection, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user"):
        for function in ("lo_creat(integer)", "lo_create(oid)", "lo_from_bytea(oid, bytea)"):
            connection.execute(f"REVOKE EXECUTE ON FUNCTION pg_catalog.{function} FROM PUBLIC")


def _exists(connection: Connection) -> bool:
    return bool(_value(connection, "SELECT to_regclass('shoal.roles') IS NOT NULL"))


def _newer(version: int) -> str:
    return f"this database was prepared by a newer Shoal (schema {version}, here {latest()}): install that version"


def _value(connection: Connection, query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    return row[0] if row else None
