"""The program of a process that renders chat templates, encodes text or compiles grammars, which somebody else decides.

It imports nothing of Shoal, so that it starts quickly: jinja2 for templates, the library of Hugging Face for a tokenizer, llguidance. It
reads JSON, a line at a time: first the templates or the tokenizer, then requests. It answers each line with one, and `prompt_process.py`
reads them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

Answer = Callable[[Any], Any]
_JINJA = (3, 1, 6)
"""Older versions have known ways out of their sandbox."""
_STACK_BYTES = 2 << 20
_TOO_MUCH = "it takes too much to compile: more memory or a deeper stack than it may have"
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages hold an answer's thoughts. Templates read the first."""


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
        line = {"error": _reason(error)}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:1000]


def _made(setup: dict[str, Any]) -> Answer:
    if setup.get("templates") is not None:
        return _Renderer(setup).answer
    if setup.get("grammar_limits") is not None:
        return _grammar_checker(setup["grammar_limits"])
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(setup["tokenizer"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _grammar_checker(limits: dict[str, Any]) -> Answer:
    """Compiles grammars. A request is a grammar and the seconds that it may take; the answer is whether it took longer, and what is wrong
    with it; empty: nothing. The stack is a quarter of what the server's threads have: none that passes ends the server."""
    import threading

    from llguidance import LLMatcher, LLParserLimits

    threading.stack_size(_STACK_BYTES)

    def problem(grammar: str) -> str:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(LLMatcher.validate_grammar(grammar, limits=LLParserLimits(**limits))))
        thread.start()
        thread.join()
        return found[0]

    def check(request: tuple[str, float]) -> tuple[bool, str]:
        grammar, seconds = request
        return _in_a_child(partial(problem, grammar), seconds) if hasattr(os, "fork") else (False, problem(grammar))

    return check


def _in_a_child(work: Callable[[], str], seconds: float) -> tuple[bool, str]:
    """Whether the work took longer than that, and its result. It ends a child of this process if it overflows the stack, and starting this
    process anew would take a hundred times as long."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            with os.fdopen(write, "wb") as pipe:
                pipe.write(work().encode("utf-8", "replace"))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        result = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return True, ""
    return False, result.decode("utf-8") if status == 0 else _TOO_MUCH


class _Renderer:
    """Renders conversations with the templates of a model, one of which is named `default`."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._marks = _Marks()
        environment = template_environment(self._marks, setup["now"])
        self._templates = {name: environment.from_string(source) for name, source in setup["templates"].items()}
        self._variables, self._longest = setup["variables"], setup["longest"]

    def answer(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """For each request its text, or the reason why the template refuses it."""
        return [self._answered(request) for request in requests]

    def _answered(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._conversation(request)
        except MemoryError:
            raise
        except Exception as error:
            return {"error": _reason(error)}

    def _conversation(self, request: dict[str, Any]) -> dict[str, Any]:
        """The text of a conversation, the ranges of its letters that generation marks enclose, and for each cut (a number of messages, and
        whether the generation prompt follows) the length of their text; null: the whole text does not begin with it."""
        messages = [_with_thoughts(message) for message in request["messages"]]
        text = self._rendered(messages, request, request["generation_prompt"])
        marks, lengths = list(self._marks.found), []
        for count, prompt in request["cuts"]:
            part = self._rendered(messages[:count], request, prompt)
            lengths.append(len(part) if text.startswith(part) else None)
        return {"text": text, "marks": marks, "cuts": lengths}

    def _rendered(self, messages: list[Any], request: dict[str, Any], generation_prompt: bool) -> str:
        tools = request["tools"]
        template = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
        variables = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": generation_prompt}
        self._marks.found, self._marks.written = [], 0
        parts = []
        for part in template.generate(**self._variables | variables):
            parts.append(part)
            self._marks.written += len(part)
            if self._marks.written > self._longest:
                raise ValueError(f"it makes a text of {self._marks.written:,} letters, and {self._longest:,} are allowed")
        return "".join(parts)


class _Marks:
    """The ranges that generation marks enclose, and the letters that were written so far."""

    def __init__(self) -> None:
        self.written = 0
        self.found: list[tuple[int, int]] = []


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    thoughts = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def template_environment(marks: _Marks, now: str | None) -> Any:
    """The environment in which transformers renders chat templates: sandboxed, with the functions and marks that templates use. `now`: the
    time that templates read; null: that of the clock."""
    from importlib.metadata import version

    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    installed = version("jinja2")
    if tuple(int(part) for part in installed.split(".")[:3] if part.isdecimal()) < _JINJA:
        raise ImportError(f"chat templates need jinja2 3.1.6 or newer, and {installed} is installed: pip install -U jinja2")

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return (datetime.now() if now is None else datetime.fromisoformat(now)).strftime(form)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_generation(marks), loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": refuse, "strftime_now": strftime_now, "dict": _Dict(), "namespace": _namespace()}
    return environment


def _generation(marks: _Marks) -> Any:
    """The statement {% generation %} … {% endgeneration %}, which encloses what the assistant writes."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationMarks(Extension):
        tags = {"generation"}  # noqa: RUF012 - as jinja2 reads it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            text = caller()
            marks.found.append((marks.written, marks.written + len(text)))
            return text

    return GenerationMarks


class _Dict:
    """The function `dict` of templates. The class itself would lead to Python's internals."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


def _namespace() -> Any:
    """The class `namespace` of templates, without names that begin with an underscore."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    def check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a template cannot store {name!r} in a namespace: rename it")

    class Checked(Namespace):
        def __init__(*arguments: Any, **named: Any) -> None:
            itself, values = arguments[0], dict(*arguments[1:], **named)
            for name in values:
                check(name)
            Namespace.__init__(itself, values)

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            Namespace.__setitem__(self, name, value)

    return Checked


if __name__ == "__main__":
    main()
