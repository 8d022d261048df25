"""`shoal pause`: hold a run up; its workers stay, and wait."""

from __future__ import annotations

from shoal.cli.owner_commands import make_parser, send_command


def run(argv: list[str]) -> int:
    parser = make_parser(
        "pause",
        "Hold a run up: no new weights are made, and workers wait, until `shoal resume`, also if the coordinator is restarted.",
    )
    return send_command(parser.parse_args(argv).run, "pause")
