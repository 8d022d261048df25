"""The command line of a process as other users of the machine see it, in `ps` and in /proc: without secrets.

A secret that was typed as an argument can be seen until its process has started. In a file, in the environment (which only its owner can
read) or on standard input it is never seen.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

_MASK = "********"
_NAME = r"(?:pass(?:word|wd|phrase)?|secret|token|key)"
_OPTION = re.compile(rf"-.*(?:^|[-._]){_NAME}", re.IGNORECASE)
"""An option whose value is the next argument."""
_VALUE = re.compile(rf"({_NAME}[\"']?\s*[:=]\s*)[^,}}\]]+", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(://[^/@\s:]*):[^@\s]+@")


def shown_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command with every value masked that may be a secret."""
    shown, before = list[str](), ""
    for argument in arguments:
        is_value = bool(_OPTION.fullmatch(before)) and not argument.startswith("--")
        shown.append(_MASK if is_value else _IN_ADDRESS.sub(rf"\1:{_MASK}@", _VALUE.sub(rf"\1{_MASK}", argument)))
        before = argument
    return shown


def set_title(arguments: Sequence[str]) -> None:
    """Show this command in `ps`. The first call must come before anything changes the environment."""
    import setproctitle  # imported here: few commands need it

    setproctitle.setproctitle(" ".join(shown_arguments(arguments)))


def hide_secrets() -> None:
    """Mask the secrets in the arguments with which the interpreter was started."""
    if shown_arguments(sys.orig_argv) != sys.orig_argv:
        set_title(sys.orig_argv)
