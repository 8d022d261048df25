"""`shoal stop`: save a run and end it, from any terminal or another machine."""

from __future__ import annotations

from shoal.cli.owner_commands import give, parser


def run(argv: list[str]) -> int:
    made = parser("stop", "Save a run and end it, as Ctrl-C does where it was started. It can go on later, with --resume.")
    return give(made.parse_args(argv).run, "stop")
