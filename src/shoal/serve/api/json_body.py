"""Reads the JSON body of a request, with bounds on its size and on what it takes in memory."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from shoal.web.auth import RefusedError

_LARGEST_BODY = 4 * 2**20
_MOST_CONTAINERS = 100_000
"""Objects and arrays of a body, which take more memory than its text."""


def read_json(raw: bytes) -> dict[str, Any]:
    """The body of a request, without its fields that are null. Raises RefusedError."""
    try:
        with _without_garbage_collection():
            return _read_object(raw)
    except UnicodeEncodeError:
        raise RefusedError(400, "the body has half of a character (a lone surrogate)") from None
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from None


def _read_object(raw: bytes) -> dict[str, Any]:
    """Raises RefusedError, ValueError and RecursionError."""

    def no_constant(word: str) -> None:
        raise ValueError(f"{word} is no number of JSON")

    body = json.loads(raw.decode("utf-8"), parse_constant=no_constant)
    if b"\\u" in raw:  # an escape can write half of a character, which has no encoding
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    if not isinstance(body, dict):
        raise RefusedError(400, "the body must be a JSON object")
    if raw.count(b"[") + raw.count(b"{") > _MOST_CONTAINERS and _has_many_containers(body):
        del body  # the error would keep it until it is answered
        raise RefusedError(400, f"the body may have {_MOST_CONTAINERS:,} objects and arrays at most")
    return {name: value for name, value in body.items() if value is not None}


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Context: else a body with a million arrays is searched for garbage again and again while it is read, which takes ten times as
    long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _has_many_containers(body: dict[str, Any]) -> bool:
    """Texts may have brackets, too, so they are counted only here."""
    todo: list[dict[str, Any] | list[Any]] = [body]
    count = 1
    while todo:
        one = todo.pop()
        for part in one.values() if isinstance(one, dict) else one:
            if type(part) is list or type(part) is dict:
                todo.append(part)
                count += 1
                if count > _MOST_CONTAINERS:
                    return True
    return False


class _ReadRequest(Request):
    """A request whose body has been read and parsed."""

    def __init__(self, request: Request, raw: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._raw, self._parsed = raw, read_json(raw)

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._parsed


class JsonRoute(APIRoute):
    """A route with a JSON body. FastAPI would read a body of any size, and accept NaN."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            return await handle(_ReadRequest(request, await _read_body(request)))

        return checked


async def _read_body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A browser sends a form of another site's page without asking this server first; JSON it does not
        raise RefusedError(415, "the body must be application/json")
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > _LARGEST_BODY:
            raise RefusedError(413, f"the body may have {_LARGEST_BODY} bytes at most")
    return b"".join(parts)
