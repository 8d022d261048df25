"""`shoal join` in the process that computes: joins, works, and leaves when it is asked to."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import secrets
import sys
import tempfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from shoal.cli.departure import Departure, first_line
from shoal.cli.engine_processes import ignore_signals
from shoal.cli.join_options import agreed, ask_whether, chosen_name, refuse_given, typed
from shoal.cli.main import print_log
from shoal.cli.output import download
from shoal.config import Run
from shoal.config.load import parse_override
from shoal.config.ranks import RankPlace
from shoal.config.received import Permissions
from shoal.errors import ShoalError, out_of_memory
from shoal.files import make_folder, read_file, write_file
from shoal.launch.engine_processes import EngineProcesses, LocalIsland, LocalRanks, place_in_engine
from shoal.launch.pipeline_rendezvous import STAGES, OwnSettings, PipelineMember
from shoal.launch.volunteer.limits import MemoryCheck, parse_memory, parse_upload
from shoal.process_exit import DECLINED
from shoal.protocol.worker_names import name_of
from shoal.runs.connections import JoinOptions
from shoal.runs.invitation import Invitation
from shoal.runs.join_summary import summary_of
from shoal.runs.live_objects import refuse_unknown_functions
from shoal.runs.worker_run import JoinedWorker, follow_first_process, report_gone
from shoal.transports.addresses import bracketed
from shoal.transports.addresses import parse as parse_tcp
from shoal.transports.connect import connect
from shoal.transports.database_address import is_address
from shoal.transports.database_address import parse as parse_address
from shoal.transports.discovery import require_long_token
from shoal.transports.interface import ConnectOptions
from shoal.transports.netem import NetemProxy, profile
from shoal.transports.upload_limit import UploadLimit
from shoal.worker.session import SessionEndedError


def join_and_work(arguments: argparse.Namespace, argv: list[str]) -> int:
    """Join and work, alone or as the first of several processes; start the others if needed."""
    invitation, processes = _invitation(arguments)
    departure = Departure()
    departure.listen(arguments.stdin)
    with ExitStack() as until_the_end:
        if arguments.memory:
            until_the_end.callback(_check_memory(arguments.memory, departure).close)
        if processes is not None:
            return _run_processes(processes, arguments, argv, invitation, departure)
        options = _options_of(arguments, _reached(arguments, invitation, until_the_end))
        if arguments.upload:
            options = options._replace(route=_limited_upload(arguments.upload, options, until_the_end))
        try:
            return _work(arguments, argv, invitation, options, departure)
        except (RuntimeError, MemoryError) as error:
            if arguments.memory and out_of_memory(error):
                raise ShoalError(f"this run needs more memory than --memory {arguments.memory} allows: {error}") from None
            raise


def _work(arguments: argparse.Namespace, argv: list[str], invitation: Invitation, options: JoinOptions, departure: Departure) -> int:
    try:
        joined = JoinedWorker(options, print_log)
    except SessionEndedError as refusal:
        if refusal.reason != STAGES:
            raise
        return _join_pipeline(arguments, invitation._replace(address=options.address), departure)
    if not _takes_part(joined, arguments, departure):
        return DECLINED
    here = place_in_engine(joined.run)
    if here is None and joined.run.engine.several_processes:
        return _start_processes(joined, arguments, argv, invitation, departure)
    departure.joined = joined
    departure.stops.append(joined.stop)
    print_log(f"joined as {joined.name}")
    joined.prepare(download, here)
    joined.work()
    print(f"{joined.name}: {joined.summary()}", flush=True)
    joined.close_ranks()
    return departure.exit_code(arguments.guest)


def _reached(arguments: argparse.Namespace, invitation: Invitation, until_the_end: ExitStack) -> Invitation:
    """The invitation with the address of a simulated network, where one was chosen."""
    if not arguments.netem:
        return invitation
    weather, address = _through_weather(invitation.address, arguments.netem, arguments.name or "")
    until_the_end.callback(weather.close)
    return invitation._replace(address=address)


# --- limits ------------------------------------------------------------------------------------------------


def _check_memory(limit: str, departure: Departure) -> MemoryCheck:
    def exceeded(used: int) -> None:
        departure.fail(f"this run needs more memory than --memory {limit} allows: {used / 2**30:.2f} GiB are in use")

    return MemoryCheck(parse_memory(limit), exceeded)


def _limited_upload(rate: str, options: JoinOptions, until_the_end: ExitStack) -> Callable[[str], str]:
    """Returns the addresses to connect to, so that what is sent passes through a bucket. Raises what the real address would raise."""
    if not is_address(options.address):  # the forwarder is on this machine, to which a client may send a token unencrypted
        connect(ConnectOptions(options.address, options.token, options.key, 1 << 20, insecure=True)).close()
    limit = UploadLimit(parse_upload(rate))
    until_the_end.callback(limit.close)
    return limit.route


# --- consent -----------------------------------------------------------------------------------------------


def _takes_part(joined: JoinedWorker, arguments: argparse.Namespace, departure: Departure) -> bool:
    """Check and show what the run asks of this machine; leave if the user does not agree. Raises ShoalError where it is not allowed."""
    check_trust(joined, arguments.factory)
    if arguments.guest:
        takes_part = _agreed_before(joined) or _agrees_now(joined, arguments.ask, departure)
    else:
        takes_part = arguments.stdin or agreed(joined.asked(), arguments.ask)
    if not takes_part:
        joined.leave()
    return takes_part


def _agreed_before(joined: JoinedWorker) -> bool:
    """Whether this run asked the same when the worker was started last."""
    return read_file(_consent_file(joined)) == _digest_of(joined)


def _agrees_now(joined: JoinedWorker, ask: bool, departure: Departure) -> bool:
    sys.stderr.write(f"this run asks of this machine:\n{joined.asked()}\n")
    if ask and not ask_whether(lambda: departure.answers.get()):
        return False
    path = _consent_file(joined)
    make_folder(path.parent, private=True)
    write_file(path, _digest_of(joined).decode(), private=True)
    return True


def _consent_file(joined: JoinedWorker) -> Path:
    folder = joined.options.checkpoints or joined.options.state
    assert folder is not None, "a guest has a folder"
    return folder / "agreed"


def _digest_of(joined: JoinedWorker) -> bytes:
    """What the run asks, without the memory that is free at this moment."""
    return hashlib.sha256(str(joined.asked()._replace(memory="")).encode()).hexdigest().encode()


def check_trust(joined: JoinedWorker, trusted: list[str]) -> None:
    """Refuse a run that names functions which --factory does not allow."""
    try:
        refuse_unknown_functions(joined.run, trusted)
    except ShoalError as problem:
        joined.refuse(problem)
        raise


# --- several processes, stages and layers ------------------------------------------------------------------


def _start_processes(
    joined: JoinedWorker, arguments: argparse.Namespace, argv: list[str], invitation: Invitation, departure: Departure
) -> int:
    """Leave, and start the processes of the engine, which join as the same worker."""
    joined.leave()
    arguments.name, processes = joined.name, EngineProcesses.of(joined.run, "join", print_log)
    assert processes is not None
    return _run_processes(processes, arguments, argv, invitation._replace(identity=joined.protocol.identity.secret), departure)


def _run_processes(
    processes: EngineProcesses, arguments: argparse.Namespace, argv: list[str], invitation: Invitation, departure: Departure
) -> int:
    """Start the processes of a worker and restart them when they fail; their state is kept meanwhile, in --state or a temporary folder."""
    options = _options_of(arguments, invitation)
    with tempfile.TemporaryDirectory(prefix="shoal-island-") as folder:
        kept = [] if arguments.state else ["--state", str(options.checkpoints or folder)]
        command, secret = ["join", *argv, *kept, "--stdin", "--name", arguments.name], json.dumps(invitation._asdict())
        started = LocalIsland(lambda: LocalRanks(processes, command, secret), print_log, lambda: report_gone(options))
        departure.stops.append(started.stop)
        code = started.run()
        return departure.exit_code() or code


def run_follower(arguments: argparse.Namespace, here: RankPlace) -> int:
    """Work as one of several processes; the first one has joined and decides when to stop."""
    ignore_signals()
    follow_first_process(here, _options_of(arguments, Invitation("", "", None)))
    return 0


def _join_pipeline(arguments: argparse.Namespace, invitation: Invitation, departure: Departure) -> int:
    """Train a pipeline stage."""
    refuse_given(arguments, ("receipts", "state", "slowdown"), "a stage of a pipeline sends no contributions of its own")
    refuse_given(arguments, ("guest", "memory", "upload"), "the other stages of a pipeline wait for this one, so it cannot give way")
    overrides, permissions = [parse_override(text) for text in arguments.settings], Permissions.of(arguments.data)
    own = OwnSettings(overrides, permissions, arguments.factory, lambda run: _stage_agreed(run, arguments.ask))
    machine = PipelineMember(invitation, arguments.name or name_of(platform.node()) or "machine", own, arguments.patience)
    departure.stops.append(lambda reason: machine.stop())
    return machine.work(print_log)


def _stage_agreed(run: Run, ask: bool) -> bool:
    return agreed(summary_of(run, None, None, ["nothing that stays"]), ask)


def hold_layers(arguments: argparse.Namespace) -> int:
    """Hold layers for a server until it ends or this process is stopped."""
    from shoal.serve.nodes.messages import Endpoint  # imported here: no other worker needs the server's part
    from shoal.serve.nodes.node import NodeProcess

    invitation, _ = _invitation(arguments)
    node = NodeProcess(
        Endpoint(invitation.address, invitation.token, invitation.key),
        arguments.name,
        slowdown=arguments.slowdown,
        patience_s=arguments.patience,
        tell=print_log,
    )
    departure = Departure()
    departure.stops.append(lambda reason: node.stop())
    departure.listen(arguments.stdin)
    node.work()
    return 0


# --- options -----------------------------------------------------------------------------------------------


def _options_of(arguments: argparse.Namespace, invitation: Invitation) -> JoinOptions:
    options = JoinOptions(
        *invitation,
        name=arguments.name,
        overrides=[parse_override(text) for text in arguments.settings],
        permissions=Permissions.of(arguments.data),
        receipts=Path(arguments.receipts) if arguments.receipts else None,
        slowdown=arguments.slowdown,
        patience_s=arguments.patience,
        state=Path(arguments.state) if arguments.state else None,
        memory_bytes=parse_memory(arguments.memory) if arguments.memory else None,
    )
    keeps = arguments.guest and options.state is None
    return options._replace(checkpoints=options.guest_folder) if keeps else options


def _invitation(arguments: argparse.Namespace) -> tuple[Invitation, EngineProcesses | None]:
    """The coordinator's address and token; and the processes to start, if the parent process has sent them."""
    if not arguments.stdin:
        invitation = typed(arguments)
        if arguments.key_was_announced:
            require_long_token(invitation.token or parse_address(invitation.address).password or "")
        arguments.name = chosen_name(arguments.name)
        return invitation, None
    given = json.loads(first_line() or "{}")
    if "address" not in given:
        raise ShoalError("--stdin: no invitation came")
    processes = given.get("crew")
    return Invitation(given["address"], given["token"], given["key"], given.get("identity")), EngineProcesses(
        *processes
    ) if processes else None


def _through_weather(address: str, name: str, worker: str) -> tuple[NetemProxy, str]:
    """A proxy that simulates a network, and its address in place of the coordinator's. Its losses are seeded by the worker's name, so that
    two workers do not lose the same packets."""
    seed = zlib.crc32(worker.encode()) if worker else secrets.randbits(32)
    if not is_address(address):
        weather = NetemProxy(address, profile(name), seed)
        return weather, weather.address
    access = parse_address(address)
    weather = NetemProxy(f"tcp://{bracketed(access.host)}:{access.port}", profile(name), seed)
    reached = parse_tcp(weather.address)
    return weather, access._replace(host=reached.host, port=reached.port).address
