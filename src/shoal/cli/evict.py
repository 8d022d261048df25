"""`shoal evict`: keep a worker out of a run, or let it in again."""

from __future__ import annotations

from shoal.cli.owner_commands import make_parser, send_command


def run(argv: list[str]) -> int:
    parser = make_parser(
        "evict",
        "Show a worker out, and keep it out by its name and its key. What it contributed stays. Whoever has the run's token can come "
        "under another name: give each person an invitation of their own (`shoal invite`), which can be withdrawn.",
    )
    parser.add_argument("name", metavar="NAME", help="the worker")
    parser.add_argument("--undo", action="store_true", help="let it in again")
    arguments = parser.parse_args(argv)
    return send_command(arguments.run, "readmit" if arguments.undo else "evict", arguments.name)
