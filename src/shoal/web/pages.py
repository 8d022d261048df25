"""Pages of the servers: one head and one style sheet for all of them; each page is a folder with a body, a style and scripts."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles

_LOOK = Path(__file__).parent / "look"


def show_page(app: FastAPI, folder: Path) -> None:
    """Let an app show the page in `folder`. It takes every path that no other route has: call this last."""
    text = (_LOOK / "head.html").read_text(encoding="utf-8") + (folder / "body.html").read_text(encoding="utf-8")

    async def page() -> Response:
        return HTMLResponse(text, headers={"cache-control": "no-cache"})

    def shared(file: str) -> None:
        app.get(f"/{file}")(lambda: FileResponse(_LOOK / file))

    app.get("/")(page)
    for file in ("look.css", "icon.svg"):
        shared(file)
    app.mount("/", StaticFiles(directory=folder))
