"""`shoal join --when`: the watcher that starts and pauses a worker; `--service`: a file that lets the system start it. No torch here."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from shoal.cli.join_options import chosen_name, typed_parts
from shoal.cli.main import print_log
from shoal.config.environment import state_folder
from shoal.files import make_folder, write_file
from shoal.launch.volunteer.conditions import Conditions, Sensors, parse
from shoal.launch.volunteer.service import ServiceCommand, service_here
from shoal.launch.volunteer.watcher import Watcher, shoal_worker
from shoal.protocol.worker_names import name_of
from shoal.transports.database_address import is_address
from shoal.transports.database_address import parse as parse_address
from shoal.transports.discovery import require_long_token
from shoal.transports.keys import key_text

_ONE_VALUE = ("receipts", "state", "netem", "cores", "memory", "upload", "priority")
_NUMBERS = {"slowdown": 1.0, "patience": 600.0}
_REPEATED = {"settings": "set", "plugins": "plugin", "data": "data", "factory": "factory"}


def watch(arguments: argparse.Namespace) -> int:
    """Run a worker while the conditions hold, until its run is over or the user ends this."""
    conditions = Conditions(parse(arguments.when), Sensors.here())
    conditions.check()
    address, token, key = typed_parts(arguments)
    if arguments.key_was_announced:
        require_long_token(token or parse_address(address).password or "")
    command = ["join", *worker_options(arguments), "--name", _name_of(arguments), "--guest", "--stdin"]
    invitation = json.dumps({"address": address, "token": token, "key": key})
    watcher = Watcher(conditions, lambda: shoal_worker(command, invitation), print_log)
    _end_on_signals(watcher)
    if arguments.ask:
        threading.Thread(target=_pass_answers_on, args=(watcher,), name="answers", daemon=True).start()
    print_log(f"the worker runs while this holds: {' and '.join(arguments.when)}. Ctrl-C ends it")
    return watcher.run()


def worker_options(arguments: argparse.Namespace) -> list[str]:
    """The options of a worker, as they were given, without those of its watcher and without secrets."""
    given = vars(arguments)
    given["priority"] = given["priority"] or ("lowest" if given["when"] else None)
    found = [word for name in _ONE_VALUE if given[name] is not None for word in (f"--{name}", str(given[name]))]
    found += [word for name, usual in _NUMBERS.items() if given[name] != usual for word in (f"--{name}", str(given[name]))]
    found += [word for name, option in _REPEATED.items() for value in given[name] for word in (f"--{option}", value)]
    return [*found, "--ask"] if arguments.ask else found


def _name_of(arguments: argparse.Namespace) -> str:
    """The worker's name, under which it comes back after every pause."""
    return chosen_name(arguments.name) or name_of(platform.node()) or "volunteer"


def _end_on_signals(watcher: Watcher) -> None:
    """Let the worker leave, and end; at once on a second signal: the worker leaves when it notices."""
    asked = [0]

    def stop(number: int, frame: FrameType | None) -> None:
        asked[0] += 1
        if asked[0] > 1:
            os._exit(130)
        watcher.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _pass_answers_on(watcher: Watcher) -> None:
    """Pass on what the user types. Without a terminal there is no answer, which is a no."""
    for line in sys.stdin:
        watcher.answer(line.strip())
    watcher.answer(None)


def write_service(arguments: argparse.Namespace) -> int:
    """Write the service of this system, and the token into a file that only its user can read."""
    address, token, key = typed_parts(arguments)
    name = _name_of(arguments)
    options = [*worker_options(arguments), "--name", name]
    if is_address(address):
        access = parse_address(address)
        address, token = access._replace(password=None).address, access.password or ""
    options += [word for text in arguments.when for word in ("--when", text)]
    if key:
        options += ["--key", key_text(key)]
    secret = state_folder() / f"service-{name}.token"
    make_folder(secret.parent, private=True)
    write_file(secret, token, private=True)
    command = [sys.executable, "-m", "shoal", "join", address, *options, "--token-file", str(secret)]
    service = service_here(ServiceCommand(name, command, Path.cwd()))
    make_folder(service.path.parent)
    service.write()
    print(f"wrote {service.path}; the token is in {secret}")
    print(f"start it, now and whenever you log in:\n  {service.enable}\nwhat it prints:\n  {service.log}")
    print(f"end and remove it, then delete {secret}:\n  {service.remove}")
    return 0
