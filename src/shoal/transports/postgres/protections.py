"""What PostgreSQL lets every role do in a fresh database, and a class must not: revoked here, or listed where it cannot be.

Only a superuser can revoke built-in functions and languages. The server of a run's own is prepared by one; on a server that others
administer, `shoal db init` and `shoal doctor` list what is still open, and a superuser who runs `shoal db init` once closes it.
"""

from __future__ import annotations

from typing import Any

from psycopg import sql

from shoal.transports.postgres.reconnecting import Connection

_HARMLESS = (
    r"^(amvalidate|array_(sample|shuffle)|clock_timestamp|timeofday|current_query|currtid2|(curr|last|next|set)val|setseed|set_config"
    r"|gen_random_uuid|uuidv\d|random(_normal)?|pg_sleep(_for|_until)?|pg_is_in_recovery|pg_jit_available|pg_\w*size|pg_get_\w+|pg_stat_\w+"
    r"|pg_lock_status|pg_\w*blocking_pids|pg_xact_\w+|txid_status|pg_partition_\w+|pg_notification_queue_usage|pg_sequence_last_value"
    r"|pg_\w*collation_actual_version|pg_control_\w+|pg_(current|last)_\w+|ts_rewrite|plpgsql_validator)$"
)
"""Volatile built-in functions that read, compute or check the permissions of what they change."""
_SHUT = (
    "SELECT p.oid::regprocedure::text FROM pg_proc p WHERE p.pronamespace = 'pg_catalog'::regnamespace"
    " AND (p.provolatile = 'v' AND p.proname !~ %(harmless)s OR p.proname IN ('txid_current', 'pg_current_xact_id'))"
    " AND p.prorettype::regtype::text !~ '(trigger|handler|internal)$' AND NOT 'internal'::regtype = ANY (p.proargtypes)"
    " AND has_function_privilege('public', p.oid, 'EXECUTE') ORDER BY 1"
)
"""The built-in functions that are revoked: every volatile one that is not known to be harmless, so that a newer PostgreSQL opens none.
Among them: advisory locks, signals, notifications, large objects, exported snapshots, replication slots, messages in the WAL."""
_COORDINATORS_FUNCTIONS = (
    *("pg_advisory_xact_lock(bigint)", "pg_try_advisory_xact_lock(bigint)", "pg_notify(text, text)", "pg_current_xact_id()"),
)
_OWNERS_SETTINGS = ("log_min_messages", "log_min_error_statement", "temp_file_limit")
"""Settings that students cannot change themselves, and that the owner's function `limit_role` sets for them."""
_ONCE = "a superuser who runs `shoal db init` here once"
_NAMED = 6
"""How many functions of a server a sentence names."""


def revoke_defaults(connection: Connection) -> None:
    """Revoke what PostgreSQL grants to every role in a fresh database: calling functions, creating tables, running code."""
    connection.execute("REVOKE ALL ON SCHEMA shoal FROM PUBLIC")
    connection.execute("REVOKE ALL ON ALL FUNCTIONS IN SCHEMA shoal FROM PUBLIC")
    connection.execute(sql.SQL("REVOKE TEMPORARY ON DATABASE {} FROM PUBLIC").format(sql.Identifier(connection.info.dbname)))
    if _value(connection, "SELECT pg_has_role(nspowner, 'USAGE') FROM pg_namespace WHERE nspname = 'public'"):
        connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    if is_superuser(connection):
        _revoke_as_superuser(connection)


def _revoke_as_superuser(connection: Connection) -> None:
    """Revoke built-in functions and `DO`, and let the schema's owner, who may be another role, do what Shoal's own functions need."""
    if shut := _shut_functions(connection):
        connection.execute(f"REVOKE EXECUTE ON FUNCTION {', '.join(shut)} FROM PUBLIC".encode())
    connection.execute("REVOKE USAGE ON LANGUAGE plpgsql FROM PUBLIC")
    query = "SELECT r.rolname FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner WHERE n.nspname = 'shoal' AND NOT r.rolsuper"
    if (name := _value(connection, query)) is None:
        return
    owner = sql.Identifier(name)
    connection.execute(sql.SQL("GRANT USAGE ON LANGUAGE plpgsql TO {}").format(owner))
    grant_coordinators_functions(connection, owner)
    if connection.info.server_version >= 150000:
        names = sql.SQL(", ").join(map(sql.SQL, _OWNERS_SETTINGS))
        connection.execute(sql.SQL("GRANT SET ON PARAMETER {} TO {}").format(names, owner))


def grant_coordinators_functions(connection: Connection, role: sql.Composable) -> None:
    """Let a coordinator's role call the revoked functions that it needs."""
    if is_superuser(connection):
        for function in _COORDINATORS_FUNCTIONS:
            connection.execute(sql.SQL(f"GRANT EXECUTE ON FUNCTION pg_catalog.{function} TO {{}}").format(role))


def missing_protections(connection: Connection) -> list[str]:
    """Sentences about what this server does not protect a class from, and what to do. A server of the run's own has all protections."""
    found: list[str] = []
    if not may_alter_roles(connection):
        found.append("your role may not create roles: students cannot have roles of their own (CREATEROLE)")
    found += _open_to_students(connection)
    if connection.pgconn.ssl_in_use == 0 and connection.info.host not in ("", "localhost", "127.0.0.1", "::1"):
        found.append("this connection is not encrypted: weights and results can be read in the network (sslmode=verify-full)")
    query = (
        "SELECT datname FROM pg_database WHERE datallowconn AND datname <> current_database()"
        " AND has_database_privilege('public', oid, 'CONNECT') ORDER BY 1"
    )
    if others := [name for (name,) in connection.execute(query).fetchall()]:
        found.append(f"students can also connect to {', '.join(others)}: REVOKE CONNECT ON DATABASE … FROM PUBLIC")
    if connection.info.server_version < 180000:
        found.append("what students write by notifications is not counted: PostgreSQL 18 or newer counts it for each connection")
    if connection.info.host not in ("localhost", "127.0.0.1", "::1"):
        found.append("memory of the server's processes cannot be watched from another machine")
    return found


def _open_to_students(connection: Connection) -> list[str]:
    """What only a superuser can close, and has not."""
    found: list[str] = []
    if _value(connection, "SELECT has_language_privilege('public', 'plpgsql', 'USAGE')"):
        found.append(f"students can run code on the server (DO … LANGUAGE plpgsql): {_ONCE} revokes it")
    if shut := _shut_functions(connection):
        names = sorted({name for function in shut if not (name := function.partition("(")[0]).startswith("binary_upgrade_")})
        some = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        found.append(f"students can call built-in functions that lock or write: {some}. {_ONCE.capitalize()} revokes them")
    if not _may_set_limits(connection):
        close = _ONCE if connection.info.server_version >= 150000 else "from PostgreSQL 15 on, a superuser"
        found.append(
            "only a superuser can bound temporary files (temp_file_limit) and what students write into the server's log"
            f" (log_min_messages): {close} lets the schema's owner set both for new students"
        )
    return found


def close_other_databases(connection: Connection) -> None:
    """On a server that is the run's own: let no role but its owner connect to another database of it."""
    for (name,) in connection.execute("SELECT datname FROM pg_database WHERE datallowconn").fetchall():
        connection.execute(sql.SQL("REVOKE CONNECT ON DATABASE {} FROM PUBLIC").format(sql.Identifier(name)))


def is_superuser(connection: Connection) -> bool:
    return bool(_value(connection, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user"))


def may_alter_roles(connection: Connection) -> bool:
    return bool(_value(connection, "SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user"))


def _may_set_limits(connection: Connection) -> bool:
    """Whether the schema's owner, whose rights `limit_role` has when a student enrols, may set what students may not."""
    owner = "(SELECT r.* FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner WHERE n.nspname = 'shoal') o"
    if connection.info.server_version < 150000:
        return bool(_value(connection, f"SELECT o.rolsuper FROM {owner}"))
    allowed = " AND ".join(f"has_parameter_privilege(o.oid, '{setting}', 'SET')" for setting in _OWNERS_SETTINGS)
    return bool(_value(connection, f"SELECT {allowed} FROM {owner}"))


def _shut_functions(connection: Connection) -> list[str]:
    return [function for (function,) in connection.execute(_SHUT, {"harmless": _HARMLESS}).fetchall()]


def _value(connection: Connection, query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    return row[0] if row else None
