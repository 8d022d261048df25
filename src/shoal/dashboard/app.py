"""The dashboard over HTTP: a page, a stream of what changes, and figures for Prometheus. It reads runs' folders and changes nothing.

Where whoever started it gave it the owner's word, it passes orders on to the run's coordinator; else there is no way to give any.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import segno
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from shoal.dashboard.runs import StreamPosition, WatchedRun, WatchedRuns
from shoal.errors import ShoalError
from shoal.runs.monitoring.prometheus import exposition, run_metrics
from shoal.runs.owner import read_owner_file, send_command
from shoal.transports.metrics_page import CONTENT_TYPE
from shoal.web.pages import show_page

_LOOK_EVERY_S = 1.0
_ALIVE_EVERY_S = 15.0
"""A stream that has nothing new says something so often, so that both sides notice when the other is gone."""
_MOST_STREAMS = 200
_LONGEST_ORDER = 1000
_MOST_QR_ROWS = 97
"""A code of version 20, for up to 666 bytes."""
_ORDERS = ("pause", "resume", "stop", "evict", "readmit")


class Dashboard:
    """What the routes share."""

    def __init__(self, watch: WatchedRuns, shows_invitation: bool, ending: Callable[[], bool]) -> None:
        self.watch, self.shows_invitation, self.ending = watch, shows_invitation, ending
        self.streams = 0
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()

    async def _look(self) -> None:
        """Look at the folders, once a second at most however many watch."""
        async with self._looking:
            if time.monotonic() - self._looked_at >= 0.9 * _LOOK_EVERY_S:
                await asyncio.to_thread(self.watch.look)
                self._looked_at = time.monotonic()

    def run(self, number: int) -> WatchedRun:
        if not 0 <= number < len(self.watch.runs):
            raise HTTPException(404, "there is no such run here")
        return self.watch.runs[number]

    async def stream(self) -> Response:
        if self.streams >= _MOST_STREAMS:
            raise HTTPException(503, "too many are watching")
        return StreamingResponse(self._events(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def _events(self) -> AsyncIterator[str]:
        """Everything at first, then what has changed, once a second."""
        self.streams += 1
        places, told = [StreamPosition()] * len(self.watch.runs), [""] * len(self.watch.runs)
        said_at = time.monotonic()
        try:
            while not self.ending():
                await self._look()
                for number, run in enumerate(self.watch.runs):
                    news, places[number] = await asyncio.to_thread(run.since, places[number])
                    text = json.dumps({"run": number, "of": len(self.watch.runs)} | news, separators=(",", ":"))
                    if text != told[number]:
                        told[number], said_at = text, time.monotonic()
                        yield f"data: {text}\n\n"
                if time.monotonic() - said_at > _ALIVE_EVERY_S:
                    said_at = time.monotonic()
                    yield ": still here\n\n"
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            self.streams -= 1

    async def runs(self) -> Response:
        await self._look()
        return JSONResponse([{"name": run.folder.name, "state": run.status["state"]} for run in self.watch.runs])

    async def status(self, number: int) -> Response:
        await self._look()
        return JSONResponse(self.run(number).status)

    async def settings(self, number: int) -> Response:
        return JSONResponse(self.run(number).folder.provenance())

    async def sample(self, number: int, name: str) -> Response:
        found = self.run(number).folder.sample(name)
        if found is None:
            raise HTTPException(404, "there is no such sample")
        return Response(found, media_type="image/png") if isinstance(found, bytes) else PlainTextResponse(found)

    async def invitation(self, number: int) -> Response:
        """The line that lets a worker in. Whoever only watches does not learn it."""
        found = self.run(number).folder.invitation() if self.shows_invitation else {}
        line = str(found.get("line", ""))
        return JSONResponse({"line": line, "token": found.get("token", ""), "code": qr_rows(line)})

    async def metrics(self) -> Response:
        await self._look()
        text = exposition(run_metrics({run.folder.name: run.status for run in self.watch.runs}))
        return PlainTextResponse(text, headers={"content-type": CONTENT_TYPE})


class OwnerRoutes:
    """Orders of the owner, who has the word that the dashboard's command printed. Other users of this machine reach the page, too."""

    def __init__(self, board: Dashboard, word: str) -> None:
        self.board, self.word = board, word.encode()

    async def knock(self, request: Request) -> Response:
        """Whether whoever asks may give orders."""
        self._expect_owner(request)
        return Response(status_code=204)

    async def give(self, number: int, request: Request) -> Response:
        self._expect_owner(request)
        action, name = await _order_in(request)
        path = self.board.run(number).folder.path
        try:
            said = await asyncio.to_thread(lambda: send_command(read_owner_file(path), action, name))
        except ShoalError as error:
            raise HTTPException(409, str(error)) from None
        return JSONResponse({"text": said})

    def _expect_owner(self, request: Request) -> None:
        if not hmac.compare_digest(request.headers.get("x-shoal-owner", "").encode(), self.word):
            raise HTTPException(403, "only the run's owner may do that: open the address that `shoal watch` printed")


async def _order_in(request: Request) -> tuple[str, str | None]:
    """The action in a request, and the worker that it is about. A form of a stranger's page cannot have this type, nor the owner's word."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _LONGEST_ORDER:
            raise HTTPException(413, "no order is that long")
    try:
        told = json.loads(body)
        action, name = told["action"], told.get("name")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise HTTPException(400, "an order is JSON with an action") from None
    if request.headers.get("content-type") != "application/json" or action not in _ORDERS or not isinstance(name, str | None):
        raise HTTPException(400, f"an order is JSON, and its action one of {', '.join(_ORDERS)}")
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


def make_dashboard_app(
    watch: WatchedRuns, *, shows_invitation: bool, ending: Callable[[], bool] = lambda: False, word: str | None = None
) -> FastAPI:
    """All routes; streams end once `ending` says so. FastAPI's own documentation pages are off: they load scripts from elsewhere.
    `word`: what the owner's browser sends with an order; None: this page only shows."""
    board, app = Dashboard(watch, shows_invitation, ending), FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def refuse(request: Any, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    app.get("/api/stream")(board.stream)
    app.get("/api/runs")(board.runs)
    app.get("/api/runs/{number}/status")(board.status)
    app.get("/api/runs/{number}/settings")(board.settings)
    app.get("/api/runs/{number}/samples/{name}")(board.sample)
    app.get("/api/runs/{number}/invitation")(board.invitation)
    app.get("/metrics")(board.metrics)
    if word is not None:
        orders = OwnerRoutes(board, word)
        app.get("/api/owner")(orders.knock)
        app.post("/api/runs/{number}/orders")(orders.give)
    app.add_exception_handler(HTTPException, refuse)
    show_page(app, Path(__file__).parent / "board")
    return app
