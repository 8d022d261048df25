"""`shoal evict`: removes a worker from a run, or admits it again."""

from __future__ import annotations

from shoal.cli.owner_commands import make_parser, send_command


def run(argv: list[str]) -> int:
    parser = make_parser(
        "evict",
        "Remove a worker and refuse its name and key from now on. Its contributions stay. A person with the run's token can return under "
        "another name: give each person a separate invitation (`shoal invite`), which can be withdrawn.",
    )
    parser.add_argument("name", metavar="NAME", help="the worker")
    parser.add_argument("--undo", action="store_true", help="admit it again")
    arguments = parser.parse_args(argv)
    return send_command(arguments.run, "readmit" if arguments.undo else "evict", arguments.name)
