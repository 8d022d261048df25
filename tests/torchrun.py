"""torchrun whose processes are forked from one that has loaded torch, which halves what they cost.

The agent, its meeting point, its restarts and the variables that it sets are torchrun's own. Only the way a process begins is another.
"""

from __future__ import annotations

import dataclasses
import os
import runpy
import sys
from typing import Any

from torch.distributed import run
from torch.distributed.launcher.api import elastic_launch


def program(*command: str) -> None:
    """What the interpreter does with these arguments."""
    arguments = [word for word in command if word != "-u"] if command[0] == "-u" else list(command)
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[0] = arguments[1:], os.getcwd()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def forked(config: Any, entrypoint: object) -> Any:
    return elastic_launch(dataclasses.replace(config, start_method="fork"), program)


if __name__ == "__main__":
    run.elastic_launch = forked  # type: ignore[assignment, misc]
    run.main()
