"""`shoal doctor`: checks whether this machine can train, and prints remedies."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import make_parser, parse
from shoal.config.load import Override

if TYPE_CHECKING:
    from shoal.launch.doctor import Finding

_MARKS = {"good": "✓", "doubtful": "·", "bad": "✗"}
_PLAIN = {"good": "ok", "doubtful": "--", "bad": "!!"}


def run(argv: list[str]) -> int:
    parser = make_parser(
        "doctor",
        "Check this machine: Python, torch, GPUs, disk, clock, ports, database, extras. With WHERE (a configuration whose transport is"
        " postgres, the folder of a run, or an address), check what that database does not protect a class from, too.",
        files="",
    )
    parser.add_argument("files", nargs="*", metavar="WHERE", help="the database of a class (default: none)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments, overrides = parse(parser, argv)
    from shoal.launch.doctor import BAD, examine

    findings = []
    for finding in itertools.chain(examine(Path.cwd()), _class_database(arguments, overrides)):
        findings.append(finding)
        if not arguments.json:
            _show(*finding)
    bad = [finding for finding in findings if finding.state == BAD]
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    elif bad:
        print(f"\n{len(bad)} of these must be fixed before a run can start here")
    else:
        print("\nthis machine can train; checks that are marked with a dot matter only for some runs")
    return 1 if bad else 0


def _class_database(arguments: argparse.Namespace, overrides: list[Override]) -> Iterator[Finding]:
    """What the database that was named does not protect a class from."""
    if not arguments.files:
        return
    from shoal.cli.db import connected, database_location
    from shoal.launch.doctor import class_database

    with database_location(arguments, overrides) as place, connected(place.access) as connection:
        from shoal.transports.postgres import schema

        schema.check(connection)
        yield from class_database(place.access.shown, schema.missing_protections(connection) if place.pin is None else [])


def _show(what: str, state: str, finding: str, advice: str) -> None:
    marks = _MARKS if (sys.stdout.encoding or "").lower().startswith("utf") else _PLAIN
    print(f"{marks[state]} {what:<18} {finding}" + (f"\n  {'':<18} → {advice}" if advice else ""), flush=True)
