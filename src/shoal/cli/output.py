"""Output of commands that train, and their reaction to signals."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from shoal.config.environment import join_token
from shoal.config.plugins import needed_by
from shoal.files import make_private
from shoal.reporters.text_status import counted
from shoal.runs.invitation import Invitation, reached_address, write_join_command
from shoal.transports import addresses
from shoal.transports.database_address import is_address
from shoal.transports.database_address import parse as parse_database
from shoal.transports.keys import key_text

if TYPE_CHECKING:
    from shoal.config import Run
    from shoal.launch.start import RunOutcome, StartedRun
    from shoal.runs.coordinator_run import CoordinatorLoop
    from shoal.runs.training.loop import TrainingLoop
    from shoal.transports.addresses import Address


def download(what: str, done: int, total: int | None) -> None:
    """Print the progress of a download, or of encoding passages, on one line."""
    if what.startswith("passages"):
        counted = f"encoding {what}: {done:,} of {total:,}"
    else:
        counted = f"downloading {what}: " + (f"{done >> 20} of {total >> 20} MiB" if total else f"{done >> 20} MiB")
    if total is None and not done:
        sys.stderr.write(f"downloading {what} …\n")  # a line of its own, after which an error can stand
        return
    sys.stderr.write(counted + ("\n" if total and done >= total else "\r"))


def show_outcome(loop: TrainingLoop | CoordinatorLoop, outcome: RunOutcome, command: str) -> int:
    """Print how a run ended and what to type next; returns the exit code. `command` is the one that resumes it."""
    from shoal.reporters.progress import figures

    summary = outcome.summary
    last = summary["metrics"]["eval"] or summary["metrics"]["train"]
    took = f"after {summary['steps']} {loop.recorder.step_name}s, {summary['samples']} samples, {summary['wall_s']:.1f} s"
    hint = "" if summary["loss_fell"] else " (the loss has hardly moved: see the warning above)"
    print(f"{summary['status']} {took}" + (f": {figures(last)}" if figures(last) else "") + hint)
    if summary.get("contributions"):
        print(f"contributions: {contributions(summary['contributions'])}")
    print(f"run: {loop.directory.path}")
    if outcome.model:
        print(f"model: {outcome.model}")
    if summary["status"] == "interrupted" and command:
        print(f"go on: shoal {command} --run-dir {loop.directory.path} --resume")
    if summary.get("contributions"):
        print(f"audit: shoal audit {loop.directory.path}")
    # 0 if the owner stopped the run, so that a supervisor does not start it again.
    return 130 if summary["status"] == "interrupted" and summary.get("ended_by") != "owner" else 0


def contributions(counts: Mapping[str, int]) -> str:
    """The outcomes of contributions, as text."""
    return counted({"accepted": counts.get("accepted", 0), **counts})


def quoted(address: str) -> str:
    """An address in quotes if it has characters that a shell would interpret."""
    return f"'{address}'" if set(address) & set("?&*[]~$ ") else address


def print_secret(text: str) -> None:
    """Print a text with a secret. Where standard output is a file that other users can read, only its owner can from now on."""
    with suppress(OSError, ValueError):  # it is closed, or no file
        if stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode):
            make_private(sys.stdout.fileno())
    print(text, flush=True)


def _secrets_of(invitation: Invitation) -> str:
    """The options of `shoal join` with the token and the coordinator's public key."""
    return f"--token {invitation.token}" + (f" --key {key_text(invitation.key)}" if invitation.key else "")


def _print_command(who: str, command: str) -> None:
    """Print the command with which workers join. A token that was given by the environment is known there already, and is left out: a
    cluster scheduler shows this output to others."""
    token = join_token()
    if token is not None and f" --token {token}" in command:
        command, who = command.replace(f" --token {token}", ""), f"{who} (with the token in SHOAL_TOKEN)"
    print_secret(f"{who} with:\n  {command}")


def _options_for_code(run: Run) -> str:
    """The options of `shoal join` for the functions and plugins that a run needs."""
    from shoal.runs.live_objects import factory_names

    return "".join([*(f" --factory {name}" for name in factory_names(run)), *(f" --plugin {name}" for name in needed_by(run))])


_EVERYWHERE = ("0.0.0.0", "::", "*")


def _shown_address(started: StartedRun) -> str:
    """The address in the command for workers."""
    assert started.invitation is not None
    return started.public_address or started.invitation.address


def _who_joins(started: StartedRun) -> str:
    """Who can join; a loopback address is for this machine only."""
    here = not started.public_address and all(map(addresses.is_loopback, started.hosts))
    return "workers on this machine join" if here else "workers join"


def _show_other_addresses(shown: Address) -> None:
    """Print further addresses of this machine, since workers may reach only some of them."""
    others = [
        str(shown._replace(host=host))
        for host in addresses.local_addresses()
        if host != shown.host and (":" in host) == (":" in shown.host)
    ]
    if addresses.is_loopback(shown.host):
        print("this machine has no address in a network: once it has one, workers on other machines join with that address")
    elif others:
        print(f"this machine has other addresses, too; for workers that do not reach the one above: {', '.join(others)}")


def _show_class(started: StartedRun, functions: str) -> None:
    """Print how students join through a database."""
    access = parse_database(_shown_address(started))
    if started.role:
        print("`shoal db grant student NAME FILE` creates a role and prints the command:")
        access = access._replace(user=started.role, password=None)
    line = f"shoal join {quoted(access._replace(password=None).address)}{functions}"
    write_join_command(started.loop.directory.path, line, access.password or "")
    print(f"{_who_joins(started)} with:\n  {line}", flush=True)
    if access.password:
        how = "which is asked for (or in SHOAL_TOKEN, or in a file: --token-file)"
        print_secret(f"and with the class's token, {how}:\n  {access.password}")


def show_invitation(started: StartedRun, hosts: Sequence[str] = ()) -> None:
    """Print the command with which workers join, and that of each host with an own address for the server.

    `hosts`: addresses on which the coordinator listens by option; none: all, or as the settings say.
    """
    invitation, cluster = started.invitation, started.loop.run.cluster
    assert invitation is not None
    run = started.loop.run
    functions = _options_for_code(run)
    if is_address(invitation.address):
        _show_class(started, functions)
        return
    rest = _secrets_of(invitation) + functions
    address = addresses.parse(_shown_address(started))
    write_join_command(started.loop.directory.path, f"shoal join {address} {rest}")
    _print_command(_who_joins(started), f"shoal join {address} {rest}")
    if not (hosts or started.public_address) and getattr(run.transport, "host", None) in (None, *_EVERYWHERE):
        _show_other_addresses(address)
    for name in cluster.workers:
        host = cluster.hosts.get(name)
        if host is not None and (host.server_address or host.server_port):
            own = address._replace(host=host.server_address or address.host, port=host.server_port or address.port)
            _print_command(f"{name} joins", f"shoal join {own} --name {name} {rest}")
    sys.stdout.flush()


def show_when_open(started: StartedRun) -> None:
    """Let a coordinator say when it answers, and how many workers it waits for."""
    from shoal.runs.coordinator_run import CoordinatorLoop

    loop, address = started.loop, started.invitation.address if started.invitation is not None else ""
    if isinstance(loop, CoordinatorLoop):
        where, needed = parse_database(address).shown if is_address(address) else address, loop.coordinator.plan.needed
        waits = "a worker" if needed <= 1 else f"{needed} workers"
        loop.on_open = lambda: loop.message(f"the coordinator answers at {where}, and waits for {waits}")


def show_places(invitation: Invitation, run: Run, expected: int) -> None:
    """Print the command with which machines join a pipeline."""
    host = addresses.parse(invitation.address).host
    where = "processes of this machine" if addresses.is_loopback(host) else "machines"
    rest = _secrets_of(invitation) + _options_for_code(run)
    for name in run.cluster.workers:
        _print_command(f"{name} joins", f"shoal join {invitation.address} --name {name} {rest}")
    if not run.cluster.workers:
        _print_command(f"{where} join", f"shoal join {invitation.address} {rest}")
    own = "a stage, too" if run.placed else "the first stage"
    print(f"this machine has {own}; it begins when {expected} more machines have joined", flush=True)


def show_nodes(run: Run, invitation: Invitation, count: int, public: str | None) -> None:
    """Print the command with which machines join to hold layers of a served model. `public`: HOST[:PORT] by which they reach this one."""
    rest = f"--node {_secrets_of(invitation)}"
    address = invitation.address if public is None else reached_address(invitation.address, public)
    _print_command(f"the layers are spread over {count + 1} machines, this one counted. The others join", f"shoal join {address} {rest}")
    for name in run.cluster.workers:
        _print_command(f"{name} joins", f"shoal join {address} --name {name} {rest}")


@contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM inside the block."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def stopping_on_signals(loop: TrainingLoop | CoordinatorLoop) -> Iterator[None]:
    """Stop after the step on SIGINT or SIGTERM, and at once on a second signal."""
    own = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:  # a process that loads data: it ends with this one
            return
        if loop.interrupt():
            os._exit(130)
        # From another thread: this one may be inside a write to the same stream, which Python does not allow to nest
        message = "stopping after this step and saving; once more to stop at once"
        threading.Thread(target=loop.message, args=(message,), name="stopping", daemon=True).start()

    with handling_signals(stop):
        yield
