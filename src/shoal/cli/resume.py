"""`shoal resume`: let a run go on that `shoal pause` holds up."""

from __future__ import annotations

from shoal.cli.owner_commands import make_parser, send_command


def run(argv: list[str]) -> int:
    parser = make_parser(
        "resume", "Let a run go on that `shoal pause` holds up. (A run that has ended goes on with `shoal train --resume`.)"
    )
    return send_command(parser.parse_args(argv).run, "resume")
