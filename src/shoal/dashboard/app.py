"""The dashboard over HTTP: a page, a stream of changes, and metrics for Prometheus. It reads runs' folders and changes nothing.

With the owner's password, which `shoal watch` prints, a browser can also send commands to the run's coordinator and read how to join.

Holds: no answer contains a token or a key unless the request contains the owner's password.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import segno
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from shoal.dashboard.watched_runs import StreamPosition, WatchedRun
from shoal.errors import ShoalError
from shoal.runs.monitoring.prometheus import exposition, run_metrics
from shoal.runs.owner import read_owner_file, send_command
from shoal.transports.metrics_page import CONTENT_TYPE
from shoal.web.auth import Receive, Scope, Send
from shoal.web.pages import show_page

_REFRESH_INTERVAL_S = 1.0
_ALIVE_EVERY_S = 15.0
"""Interval of keep-alive comments in a stream without news, so that both sides notice a lost connection."""
_MOST_STREAMS = 200
_LONGEST_COMMAND = 1000
_MOST_QR_ROWS = 97
"""A code of version 20, for up to 666 bytes."""
_COMMANDS = ("pause", "resume", "stop", "evict", "readmit")


class EventStream(StreamingResponse):
    """A stream of events, which is refused where too many are open.

    Holds: at most `_MOST_STREAMS` are open at a time. One that is admitted counts before any other is looked at."""

    def __init__(self, events: AsyncIterator[str], open_streams: set[EventStream]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self.open_streams = open_streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.open_streams) >= _MOST_STREAMS:
            refusal = JSONResponse({"error": f"{_MOST_STREAMS} pages are watching already: close one of them"}, 503)
            await refusal(scope, receive, send)
            return
        self.open_streams.add(self)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.open_streams.discard(self)


class Dashboard:
    """The routes' handlers, and the state that they share."""

    def __init__(self, runs: Sequence[WatchedRun], ending: Callable[[], bool], owner_password: str) -> None:
        self.watched, self.ending, self.owner_password = runs, ending, owner_password.encode()
        self.open_streams = set[EventStream]()
        self._refreshed_at = float("-inf")
        self._refreshing = asyncio.Lock()

    async def _refresh(self) -> None:
        """Read the folders, at most once a second for all viewers together."""
        async with self._refreshing:
            if time.monotonic() - self._refreshed_at >= 0.9 * _REFRESH_INTERVAL_S:
                for run in self.watched:
                    await asyncio.to_thread(run.refresh)
                self._refreshed_at = time.monotonic()

    def run(self, number: int) -> WatchedRun:
        if not 0 <= number < len(self.watched):
            raise HTTPException(404, "there is no such run here")
        return self.watched[number]

    async def stream(self) -> Response:
        return EventStream(self._events(), self.open_streams)

    async def _events(self) -> AsyncIterator[str]:
        """The whole state first, then the changes once a second."""
        positions, sent = [StreamPosition()] * len(self.watched), [""] * len(self.watched)
        sent_at = time.monotonic()
        while not self.ending():
            await self._refresh()
            for number, run in enumerate(self.watched):
                news, positions[number] = await asyncio.to_thread(run.since, positions[number])
                text = json.dumps({"run": number, "of": len(self.watched)} | news, separators=(",", ":"))
                if text != sent[number]:
                    sent[number], sent_at = text, time.monotonic()
                    yield f"data: {text}\n\n"
            if time.monotonic() - sent_at > _ALIVE_EVERY_S:
                sent_at = time.monotonic()
                yield ": still here\n\n"
            await asyncio.sleep(_REFRESH_INTERVAL_S)

    async def runs(self) -> Response:
        await self._refresh()
        return JSONResponse([{"name": run.folder.name, "state": run.status["state"]} for run in self.watched])

    async def status(self, number: int) -> Response:
        await self._refresh()
        return JSONResponse(self.run(number).status)

    async def settings(self, number: int) -> Response:
        return JSONResponse(self.run(number).folder.provenance())

    async def sample(self, number: int, name: str) -> Response:
        found = self.run(number).folder.sample(name)
        if found is None:
            raise HTTPException(404, "there is no such sample")
        return Response(found, media_type="image/png") if isinstance(found, bytes) else PlainTextResponse(found)

    async def metrics(self) -> Response:
        await self._refresh()
        text = exposition(run_metrics({run.folder.name: run.status for run in self.watched}))
        return PlainTextResponse(text, headers={"content-type": CONTENT_TYPE})

    # --- only for the owner, who sends the password that `shoal watch` printed: other users of this machine can open the page, too ---

    async def check_owner(self, request: Request) -> Response:
        """Check that the caller may send commands."""
        self._expect_owner(request)
        return Response(status_code=204)

    async def invitation(self, number: int, request: Request) -> Response:
        """The command with which a worker joins. It holds the join token."""
        self._expect_owner(request)
        found = self.run(number).folder.invitation()
        line = str(found.get("line", ""))
        return JSONResponse({"line": line, "token": found.get("token", ""), "code": qr_rows(line)}, headers={"cache-control": "no-store"})

    async def command(self, number: int, request: Request) -> Response:
        self._expect_owner(request)
        action, name = await _command_in(request)
        path = self.run(number).folder.path
        try:
            reply = await asyncio.to_thread(lambda: send_command(read_owner_file(path), action, name))
        except ShoalError as error:
            raise HTTPException(409, str(error)) from None
        return JSONResponse({"text": reply})

    def _expect_owner(self, request: Request) -> None:
        given = request.headers.get("x-shoal-owner", "").encode()
        if not self.owner_password or not hmac.compare_digest(given, self.owner_password):
            raise HTTPException(403, "only the run's owner may do that: open the address that `shoal watch` printed")


async def _command_in(request: Request) -> tuple[str, str | None]:
    """The action in a request, and the worker that it is about. A form of a foreign page can send neither this type nor the password."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _LONGEST_COMMAND:
            raise HTTPException(413, "no order is that long")
    try:
        fields = json.loads(body)
        action, name = fields["action"], fields.get("name")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise HTTPException(400, "an order is JSON with an action") from None
    if request.headers.get("content-type") != "application/json" or action not in _COMMANDS or not isinstance(name, str | None):
        raise HTTPException(400, f"an order is JSON, and its action one of {', '.join(_COMMANDS)}")
    return action, name


def qr_rows(text: str) -> list[str]:
    """The QR code of a text, a string of 0 and 1 (dark) for each row; empty where the text is empty or too long for a phone to read it."""
    if not text:
        return []
    try:
        code = segno.make_qr(text, error="m", mode="byte", boost_error=False)
    except segno.DataOverflowError:
        return []
    return ["".join(map(str, row)) for row in code.matrix] if len(code.matrix) <= _MOST_QR_ROWS else []


def make_dashboard_app(runs: Sequence[WatchedRun], *, ending: Callable[[], bool] = lambda: False, owner_password: str = "") -> FastAPI:
    """All routes; streams end once `ending` is true. FastAPI's own documentation pages are off: they load scripts from elsewhere.
    `owner_password`: what the owner's browser sends; empty: there is nothing here for the owner alone."""
    board, app = Dashboard(runs, ending, owner_password), FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def refuse(request: Any, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    app.get("/api/stream")(board.stream)
    app.get("/api/runs")(board.runs)
    app.get("/api/runs/{number}/status")(board.status)
    app.get("/api/runs/{number}/settings")(board.settings)
    app.get("/api/runs/{number}/samples/{name}")(board.sample)
    app.get("/metrics")(board.metrics)
    if owner_password:
        app.get("/api/owner")(board.check_owner)
        app.get("/api/runs/{number}/invitation")(board.invitation)
        app.post("/api/runs/{number}/orders")(board.command)
    app.add_exception_handler(HTTPException, refuse)
    show_page(app, Path(__file__).parent / "board")
    return app
