"""`shoal join`: runs a worker for a coordinator."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.join_limits import add_limit_options, apply_limits, check_limits
from shoal.cli.join_options import add_ask_option, add_data_option, add_token_options, chosen_name, prompt_for, refuse_given
from shoal.cli.main import parser_of
from shoal.cli.options import add_plugin_option, load_plugins
from shoal.config.environment import keep_hub_token_back
from shoal.config.ranks import rank_place
from shoal.errors import ShoalError
from shoal.process_exit import DECLINED
from shoal.protocol.worker_names import NAME_RULE
from shoal.transports.database_address import is_address
from shoal.transports.database_address import parse as parse_address

if TYPE_CHECKING:
    pass

EPILOG = """\
The coordinator sends everything else: the configuration, the fingerprint of the data, the tokenizer.
Without ADDRESS, coordinators and servers of this network that were started with --announce are listed (needs shoal[discovery]).
Settings of this machine: --set data.source.path=/my/mnist --set training.device=cpu
"""

_TOKENS_ASKED_FOR = 3
"""Times that a wrong token may be typed anew."""
_ADDRESS = "tcp://HOST:PORT or postgresql://…, as `shoal coordinate` printed it; none: choose what is announced on this network"


def run(argv: list[str]) -> int:
    arguments = _parsed(argv)
    keep_hub_token_back()
    here = rank_place()
    if not arguments.address and not arguments.stdin and (here is None or not here.rank) and not _found_server(arguments):
        return DECLINED
    if arguments.service or (arguments.when and not arguments.stdin):
        from shoal.cli.join_watcher import watch, write_service

        return write_service(arguments) if arguments.service else watch(arguments)
    apply_limits(arguments)
    load_plugins(arguments)
    # Imported here, after the limits are set: they count for torch only if it is not loaded yet
    from shoal.cli.engine_processes import as_rank
    from shoal.cli.join_worker import hold_layers, join_and_work, run_follower

    if here is None:
        return _with_another_token(arguments, lambda: hold_layers(arguments) if arguments.node else join_and_work(arguments, argv))
    if arguments.node:
        return hold_layers(arguments)
    work = (lambda: run_follower(arguments, here)) if here.rank else (lambda: join_and_work(arguments, argv))
    return as_rank(here, work, watch=here.rank > 0 and arguments.stdin)


def _found_server(arguments: argparse.Namespace) -> bool:
    from shoal.cli.discovery import find_server

    return find_server(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("join", "Run a worker on this machine.", EPILOG)
    parser.add_argument("address", nargs="?", metavar="ADDRESS", help=_ADDRESS)
    add_token_options(parser, "the coordinator's")
    parser.add_argument("--key", help="the coordinator's public key; not needed for a coordinator on this machine")
    parser.add_argument("--name", help=f"this worker's name (default: asked for at a terminal, else given by the coordinator); {NAME_RULE}")
    parser.add_argument("--set", "--override", dest="settings", action="append", default=[], metavar="PATH=VALUE")
    add_plugin_option(parser)
    add_data_option(parser)
    add_ask_option(parser)
    parser.add_argument("--receipts", metavar="FILE", help="write down what the coordinator confirmed, for `shoal audit`")
    parser.add_argument(
        "--state", metavar="DIR", help="keep what this worker needs to go on after a break (diloco: optimizer and partial round)"
    )
    parser.add_argument(
        "--netem", metavar="WEATHER", help="simulate a network: good, cellular, satellite, degraded, brownout, or a rate: 50mbit"
    )
    parser.add_argument("--slowdown", type=float, default=1.0, metavar="FACTOR", help="simulate a machine that is slower by this factor")
    parser.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for a coordinator that does not answer (default: 600)",
    )
    parser.add_argument("--factory", action="append", default=[], metavar="MODULE:FUNCTION", help="allow the run to call this function")
    parser.add_argument("--node", action="store_true", help="hold layers of a model of `shoal serve` instead of training")
    add_limit_options(parser)
    parser.add_argument("--stdin", action="store_true", help=argparse.SUPPRESS)
    return parser


def _parsed(argv: list[str]) -> argparse.Namespace:
    arguments = _parser().parse_args(argv)
    if arguments.address:
        arguments.address = arguments.address.strip("'\"")  # the Windows command prompt keeps the quotes of the command
    if arguments.name is not None and not arguments.stdin:
        chosen_name(arguments.name)
    check_limits(arguments)
    if arguments.ask and arguments.stdin and not arguments.guest:
        raise ShoalError("--ask: a worker that another program starts cannot be asked; leave it out")
    if arguments.node:
        refuse_given(arguments, ("ask", "set", "data", "receipts", "state", "netem", "factory"), "a node holds layers and trains nothing")
        refuse_given(
            arguments, ("when", "service", "priority", "cores", "memory", "upload"), "a node holds layers for others, and does not give way"
        )
    return arguments


def _with_another_token(arguments: argparse.Namespace, work: Callable[[], int]) -> int:
    """Join and work. At a terminal, a token that the server does not know is asked for again."""
    from shoal.transports.interface import WrongToken

    for _ in range(_TOKENS_ASKED_FOR):
        try:
            return work()
        except WrongToken as refusal:
            asks = sys.stdin.isatty() and not arguments.stdin and not Path(arguments.address).is_file()
            token = _typed_again(refusal) if asks else None
            if token is None:
                raise
            _use_token(arguments, token)
    return work()


def _typed_again(refusal: ShoalError) -> str | None:
    sys.stderr.write(f"{refusal}\n")
    return prompt_for("the token (nothing: give up)")


def _use_token(arguments: argparse.Namespace, token: str) -> None:
    """Take this token, in the place of the one in the options, the environment or the address."""
    arguments.token, arguments.token_file = token, None
    if is_address(arguments.address):
        arguments.address = parse_address(arguments.address)._replace(password=None).address
