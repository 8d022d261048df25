"""`shoal pause`: hold a run up; its workers stay, and wait."""

from __future__ import annotations

from shoal.cli.owner_commands import give, parser


def run(argv: list[str]) -> int:
    made = parser(
        "pause",
        "Hold a run up: no new weights are made, and workers wait, until `shoal resume`, also if the coordinator is restarted.",
    )
    return give(made.parse_args(argv).run, "pause")
