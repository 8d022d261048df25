"""`shoal coordinate`: run the coordinator for workers on other machines."""

from __future__ import annotations

from shoal.cli.discovery import add_announce_option
from shoal.cli.options import add_listening_options, make_parser, parse


def run(argv: list[str]) -> int:
    parser = make_parser("coordinate", "Start a coordinator, print the command with which workers join, and wait for them.")
    parser.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: a new one in output_dir)")
    parser.add_argument("--resume", action="store_true", help="resume the run in --run-dir, or the newest run with these settings")
    parser.add_argument("--workers", type=int, metavar="N", help="also start N workers here (default: 1 if coordinator.trains, else none)")
    add_listening_options(parser)
    add_announce_option(parser)
    parser.add_argument("--watch", action="store_true", help="show the run in the browser (see `shoal watch`)")
    arguments, overrides = parse(parser, argv)
    from shoal.cli.run_command import carry_out, coordinator_options, planned

    asked = coordinator_options(arguments, announce=arguments.announce, watch=arguments.watch)
    return carry_out(planned(arguments, overrides, asked), argv)
