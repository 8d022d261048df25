"""The command line of a process as other users of the machine see it, in `ps` and in /proc: without secrets.

A secret that was typed as an argument can be seen until its process has started. In a file, in the environment (which only its owner can
read) or on standard input it is never seen.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shoal.errors import masked


def shown_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command with every value masked that may be a secret."""
    shown, before = list[str](), ""
    for argument in arguments:
        is_value = before.startswith("--") and "=" not in before and not argument.startswith("--")
        shown.append(masked(f"{before}={argument}")[len(before) + 1 :] if is_value else masked(argument))
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
