"""`shoal join`: take part in a run that somebody coordinates."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from shoal.cli.train import download
from shoal.config.environment import database_password
from shoal.config.load import File, parse_override, resolve
from shoal.config.schema.cluster import Postgres
from shoal.errors import ShoalError
from shoal.transports.addresses import bracketed
from shoal.transports.addresses import parse as parse_tcp
from shoal.transports.databases import access_of, is_address
from shoal.transports.databases import parse as parse_address

if TYPE_CHECKING:
    from shoal.strategies.joining import Joined
    from shoal.strategies.leasing import Leasing
    from shoal.transports.weather import Proxy

EPILOG = """\
The coordinator sends everything else: the configuration, what the data must be, the tokenizer.
Where this machine differs, say so: --set data.source.path=/my/mnist --set training.device=cpu
"""


def run(argv: list[str]) -> int:
    made = argparse.ArgumentParser(
        "shoal join",
        description="Work for a coordinator, on this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("address", nargs="?", metavar="ADDRESS", help="tcp://HOST:PORT or postgresql://…, as `shoal coordinate` printed it")
    made.add_argument("--token", help="the join token")
    made.add_argument("--key", help="the coordinator's public key; none for a coordinator on this machine alone")
    made.add_argument("--name", help="this worker's name (default: the coordinator gives it one)")
    made.add_argument("--set", "--override", dest="settings", action="append", default=[], metavar="PATH=VALUE")
    made.add_argument("--receipts", metavar="FILE", help="write down what the coordinator confirmed, for `shoal audit`")
    made.add_argument("--state", metavar="DIR", help="keep what this worker needs to go on after a break (diloco: its optimizer)")
    made.add_argument("--netem", metavar="WEATHER", help="as if the network were: good, cellular, satellite, degraded, brownout")
    made.add_argument("--slowdown", type=float, default=1.0, metavar="FACTOR", help="as if this machine were so many times slower")
    made.add_argument("--patience", type=float, default=600.0, metavar="SECONDS", help="how long to wait for a coordinator that is gone")
    made.add_argument("--stdin", action="store_true", help=argparse.SUPPRESS)
    arguments = made.parse_args(argv)
    address, token, key = _invitation(arguments)
    in_database = is_address(address)
    overrides = [parse_override(text) for text in arguments.settings]

    from shoal.strategies.joining import Joined, Way

    weather = None
    if arguments.netem:
        weather, address = _through_weather(address, arguments.netem)
    receipts = Path(arguments.receipts) if arguments.receipts else None
    state = Path(arguments.state) if arguments.state else None
    way = Way(address, token, key, arguments.name, overrides, receipts, arguments.slowdown, arguments.patience, state)
    here: list[Joined | Leasing] = []
    if arguments.stdin:
        threading.Thread(target=_leave_with_parent, args=(here,), daemon=True).start()
    if in_database:
        from shoal.strategies.leasing import join

        joined = join(way, _tell, download)
    else:
        joined = Joined(way, _tell, download)
    here.append(joined)
    _tell(f"joined as {joined.name}")
    _leave_on_signals(joined)
    try:
        joined.work()
    finally:
        if weather is not None:
            weather.close()
    print(f"{joined.name}: {joined.summary()}")
    return 0


def _invitation(arguments: argparse.Namespace) -> tuple[str, str, str | None]:
    if arguments.stdin:
        given = json.loads(sys.stdin.readline() or "{}")
        if "address" not in given:
            raise ShoalError("--stdin: no invitation came")
        return given["address"], given["token"], given["key"]
    if arguments.address and is_address(arguments.address):
        return parse_address(arguments.address, database_password()).address, "", None
    if arguments.address and Path(arguments.address).is_file():
        return _configured(arguments.address), "", None
    if not arguments.address or not arguments.token:
        raise ShoalError("to join takes an address and a token: `shoal coordinate` prints the whole command")
    from shoal.transports.keys import key_from_text

    return arguments.address, arguments.token, key_from_text(arguments.key) if arguments.key else None


def _configured(file: str) -> str:
    """The database that a configuration names."""
    settings = resolve([File(file)], []).run.transport
    if not isinstance(settings, Postgres) or settings.host == "embedded":
        raise ShoalError(f"{file} names no database to join through: `shoal coordinate` prints the command for its workers")
    return access_of(settings).address


def _through_weather(address: str, name: str) -> tuple[Proxy, str]:
    from shoal.transports.weather import Proxy, profile

    if not is_address(address):
        weather = Proxy(address, profile(name), seed=0)
        return weather, weather.address
    access = parse_address(address)
    weather = Proxy(f"tcp://{bracketed(access.host)}:{access.port}", profile(name), seed=0)
    reached = parse_tcp(weather.address)
    return weather, access._replace(host=reached.host, port=reached.port).address


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _leave_with_parent(here: list[Joined | Leasing]) -> None:
    """Whoever started this worker is gone: so is its work."""
    sys.stdin.read()
    for joined in here:
        joined.stop()
        time.sleep(5.0)
    os._exit(0)


def _leave_on_signals(joined: Joined | Leasing) -> None:
    asked = [0]

    def stop(number: int, frame: FrameType | None) -> None:
        asked[0] += 1
        if asked[0] > 1:
            os._exit(130)
        _tell("leaving after this step; once more to leave at once")
        joined.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
