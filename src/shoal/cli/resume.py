"""`shoal resume`: continues a paused run."""

from __future__ import annotations

from shoal.cli.owner_commands import make_parser, send_command


def run(argv: list[str]) -> int:
    parser = make_parser("resume", "Continue a run that `shoal pause` has paused. (`shoal train --resume` continues a run that has ended.)")
    return send_command(parser.parse_args(argv).run, "resume")
