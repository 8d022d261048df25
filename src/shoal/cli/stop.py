"""`shoal stop`: save a run and end it, from any terminal or another machine."""

from __future__ import annotations

from shoal.cli.owner_commands import make_parser, send_command


def run(argv: list[str]) -> int:
    parser = make_parser("stop", "Save a run and end it, as Ctrl-C does where it was started. It can go on later, with --resume.")
    return send_command(parser.parse_args(argv).run, "stop")
