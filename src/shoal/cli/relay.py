"""`shoal relay`: a coordinator for local workers that is one worker to a coordinator above."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.discovery import add_announce_option
from shoal.cli.join_options import add_ask_option, add_data_option, add_token_options, agreed, chosen_name, typed
from shoal.cli.join_worker import check_trust
from shoal.cli.main import parser_of, print_log
from shoal.cli.options import add_listening_options, add_plugin_option, load_plugins
from shoal.config.environment import keep_hub_token_back
from shoal.config.load import Override, parse_override
from shoal.config.received import Permissions
from shoal.errors import ShoalError
from shoal.process_exit import DECLINED
from shoal.transports.database_address import is_address

if TYPE_CHECKING:
    from shoal.runs.worker_run import JoinedWorker

EPILOG = """\
Workers join the relay as they would join the coordinator; the relay prints the command. Each of its rounds is one contribution to the
coordinator above. A stopped or killed relay continues with --resume and the same --name and --run-dir: no confirmed contribution is lost
or counted twice.
"""
_OWN_SETTINGS = ("strategy", "data.source", "data.loader", "transport", "logging", "output_dir", "log_level", "log_format")
"""Settings that a relay may change."""
_NOT_FROM_ABOVE = {
    "transport.port": "0",
    "evaluation.batches": "0",
    "checkpoint.resume_from": "null",
}
"""Settings of the coordinator above that do not apply to a relay, and the relay's values."""


def run(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    load_plugins(arguments)
    keep_hub_token_back()
    if arguments.address and (is_address(arguments.address) or Path(arguments.address).is_file()):
        raise ShoalError("a relay joins a coordinator, not a database: take the address that `shoal coordinate` printed (tcp://…)")
    if arguments.expect < 1:
        raise ShoalError("--expect: a relay has at least one worker")
    from shoal.runs.connections import JoinOptions
    from shoal.runs.worker_run import JoinedWorker

    permissions = Permissions.of(arguments.data)
    options = JoinOptions(
        *typed(arguments),
        name=chosen_name(arguments.name),
        patience_s=arguments.patience,
        permissions=permissions,
        workers=arguments.expect,
    )
    joined = JoinedWorker(options, print_log)
    try:
        check_trust(joined, arguments.factory)
        if not agreed(joined.asked(), arguments.ask):
            joined.leave()
            return DECLINED
        if joined.name != arguments.name:
            raise ShoalError(f"the name {arguments.name} belongs to another worker of this run: choose another --name")
        return _relay(joined, arguments, argv)
    except BaseException as problem:
        joined.refuse(problem)
        raise


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("relay", "Combine the updates of local workers and send them to a coordinator as one.", EPILOG)
    parser.add_argument("address", metavar="ADDRESS", help="the coordinator above: tcp://HOST:PORT, as `shoal coordinate` printed it")
    add_token_options(parser, "its")
    parser.add_argument("--key", help="its public key; not needed for a coordinator on this machine")
    parser.add_argument("--name", required=True, help="this relay's name")
    parser.add_argument("--expect", type=int, required=True, metavar="N", help="number of workers that share the relay's data")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="start N of them on this machine (default: 0)")
    parser.add_argument("--run-dir", metavar="DIR", help="the relay's folder (default: a new one in output_dir)")
    parser.add_argument("--resume", action="store_true", help="resume the relay in --run-dir")
    add_announce_option(parser)
    add_listening_options(parser)
    parser.add_argument("--set", "--override", dest="settings", action="append", default=[], metavar="PATH=VALUE")
    add_plugin_option(parser)
    add_data_option(parser)
    add_ask_option(parser)
    parser.add_argument("--patience", type=float, default=600.0, metavar="SECONDS", help="how long to wait for the coordinator above")
    parser.add_argument("--factory", action="append", default=[], metavar="MODULE:FUNCTION", help="allow the run to call this function")
    return parser


def _relay(joined: JoinedWorker, arguments: argparse.Namespace, argv: list[str]) -> int:
    from shoal.cli.run_command import carry_out, coordinator_options
    from shoal.launch.start_mode import plan_start
    from shoal.runs.welcome import settings_of

    given = {"cluster.num_workers": str(arguments.expect)} | _NOT_FROM_ABOVE
    own = [*(Override(path, value, "shoal relay") for path, value in given.items()), *_settings(arguments.settings)]
    asked = coordinator_options(arguments, announce=arguments.announce, above=joined)
    plan = plan_start(lambda more: settings_of(joined.welcome.header, [*own, *more], joined.options.permissions), asked)
    if plan.run.transport.kind == "postgres":
        raise ShoalError("transport.kind postgres: a relay has no database of its own; add --set transport.kind=zmq")
    return carry_out(plan, argv)


def _settings(texts: list[str]) -> list[Override]:
    given = [parse_override(text) for text in texts]
    for override in given:
        if not override.path.startswith(_OWN_SETTINGS):
            raise ShoalError(f"`{override.path}` is the run's to set, not a relay's; a relay may set {', '.join(_OWN_SETTINGS)}")
    return given
