"""`shoal`: finds the command and loads nothing else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from shoal import __version__
from shoal.errors import ShoalError
from shoal.process_exit import end_process

COMMANDS = {
    "train": "train what a configuration describes",
    "coordinate": "hold the weights of a run that workers elsewhere train",
    "up": "start a coordinator and all its workers: here, by ssh, on Ray; or write what Slurm or Kubernetes is given",
    "down": "end what `shoal up` started",
    "join": "work for a coordinator",
    "relay": "combine the updates of workers here, and send one to a coordinator elsewhere",
    "invite": "let one person's workers in, with a token of their own",
    "db": "prepare, look into and wipe the PostgreSQL database of a run, and let students in",
    "status": "how a run goes: who works, what it has learned",
    "top": "the same, live in this terminal",
    "watch": "show runs in the browser, live and afterwards",
    "pause": "hold a run up; its workers wait",
    "resume": "let it go on",
    "stop": "save a run and end it, from any terminal",
    "evict": "keep a worker out of a run",
    "audit": "check that nothing a coordinator confirmed was lost, or counted twice",
    "repair": "make a run with damaged files fit to be resumed, and say what is lost",
    "index": "make an index of texts, whose passages a model reads beside its input",
    "simulate": "try a run with thousands of workers in virtual time",
    "plan": "find the settings that suit a model and the machines you have",
    "eval": "judge a run on its held-out data",
    "generate": "let a run write text or draw images",
    "serve": "let a model answer over an API in OpenAI's form, and on a chat page",
    "export": "write a run's model into a folder, for other programs",
    "runs": "list past runs, and compare some",
    "doctor": "see what works on this machine, and what would not",
    "demo": "see workers train together on built-in data, while some are killed",
    "config": "check, show, explain, compare and migrate configurations",
    "init": "write a configuration to start from",
    "completion": "let a shell complete commands and options",
}
HELP = f"""\
Shoal trains one model on every machine you can get, from one YAML file.

usage: shoal COMMAND …

commands:
{chr(10).join(f"  {name:<10} {text}" for name, text in COMMANDS.items())}

`shoal COMMAND --help` tells more. `shoal --version` prints the version.
"""


def program() -> NoReturn:
    """The program `shoal`, from its arguments to its end."""
    end_process(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. 2 is for what the user can mend."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except ShoalError as error:
        report(error)
        return 2
    except BrokenPipeError:  # `shoal … | head`
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130


def report(error: ShoalError) -> None:
    """Tell what is wrong, on standard error."""
    problems = getattr(error, "problems", None)
    if problems is None:
        print(f"error: {error}", file=sys.stderr)
    else:
        from shoal.config.problems import render

        print(render(problems, colour=sys.stderr.isatty()), file=sys.stderr)


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
    code: int = import_module(f"shoal.cli.{name}").run([*rest, *flags])
    return code


def leading_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Settings given before the command (`shoal --log-level DEBUG train …`) count as if given after it."""
    flags: list[str] = []
    while len(arguments) > 1 and arguments[0].startswith("--") and arguments[0] not in ("--help", "--version"):
        count = 1 if "=" in arguments[0] else 2
        flags, arguments = flags + arguments[:count], arguments[count:]
    return flags, arguments
