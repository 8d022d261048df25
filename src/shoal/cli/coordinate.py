"""`shoal coordinate`: hold the weights of a run that workers elsewhere train."""

from __future__ import annotations

from shoal.cli.options import make_parser, parse


def run(argv: list[str]) -> int:
    parser = make_parser("coordinate", "Coordinate a run: print the command that workers join with, and wait for them.")
    parser.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: a new one in output_dir)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --run-dir, or the newest with these settings")
    parser.add_argument("--workers", type=int, metavar="N", help="also start N workers here (default: 1 if coordinator.trains, else none)")
    parser.add_argument("--host", action="append", default=[], metavar="ADDRESS", help="listen here only (default: everywhere)")
    parser.add_argument("--watch", action="store_true", help="show the run in the browser (see `shoal watch`)")
    arguments, overrides = parse(parser, argv)
    from shoal.cli.run_command import carry_out, planned
    from shoal.launch.start_mode import StartOptions

    asked = StartOptions(
        arguments.run_dir, arguments.resume, arguments.workers, invite=True, hosts=tuple(arguments.host), watch=arguments.watch
    )
    return carry_out(planned(arguments, overrides, asked), argv)
