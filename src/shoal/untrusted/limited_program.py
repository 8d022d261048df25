"""The program of a process that renders a chat template or encodes text, which somebody else's files decide.

It imports nothing of Shoal, so that it starts quickly: jinja2 for a template, the library of Hugging Face for a tokenizer. It reads JSON, a
line at a time: first the template or the tokenizer, then requests. It answers each line with one, and `prompt_process.py` reads them.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

Answer = Callable[[Any], Any]


def main() -> None:
    """Holds: a request that takes longer than its time ends the process, also when the one that started it is gone."""
    setup, made = json.loads(sys.stdin.readline()), list[Answer]()
    _limit_memory(setup["memory_bytes"])
    _reply(lambda: made.append(_made(setup)))
    for line in sys.stdin:
        _end_after(2 * setup["seconds"])
        _reply(partial(made[0], json.loads(line)))
        _end_after(0)


def _end_after(seconds: int) -> None:
    """0: not any more. Windows has no such signal; there the process that asked ends this one."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def _limit_memory(size: int) -> None:
    with suppress(ImportError, ValueError, OSError):  # not every system has this limit; the deadline holds everywhere
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _reply(answer: Callable[[], Any]) -> None:
    try:
        line = {"answer": answer()}
    except MemoryError:
        line = {"error": "it needs too much memory"}
    except BaseException as error:  # the library's panics are no exceptions
        line = {"error": (str(error) or type(error).__name__)[:1000]}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _made(setup: dict[str, Any]) -> Answer:
    if setup.get("template") is not None:
        template = template_environment().from_string(setup["template"])
        return lambda variables: _bounded(template.render(**variables), setup["longest"])
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(setup["tokenizer"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _bounded(text: str, longest: int) -> str:
    if len(text) > longest:
        raise ValueError(f"it makes a text of {len(text):,} letters, and {longest:,} are allowed")
    return text


def template_environment() -> Any:
    """The environment of chat templates: sandboxed, with the functions that templates on the hub use."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


if __name__ == "__main__":
    main()
