"""The program `shoal`: dispatches to a command, importing only that."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from shoal import __version__
from shoal.errors import ShoalError
from shoal.process_exit import end_process, reader_is_gone
from shoal.process_title import hide_secrets

COMMANDS = {
    "train": "train a model",
    "coordinate": "start a coordinator for workers on other machines",
    "up": "start a coordinator and all workers (local, ssh, Ray), or write files for Slurm or Kubernetes",
    "down": "save and end what `shoal up` started",
    "join": "run a worker on this machine",
    "relay": "combine the updates of local workers and send them to a coordinator as one",
    "invite": "give one person a separate join token, or withdraw it",
    "db": "manage the PostgreSQL database of a run and its roles",
    "status": "show a run's progress and workers",
    "top": "show the same live in the terminal",
    "watch": "show runs in the browser, live or afterwards",
    "pause": "pause a run; its workers wait",
    "resume": "continue a paused run",
    "stop": "save and end a run, from any terminal",
    "evict": "remove a worker from a run",
    "alerts": "send a test message to where the alerts of a run go",
    "audit": "check that no confirmed contribution was lost or counted twice",
    "repair": "repair a run with damaged files, and say what is lost",
    "index": "build an index of texts for retrieval",
    "simulate": "simulate a run with thousands of workers in virtual time",
    "plan": "find the settings for a model and your machines",
    "eval": "evaluate a run on its held-out data",
    "generate": "generate text or images with a run's model",
    "serve": "serve a model: OpenAI-compatible API and chat page",
    "export": "write a run's model for other programs",
    "manifest": "check a folder with a model against the digests of its files",
    "runs": "list runs and compare them",
    "doctor": "check whether this machine can train",
    "demo": "watch workers train on built-in data while some are killed",
    "config": "check, show, explain, compare and migrate configurations",
    "init": "write a configuration to start from",
    "completion": "print a completion script for your shell",
}
HELP = f"""\
Shoal trains one model on every machine you can get, from one YAML file.

usage: shoal COMMAND …

commands:
{chr(10).join(f"  {name:<10} {text}" for name, text in COMMANDS.items())}

`shoal COMMAND --help` explains a command; `shoal --version` prints the version.
"""


def program() -> NoReturn:
    """Run the command line and exit."""
    hide_secrets()
    end_process(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 2 for errors that the user can fix."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except ShoalError as error:
        report(error)
        return 2
    except BrokenPipeError:
        if not reader_is_gone():
            raise
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130


def report(error: ShoalError) -> None:
    """Print an error on standard error."""
    problems = getattr(error, "problems", None)
    if problems is None:
        print(f"error: {error}", file=sys.stderr)
    else:
        from shoal.config.problems import render

        print(render(problems, colour=sys.stderr.isatty()), file=sys.stderr)


def parser_of(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """The parser of a command; the epilog is printed as it is written."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"shoal {command}", description=description, epilog=epilog, formatter_class=form, allow_abbrev=False)


def warn(text: str) -> None:
    """Print a warning on standard error."""
    print(f"warning: {text}", file=sys.stderr)


def print_log(text: str) -> None:
    """Print a line with the time on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def run_subcommand(command: str, help: str, subcommands: Mapping[str, Callable[[list[str]], int]], argv: list[str]) -> int:
    """Run a command that has commands of its own; without one, print its help."""
    if not argv or argv[0] in ("--help", "-h"):
        print(help, end="")
        return 0
    if argv[0] not in subcommands:
        raise ShoalError(f"no command `{command} {argv[0]}`; there are {', '.join(subcommands)}")
    return subcommands[argv[0]](argv[1:])


def _run(arguments: list[str]) -> int:
    flags, rest = leading_flags(arguments)
    if not rest or rest[0] in ("--help", "-h", "help"):
        print(HELP, end="")
        return 0
    if rest[0] == "--version":
        print(f"shoal {__version__}")
        return 0
    name, *rest = rest
    if name.startswith("-"):
        raise ShoalError(f"no option `{name}` here; `shoal --help` lists the commands")
    if name not in COMMANDS:
        from shoal.config.fields import did_you_mean

        raise ShoalError(f"no command `{name}`; there are {', '.join(COMMANDS)}. {did_you_mean(name, COMMANDS)}".rstrip())
    return import_module(f"shoal.cli.{name}").run([*rest, *flags])


def leading_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split off settings before the command (`shoal --log-level DEBUG train …`), which count as if given after it."""
    flags: list[str] = []
    while len(arguments) > 1 and arguments[0].startswith("--") and arguments[0] not in ("--help", "--version"):
        count = 1 if "=" in arguments[0] else 2
        flags, arguments = flags + arguments[:count], arguments[count:]
    return flags, arguments
