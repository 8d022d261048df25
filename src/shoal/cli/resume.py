"""`shoal resume`: let a run go on that `shoal pause` holds up."""

from __future__ import annotations

from shoal.cli.owner_commands import give, parser


def run(argv: list[str]) -> int:
    made = parser("resume", "Let a run go on that `shoal pause` holds up. (A run that has ended goes on with `shoal train --resume`.)")
    return give(made.parse_args(argv).run, "resume")
