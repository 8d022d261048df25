"""`shoal evict`: keep a worker out of a run, or let it in again."""

from __future__ import annotations

from shoal.cli.owner_commands import give, parser


def run(argv: list[str]) -> int:
    made = parser(
        "evict",
        "Show a worker out, and keep it out by its name and its key. What it contributed stays. Whoever has the run's token can come "
        "under another name: give each person an invitation of their own (`shoal invite`), which can be withdrawn.",
    )
    made.add_argument("name", metavar="NAME", help="the worker")
    made.add_argument("--undo", action="store_true", help="let it in again")
    arguments = made.parse_args(argv)
    return give(arguments.run, "readmit" if arguments.undo else "evict", arguments.name)
