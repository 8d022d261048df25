"""The dashboard over HTTP: a page, a stream of what changes, and figures for Prometheus. It reads runs' folders and changes nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles

from shoal.serve import qr
from shoal.serve.prometheus import exposition
from shoal.serve.watched import Place, Watch, WatchedRun

BOARD, CHAT = Path(__file__).parent / "board", Path(__file__).parent / "page"
_LOOK_EVERY_S = 1.0
_ALIVE_EVERY_S = 15.0
"""A stream that has nothing new says something so often, so that both sides notice when the other is gone."""
_MOST_STREAMS = 200
_SHARED = ("look.css", "icon.svg")
"""What both pages of this room look like."""


class Dashboard:
    """What the routes share."""

    def __init__(self, watch: Watch, shows_invitation: bool, ending: Callable[[], bool]) -> None:
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

    def _run(self, number: int) -> WatchedRun:
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
        places, told = [Place()] * len(self.watch.runs), [""] * len(self.watch.runs)
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
        return JSONResponse(self._run(number).status)

    async def settings(self, number: int) -> Response:
        return JSONResponse(self._run(number).folder.provenance())

    async def sample(self, number: int, name: str) -> Response:
        found = self._run(number).folder.sample(name)
        if found is None:
            raise HTTPException(404, "there is no such sample")
        return Response(found, media_type="image/png") if isinstance(found, bytes) else PlainTextResponse(found)

    async def invitation(self, number: int) -> Response:
        """The line that lets a worker in. Whoever only watches does not learn it."""
        found = self._run(number).folder.invitation() if self.shows_invitation else {}
        line = str(found.get("line", ""))
        square = qr.encode(line) if line else None
        return JSONResponse({"line": line, "token": found.get("token", ""), "code": _rows(square) if square else []})

    async def metrics(self) -> Response:
        await self._look()
        text = exposition({run.folder.name: run.status for run in self.watch.runs})
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _rows(square: qr.Square) -> list[str]:
    return ["".join("1" if dark else "0" for dark in row) for row in square]


def make_watch_app(watch: Watch, *, shows_invitation: bool, ending: Callable[[], bool] = lambda: False) -> FastAPI:
    """All routes; streams end once `ending` says so. FastAPI's own documentation pages are off: they load scripts from elsewhere."""
    board, app = Dashboard(watch, shows_invitation, ending), FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def refuse(request: Any, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    def shared(name: str) -> None:
        app.get(f"/{name}")(lambda: FileResponse(CHAT / name))

    app.get("/api/stream")(board.stream)
    app.get("/api/runs")(board.runs)
    app.get("/api/runs/{number}/status")(board.status)
    app.get("/api/runs/{number}/settings")(board.settings)
    app.get("/api/runs/{number}/samples/{name}")(board.sample)
    app.get("/api/runs/{number}/invitation")(board.invitation)
    app.get("/metrics")(board.metrics)
    for name in _SHARED:
        shared(name)
    app.add_exception_handler(HTTPException, refuse)
    app.mount("/", StaticFiles(directory=BOARD, html=True))
    return app
