"""`shoal stop`: saves and ends a run, from any terminal or another machine."""

from __future__ import annotations

from shoal.cli.owner_commands import make_parser, send_command


def run(argv: list[str]) -> int:
    parser = make_parser("stop", "Save and end a run, as Ctrl-C does in its own terminal. --resume continues it later.")
    return send_command(parser.parse_args(argv).run, "stop")
