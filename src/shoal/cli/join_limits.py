"""Options of `shoal join` that say what a worker may take of its computer, and when."""

from __future__ import annotations

import argparse

from shoal.cli.main import print_log
from shoal.errors import ShoalError
from shoal.launch.volunteer import conditions, limits


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what a worker may take of this computer")
    group.add_argument(
        "--when",
        action="append",
        default=[],
        metavar="CONDITION",
        help=f"work only while this holds, and else give way within seconds: {conditions.FORMS.replace('%', '%%')}; joined with `and`",
    )
    group.add_argument(
        "--priority", choices=["lowest", "normal"], help="priority for processors and disk (default: normal; with --when lowest)"
    )
    group.add_argument("--cores", type=int, metavar="N", help="use this many cores")
    group.add_argument("--memory", metavar="SIZE", help="use this much memory at most, such as 2G")
    group.add_argument("--upload", metavar="RATE", help="send this much at most, such as 5mbit")
    group.add_argument(
        "--service", action="store_true", help="write a service of this system that runs this command when you log in, and do not join now"
    )
    group.add_argument("--guest", action="store_true", help=argparse.SUPPRESS)  # a watcher has started this worker


def check_limits(arguments: argparse.Namespace) -> None:
    """Raise ShoalError for values that are none."""
    conditions.parse(arguments.when)
    if arguments.memory:
        limits.parse_memory(arguments.memory)
    if arguments.upload:
        limits.parse_upload(arguments.upload)
    if arguments.cores is not None and arguments.cores < 1:
        raise ShoalError("--cores: a worker needs one at least")
    if arguments.service and arguments.ask:
        raise ShoalError("--service: a service cannot ask; join once with --ask, and leave it out here")


def apply_limits(arguments: argparse.Namespace) -> None:
    """Set priority, cores and memory of this process and of all that it starts, before torch is loaded."""
    if arguments.priority == "lowest":
        taken = limits.take_lowest_priority()
        print_log(f"this worker runs with the lowest priority that the system has: {', '.join(taken) or 'none'}")
    if arguments.cores is not None:
        limits.use_cores(arguments.cores)
    if arguments.memory:
        limits.bound_allocations(limits.parse_memory(arguments.memory))
