"""Pages of the servers. All share one head and one style sheet (`style/`); each page is a folder with a body, a style sheet and scripts."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

_STYLE = Path(__file__).parent / "style"


def show_page(app: FastAPI, folder: Path, at: str = "") -> None:
    """Show the page in `folder` at a path such as `/docs`. The page at the root takes all paths that no other route has: add it last."""
    text = (_STYLE / "head.html").read_text(encoding="utf-8") + (folder / "body.html").read_text(encoding="utf-8")

    async def page() -> Response:
        return HTMLResponse(text, headers={"cache-control": "no-cache"})

    def share(file: str) -> None:
        app.get(f"{at}/{file}", include_in_schema=False)(lambda: FileResponse(_STYLE / file))

    app.get(f"{at}/", include_in_schema=False)(page)
    if at:  # the page refers to its files by relative addresses
        app.get(at, include_in_schema=False)(lambda: RedirectResponse(f"{at}/"))
    for file in ("look.css", "icon.svg"):
        share(file)
    app.mount(at or "/", StaticFiles(directory=folder))
