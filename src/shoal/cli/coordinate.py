"""`shoal coordinate`: hold the weights of a run that workers elsewhere train."""

from __future__ import annotations

from shoal.cli.clusters import coordinate
from shoal.cli.main import report
from shoal.cli.options import load, parse, parser, require
from shoal.cli.train import continued_from
from shoal.config.problems import ConfigError
from shoal.errors import ShoalError


def run(argv: list[str]) -> int:
    made = parser("coordinate", "Coordinate a run: print the command that workers join with, and wait for them.")
    made.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: a new one in output_dir)")
    made.add_argument("--resume", action="store_true", help="go on with the run in --run-dir, or the newest with these settings")
    made.add_argument("--workers", type=int, metavar="N", help="also start N workers here (default: 1 if coordinator.trains, else none)")
    made.add_argument("--host", action="append", default=[], metavar="ADDRESS", help="listen here only (default: everywhere)")
    arguments, overrides = parse(made, argv)
    resolved = continued_from(arguments)
    loaded = require(load(arguments, overrides, resolved=resolved))
    if loaded.problems:
        report(ConfigError(loaded.problems))
    if loaded.run.strategy.kind == "local":
        raise ShoalError("strategy.kind is local, so there is nobody to coordinate: --set strategy.kind=syncps (or edp, async)")
    own = int(loaded.run.coordinator.trains) if arguments.workers is None else arguments.workers
    return coordinate(loaded, arguments.run_dir, arguments.resume, workers=own, invite=True, hosts=tuple(arguments.host))
