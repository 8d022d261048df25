"""`shoal db`: create, inspect, empty and share the PostgreSQL database of a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.cli.main import run_subcommand
from shoal.cli.options import load, make_parser, parse
from shoal.cli.output import print_secret, quoted
from shoal.config.load import Override
from shoal.config.schema.cluster import Postgres
from shoal.errors import ShoalError
from shoal.launch.postgres.connection_file import FILE, ConnectionFile
from shoal.reporters.class_table import units_of
from shoal.transports.addresses import is_loopback, local_addresses, to_tell
from shoal.transports.database_address import Access, access_of, is_address
from shoal.transports.database_address import parse as parse_address
from shoal.transports.keys import new_typed_token

if TYPE_CHECKING:
    from shoal.transports.postgres.access import Connection

HELP = """\
usage: shoal db COMMAND …

commands:
  init WHERE               create the database and its tables, or update them
  status WHERE             show its contents (--json)
  reset WHERE              delete its run (asks first; --yes does not)
  grant KIND NAME WHERE    create a role: student, reader, coordinator or class
  revoke NAME WHERE        remove a role's access

WHERE is a configuration whose transport is postgres, the folder of a run, or an address: postgresql://user@host:5432/shoal

`shoal db COMMAND --help` explains each command.
"""
KINDS = {
    "student": "take work, read weights and hand in results",
    "reader": "look at the progress",
    "coordinator": "run a training",
    "class": "make a role of its own for each student who has its token",
}
_MOST_TABLES = 5


class DatabaseLocation(NamedTuple):
    """A database, with the address for other machines."""

    access: Access
    host: str
    options: str
    port: int = 0
    """Port for other machines, if it differs; 0: the same."""
    pin: str | None = None
    """Fingerprint of the certificate of a run's embedded server."""


def run(argv: list[str]) -> int:
    return run_subcommand("db", HELP, {"init": init, "status": status, "reset": reset, "grant": grant, "revoke": revoke}, argv)


def init(argv: list[str]) -> int:
    parser = make_parser("db init", "Create the database and its tables, or update them.")
    with database_location(*parse(parser, argv)) as place:
        from shoal.transports.postgres import schema
        from shoal.transports.postgres.access import create_database

        new = create_database(place.access) if _is_missing(place.access) else False
        with connected(place.access) as connection:
            version = schema.init(connection)
            missing = schema.missing_protections(connection) if place.pin is None else []
    print(f"{place.access.shown}: {'created, ' if new else ''}ready (schema {version})")
    for protection in missing:
        sys.stderr.write(f"not protected: {protection}\n")
    return 0


def status(argv: list[str]) -> int:
    parser = make_parser("db status", "Show the contents of the database.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    arguments, overrides = parse(parser, argv)
    with database_location(arguments, overrides) as place, connected(place.access) as connection:
        from shoal.transports.postgres import schema

        found = schema.describe(connection)
    if arguments.json:
        print(json.dumps({"database": place.access.shown, **found}, indent=2, default=str))
    else:
        print("\n".join(f"{name:<10} {text}" for name, text in _rows(place.access, found)))
    return 0


def reset(argv: list[str]) -> int:
    parser = make_parser("db reset", "Delete the run in the database with its weights, units and metrics. Roles stay.")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    arguments, overrides = parse(parser, argv)
    with database_location(arguments, overrides) as place, connected(place.access) as connection:
        from shoal.transports.postgres import schema

        if not arguments.yes:
            _confirm(place.access)
        schema.reset(connection)
    print(f"{place.access.shown}: empty")
    return 0


def grant(argv: list[str]) -> int:
    parser = make_parser("db grant", "Create a role for one person, with the permissions of its kind.", files="")
    parser.add_argument("kind", choices=KINDS, help="; ".join(f"{kind}: {what}" for kind, what in KINDS.items()))
    parser.add_argument(
        "name",
        metavar="NAME",
        help="the role, one for each person; a role of kind class is shared: its token creates a role for each student",
    )
    parser.add_argument("files", nargs="*", metavar="WHERE", help="a configuration, a run's folder or an address")
    parser.add_argument("--password", help="the role's password (default: a new one, which is shown once)")
    arguments, overrides = parse(parser, argv)
    with database_location(arguments, overrides) as place, connected(place.access) as connection:
        from shoal.transports.postgres import schema

        known = arguments.name in schema.describe(connection)["roles"]
        password = arguments.password or (None if known else new_typed_token())
        schema.grant(connection, arguments.name, password, arguments.kind)
    _print_granted(arguments, place, password)
    return 0


def revoke(argv: list[str]) -> int:
    parser = make_parser("db revoke", "Remove a role's access. Its connections end; its results stay.", files="")
    parser.add_argument("name", metavar="NAME", help="the role, as it was granted")
    parser.add_argument("files", nargs="*", metavar="WHERE", help="a configuration, a run's folder or an address")
    arguments, overrides = parse(parser, argv)
    with database_location(arguments, overrides) as place, connected(place.access) as connection:
        from shoal.transports.postgres import schema

        schema.revoke(connection, arguments.name)
    print(f"`{arguments.name}` is shut out (`shoal db grant` lets it in again)")
    return 0


def _print_granted(arguments: argparse.Namespace, place: DatabaseLocation, password: str | None) -> None:
    kept = "" if password else "; the password stays as it is (--password changes it)"
    print(f"`{arguments.name}` may {KINDS[arguments.kind]}{kept}")
    theirs = Access(place.host, place.port or place.access.port, place.access.database, arguments.name, password, place.options)
    if arguments.kind == "coordinator":
        print(f"in its configuration:\n  transport: {{host: {theirs.host}, port: {theirs.port}, user: {theirs.user}}}")
        print_secret(f"in its environment:\n  DB_PASSWORD={password or '…'}")
    else:
        start = f"with:\n  shoal {'status' if arguments.kind == 'reader' else 'join'} "
        print(f"{start}{quoted(theirs._replace(password=None).address)}")
        if password:
            asked = "set DB_PASSWORD to it" if arguments.kind == "reader" else "it is asked for, or in DB_PASSWORD"
            print_secret(f"password ({asked}):\n  {password}")
    if is_loopback(theirs.host):
        sys.stderr.write("note: this server listens for this machine only; `shoal coordinate` lets others in\n")


# --- which database -----------------------------------------------------------------------------------


@contextmanager
def database_location(arguments: argparse.Namespace, overrides: list[Override]) -> Iterator[DatabaseLocation]:
    """The database that the arguments name. An embedded server that does not run is started meanwhile."""
    meant = _meant(arguments, overrides)
    if isinstance(meant, Access):
        # Other machines need this machine's network address instead of `localhost`.
        local = meant.host.startswith("/") or is_loopback(meant.host)
        yield DatabaseLocation(meant, local_addresses()[0] if local else meant.host, meant.options)
        return
    from shoal.launch.postgres.server import database_of

    with database_of(meant) as (access, listening):
        yield _of_run(meant, access, listening)


def _of_run(folder: Path, access: Access, listening: str) -> DatabaseLocation:
    from shoal.launch.postgres.certificate import certificate_of

    memory = ConnectionFile.of(folder)
    if memory is None or is_loopback(listening):
        return DatabaseLocation(access, to_tell(listening), "", pin="")
    pin = certificate_of(folder).pin
    return DatabaseLocation(access, to_tell(listening), f"pin={pin}", memory.port, pin)


def _meant(arguments: argparse.Namespace, overrides: list[Override]) -> Access | Path:
    """The address of a database, or the folder of a run with an embedded server."""
    alone = arguments.files[0] if len(arguments.files) == 1 else ""
    if is_address(alone):
        from shoal.config.environment import database_password

        return parse_address(alone, database_password())
    if alone and (Path(alone) / FILE).exists():
        return Path(alone)
    of_run = bool(alone) and (Path(alone) / "config.yaml").exists()
    if of_run:
        arguments.files, arguments.dialect = [str(Path(alone) / "config.yaml")], "shoal"
    settings, output_dir = load(arguments, overrides, resolved=of_run).values("transport", "output_dir")
    if not isinstance(settings, Postgres):
        raise ShoalError(f"transport.kind is {settings.kind}: only a run through PostgreSQL has a database (--set transport.kind=postgres)")
    if settings.host != "embedded":
        return access_of(settings)
    return _newest(output_dir)


def _newest(output_dir: str) -> Path:
    runs = sorted(Path(output_dir).rglob(FILE), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise ShoalError(
            f"host: embedded: a run makes its database itself, and there is none in {output_dir} yet: `shoal coordinate` starts one"
        )
    sys.stderr.write(f"the newest run with a database of its own: {runs[-1].parent}\n")
    return runs[-1].parent


@contextmanager
def connected(access: Access) -> Iterator[Connection]:
    """A connection; errors of the database become a ShoalError of one line."""
    from shoal.transports.postgres.access import Error, connect, explained

    with connect(access) as connection:
        try:
            yield connection
        except Error as error:
            raise explained(error, access) from None


def _is_missing(access: Access) -> bool:
    from shoal.transports.postgres.access import NoDatabase, connect

    try:
        connect(access).close()
    except NoDatabase:
        return True
    return False


def _confirm(access: Access) -> None:
    print(f"This deletes the run in {access.shown}: weights, work and figures.")
    try:
        typed = input(f"Type the database's name ({access.database}) to go on: ")
    except EOFError:
        typed = ""
    if typed.strip() != access.database:
        raise ShoalError("nothing was deleted; --yes deletes without asking")


# --- what is in it ------------------------------------------------------------------------------------


def _rows(access: Access, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "database", access.shown
    yield "schema", str(found["schema_version"])
    yield "run", "none yet" if found["run"] is None else _listed(found["run"])
    facts = {name: value for name, value in found["facts"].items() if name != "members"}  # `shoal status` shows the members
    yield "facts", _listed(facts) or "none"
    yield "units", units_of(found["units"])
    for name in ("workers", "roles"):
        yield name, _listed(found[name]) or "none"
    largest = sorted(found["bytes"].items(), key=lambda item: -item[1])[:_MOST_TABLES]
    yield "size", f"{_size(sum(found['bytes'].values()))} ({_listed({name: _size(size) for name, size in largest})}, …)"
    if found["orphans"]:
        yield "orphans", f"{found['orphans']} blobs that nothing refers to: please report this"


def _listed(items: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in items.items())


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.0f} kB"
