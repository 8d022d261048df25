"""`shoal pause`: pauses a run; its workers wait."""

from __future__ import annotations

from shoal.cli.owner_commands import make_parser, send_command


def run(argv: list[str]) -> int:
    parser = make_parser(
        "pause",
        "Pause a run: workers wait and no new weights are made until `shoal resume`, even if the coordinator is restarted.",
    )
    return send_command(parser.parse_args(argv).run, "pause")
