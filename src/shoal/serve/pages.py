"""The pages of this room: one head and one look for all of them, and a folder with a body, a style and scripts for each."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles

_HERE = Path(__file__).parent
_LOOK = _HERE / "look"


def show_page(app: FastAPI, name: str) -> None:
    """Let an app show the page in a folder of this room. It takes every path that no other route has: call this last."""
    folder = _HERE / name
    text = (_LOOK / "head.html").read_text(encoding="utf-8") + (folder / "body.html").read_text(encoding="utf-8")

    async def page() -> Response:
        return HTMLResponse(text, headers={"cache-control": "no-cache"})

    def shared(file: str) -> None:
        app.get(f"/{file}")(lambda: FileResponse(_LOOK / file))

    app.get("/")(page)
    for file in ("look.css", "icon.svg"):
        shared(file)
    app.mount("/", StaticFiles(directory=folder))
