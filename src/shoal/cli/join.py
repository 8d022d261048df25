"""`shoal join`: runs a worker for a coordinator."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import platform
import secrets
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from shoal.cli.discovery import find_server
from shoal.cli.ends_with_parent import when_parent_ends
from shoal.cli.engine_processes import as_rank, ignore_signals
from shoal.cli.main import parser_of
from shoal.cli.options import add_plugin_option, load_plugins, read_token_file
from shoal.cli.output import download, print_log
from shoal.config.environment import database_password, join_token, keep_hub_token_back
from shoal.config.load import ConfigFile, parse_override, resolve
from shoal.config.ranks import rank_place
from shoal.config.received import Permissions
from shoal.config.schema.cluster import Postgres
from shoal.errors import ShoalError, printable
from shoal.process_exit import DECLINED
from shoal.protocol.worker_names import NAME_RULE, name_of
from shoal.runs.invitation import Invitation
from shoal.transports.addresses import bracketed
from shoal.transports.addresses import parse as parse_tcp
from shoal.transports.database_address import CLASS_ROLE, access_of, is_address
from shoal.transports.database_address import parse as parse_address
from shoal.transports.discovery import require_long_token

if TYPE_CHECKING:
    from shoal.config import Run
    from shoal.config.ranks import RankPlace
    from shoal.launch.engine_processes import EngineProcesses
    from shoal.runs.connections import JoinOptions
    from shoal.runs.worker_run import JoinedWorker
    from shoal.transports.netem import NetemProxy

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
    load_plugins(arguments)
    keep_hub_token_back()
    here = rank_place()
    if not arguments.address and not arguments.stdin and (here is None or not here.rank) and not find_server(arguments):
        return DECLINED
    if here is None:
        return _with_another_token(arguments, lambda: _hold_layers(arguments) if arguments.node else _join_and_work(arguments, argv))
    if arguments.node:
        return _hold_layers(arguments)
    work = (lambda: _run_follower(arguments, here)) if here.rank else (lambda: _join_and_work(arguments, argv))
    return as_rank(here, work, watch=here.rank > 0 and arguments.stdin)


def _parsed(argv: list[str]) -> argparse.Namespace:
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
    parser.add_argument("--stdin", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.address:
        arguments.address = arguments.address.strip("'\"")  # the Windows command prompt keeps the quotes of the command
    if arguments.name is not None and not arguments.stdin:
        chosen_name(arguments.name)
    if arguments.ask and arguments.stdin:
        raise ShoalError("--ask: a worker that another program starts cannot be asked; leave it out")
    if arguments.node:
        _refuse_given(arguments, ("ask", "set", "data", "receipts", "state", "netem", "factory"), "a node holds layers and trains nothing")
    return arguments


def _refuse_given(arguments: argparse.Namespace, options: Sequence[str], why: str) -> None:
    """Refuse options that have no effect here."""
    given = vars(arguments) | {"set": arguments.settings, "slowdown": arguments.slowdown != 1.0}
    for option in options:
        if given[option]:
            raise ShoalError(f"--{option}: {why}; leave it out")


def add_data_option(parser: argparse.ArgumentParser) -> None:
    what = "allow the run to read this file or folder; hub:NAME: to read NAME on the hub with your own token (repeatable)"
    parser.add_argument("--data", action="append", default=[], metavar="PATH", help=what)


def add_token_options(parser: argparse.ArgumentParser, whose: str) -> None:
    parser.add_argument("--token", help=f"{whose} join token; safer: SHOAL_TOKEN, --token-file, or typed when asked")
    parser.add_argument("--token-file", metavar="FILE", help="a file with the join token, readable by you only")
    parser.set_defaults(key_was_announced=False)


def add_ask_option(parser: argparse.ArgumentParser) -> None:
    what = f"wait for a `yes` after showing what the run asks of this machine; otherwise leave (exit code {DECLINED})"
    parser.add_argument("--ask", action="store_true", help=what)


def agreed(summary: object, ask: bool) -> bool:
    """Show what a run asks of this machine; with `ask`, whether the user says yes."""
    sys.stderr.write(f"this run asks of this machine:\n{summary}\n")
    if not ask:
        return True
    sys.stderr.write("take part? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    sys.stderr.write("left, as you did not agree\n")
    return False


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
    return _prompt_for("the token (nothing: give up)")


def _use_token(arguments: argparse.Namespace, token: str) -> None:
    """Take this token, in the place of the one in the options, the environment or the address."""
    arguments.token, arguments.token_file = token, None
    if is_address(arguments.address):
        arguments.address = parse_address(arguments.address)._replace(password=None).address


def _join_and_work(arguments: argparse.Namespace, argv: list[str]) -> int:
    """Join and work, alone or as the first of several processes; start the others if needed."""
    from shoal.launch.engine_processes import place_in_engine
    from shoal.launch.pipeline_rendezvous import STAGES
    from shoal.runs.worker_run import JoinedWorker
    from shoal.worker.session import SessionEndedError

    invitation, processes = _invitation(arguments)
    stops: list[Callable[[], None]] = []
    _leave_when_asked(arguments.stdin, stops)
    if processes is not None:
        return _run_processes(processes, arguments, argv, invitation, stops)
    weather, reached = None, invitation
    if arguments.netem:
        weather, address = _through_weather(invitation.address, arguments.netem, arguments.name or "")
        reached = invitation._replace(address=address)
    try:
        try:
            joined = JoinedWorker(_options_of(arguments, reached), print_log)
        except SessionEndedError as refusal:
            if refusal.reason != STAGES:
                raise
            return _join_pipeline(arguments, reached, stops)
        if not _takes_part(joined, arguments):
            return DECLINED
        here = place_in_engine(joined.run)
        if here is None and joined.run.engine.several_processes:
            return _start_processes(joined, arguments, argv, invitation, stops)
        stops.append(joined.stop)
        print_log(f"joined as {joined.name}")
        joined.prepare(download, here)
        joined.work()
        print(f"{joined.name}: {joined.summary()}", flush=True)
        joined.close_ranks()
    finally:
        if weather is not None:
            weather.close()
    return 0


def _start_processes(
    joined: JoinedWorker, arguments: argparse.Namespace, argv: list[str], invitation: Invitation, stops: list[Callable[[], None]]
) -> int:
    """Leave, and start the processes of the engine, which join as the same worker."""
    from shoal.launch.engine_processes import EngineProcesses

    joined.leave()
    arguments.name, processes = joined.name, EngineProcesses.of(joined.run, "join", print_log)
    assert processes is not None
    return _run_processes(processes, arguments, argv, invitation._replace(identity=joined.protocol.identity.secret), stops)


def _takes_part(joined: JoinedWorker, arguments: argparse.Namespace) -> bool:
    """Check and show what the run asks of this machine; leave if the user does not agree. Raises ShoalError where it is not allowed."""
    check_trust(joined, arguments.factory)
    if arguments.stdin or agreed(joined.asked(), arguments.ask):
        return True
    joined.leave()
    return False


def _join_pipeline(arguments: argparse.Namespace, invitation: Invitation, stops: list[Callable[[], None]]) -> int:
    """Train a pipeline stage."""
    _refuse_given(arguments, ("receipts", "state", "slowdown"), "a stage of a pipeline sends no contributions of its own")
    from shoal.launch.pipeline_rendezvous import OwnSettings, PipelineMember

    overrides, permissions = [parse_override(text) for text in arguments.settings], Permissions.of(arguments.data)
    own = OwnSettings(overrides, permissions, arguments.factory, lambda run: _stage_agreed(run, arguments.ask))
    machine = PipelineMember(invitation, arguments.name or name_of(platform.node()) or "machine", own, arguments.patience)
    stops.append(machine.stop)
    return machine.work(print_log)


def _stage_agreed(run: Run, ask: bool) -> bool:
    from shoal.runs.join_summary import summary_of

    return agreed(summary_of(run, None, None, ["nothing that stays"]), ask)


def _hold_layers(arguments: argparse.Namespace) -> int:
    """Hold layers for a server until it ends or this process is stopped."""
    from shoal.serve.nodes.messages import Endpoint
    from shoal.serve.nodes.node import NodeProcess

    invitation, _ = _invitation(arguments)
    node = NodeProcess(
        Endpoint(invitation.address, invitation.token, invitation.key),
        arguments.name,
        slowdown=arguments.slowdown,
        patience_s=arguments.patience,
        tell=print_log,
    )
    _leave_when_asked(arguments.stdin, [node.stop])
    node.work()
    return 0


def check_trust(joined: JoinedWorker, trusted: list[str]) -> None:
    """Refuse a run that names functions which --factory does not allow."""
    from shoal.runs.live_objects import refuse_unknown_functions

    try:
        refuse_unknown_functions(joined.run, trusted)
    except ShoalError as problem:
        joined.refuse(problem)
        raise


def _run_processes(
    processes: EngineProcesses, arguments: argparse.Namespace, argv: list[str], invitation: Invitation, stops: list[Callable[[], None]]
) -> int:
    """Start the processes of a worker and restart them when they fail; their state is kept meanwhile, in --state or a temporary folder."""
    from shoal.launch.engine_processes import LocalIsland, LocalRanks
    from shoal.runs.worker_run import report_gone

    with tempfile.TemporaryDirectory(prefix="shoal-island-") as folder:
        kept = [] if arguments.state else ["--state", folder]
        command, secret = ["join", *argv, *kept, "--stdin", "--name", arguments.name], json.dumps(invitation._asdict())
        started = LocalIsland(
            lambda: LocalRanks(processes, command, secret), print_log, lambda: report_gone(_options_of(arguments, invitation))
        )
        stops.append(started.stop)
        return started.run()


def _run_follower(arguments: argparse.Namespace, here: RankPlace) -> int:
    """Work as one of several processes; the first one has joined and decides when to stop."""
    from shoal.runs.worker_run import follow_first_process

    ignore_signals()
    follow_first_process(here, _options_of(arguments, Invitation("", "", None)))
    return 0


def _options_of(arguments: argparse.Namespace, invitation: Invitation) -> JoinOptions:
    from shoal.runs.connections import JoinOptions

    return JoinOptions(
        *invitation,
        name=arguments.name,
        overrides=[parse_override(text) for text in arguments.settings],
        permissions=Permissions.of(arguments.data),
        receipts=Path(arguments.receipts) if arguments.receipts else None,
        slowdown=arguments.slowdown,
        patience_s=arguments.patience,
        state=Path(arguments.state) if arguments.state else None,
    )


def _invitation(arguments: argparse.Namespace) -> tuple[Invitation, EngineProcesses | None]:
    """The coordinator's address and token; and the processes to start, if the parent process has sent them."""
    if not arguments.stdin:
        invitation = typed(arguments)
        if arguments.key_was_announced:
            require_long_token(invitation.token or parse_address(invitation.address).password or "")
        arguments.name = chosen_name(arguments.name)
        return invitation, None
    given = json.loads(sys.stdin.readline() or "{}")
    if "address" not in given:
        raise ShoalError("--stdin: no invitation came")
    from shoal.launch.engine_processes import EngineProcesses

    processes = given.get("crew")
    return Invitation(given["address"], given["token"], given["key"], given.get("identity")), EngineProcesses(
        *processes
    ) if processes else None


def typed(arguments: argparse.Namespace) -> Invitation:
    """The coordinator's address and token from the options."""
    if arguments.address and is_address(arguments.address):
        access = parse_address(arguments.address)
        password = access.password or _token(arguments) or (None if arguments.key_was_announced else database_password())
        password = password or _prompt_for(_secret_of(access.user))
        return Invitation(access._replace(password=password).address, "", None)
    if arguments.address and Path(arguments.address).is_file():
        return Invitation(_configured(arguments.address), "", None)
    token = _token(arguments) or (_prompt_for("the join token") if arguments.address else None)
    if not arguments.address:
        raise ShoalError("joining needs an address and a token: `shoal coordinate` prints the whole command")
    if not token:
        raise ShoalError("the join token is missing: add --token TOKEN, --token-file FILE or SHOAL_TOKEN; `shoal coordinate` prints it")
    from shoal.transports.keys import key_from_text

    return Invitation(arguments.address, token, key_from_text(arguments.key) if arguments.key else None)


def chosen_name(given: str | None) -> str | None:
    """The worker's name: the given one, or one typed at the terminal. None: the coordinator gives it one. Raises ShoalError."""
    if given is not None:
        if not name_of(given):
            raise ShoalError(f"--name: `{printable(given)}` cannot be a worker's name: {NAME_RULE}")
        return name_of(given)
    if rank_place() is not None or not sys.stdin.isatty():
        return None
    own = name_of(platform.node())
    while True:
        sys.stderr.write("this computer's name in the run" + (f" [{own}]: " if own else ": "))
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line.strip():
            return own or None
        if name := name_of(line):
            return name
        sys.stderr.write(f"that cannot be its name: {NAME_RULE}\n")


def _token(arguments: argparse.Namespace) -> str | None:
    """The token from a file, the command line (which other users of this machine can see) or the environment."""
    return read_token_file(arguments.token_file) if arguments.token_file else arguments.token or join_token()


def _secret_of(role: str) -> str:
    return "the class's token" if role == CLASS_ROLE else f"the token or password of `{role}`"


def _prompt_for(what: str) -> str | None:
    """A secret typed at the terminal; None without a terminal."""
    if not sys.stdin.isatty():
        return None
    return getpass.getpass(f"{what}: ", stream=sys.stderr).strip() or None


def _configured(file: str) -> str:
    """The database that a configuration names."""
    (settings,) = resolve([ConfigFile(file)], []).values("transport")
    if not isinstance(settings, Postgres) or settings.host == "embedded":
        raise ShoalError(f"{file} names no database to join through: `shoal coordinate` prints the command for its workers")
    return access_of(settings).address


def _through_weather(address: str, name: str, worker: str) -> tuple[NetemProxy, str]:
    """A proxy that simulates a network, and its address in place of the coordinator's. Its losses are seeded by the worker's name, so that
    two workers do not lose the same packets."""
    from shoal.transports.netem import NetemProxy, profile

    seed = zlib.crc32(worker.encode()) if worker else secrets.randbits(32)
    if not is_address(address):
        weather = NetemProxy(address, profile(name), seed)
        return weather, weather.address
    access = parse_address(address)
    weather = NetemProxy(f"tcp://{bracketed(access.host)}:{access.port}", profile(name), seed)
    reached = parse_tcp(weather.address)
    return weather, access._replace(host=reached.host, port=reached.port).address


def _leave_when_asked(with_parent: bool, stops: list[Callable[[], None]]) -> None:
    """Call `stops` on a signal, and exit at once on a second one; `with_parent`: also when the process that started this one ends."""
    asked = [0]

    def stop(number: int, frame: FrameType | None) -> None:
        asked[0] += 1
        if asked[0] > 1 or not stops:
            os._exit(130)
        # From another thread: this one may be inside a write to the same stream, which Python does not allow to nest
        threading.Thread(
            target=print_log, args=("leaving after this step; Ctrl-C once more leaves at once",), name="leaving", daemon=True
        ).start()
        for stop_work in stops:
            stop_work()

    def leave() -> None:
        for stop_work in stops:
            stop_work()
            time.sleep(5.0)
        os._exit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if with_parent:
        when_parent_ends(leave)
