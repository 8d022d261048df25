"""One service for all tests of a file that only ask, and a browser for those of a page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="serving needs fastapi: pip install 'shoal[serve]'")
pytest.importorskip("uvicorn", reason="serving needs uvicorn: pip install 'shoal[serve]'")

from shoal.serve.nodes import node_timing, placement
from shoal.serve.nodes import server as node_server
from shoal.serve.server import ModelServer
from tests.support.processes import HANG_S
from tests.support.small_service import running, small_served


@pytest.fixture(scope="module")
def service() -> Iterator[ModelServer]:
    with running(small_served(), ports=2) as one:
        yield one


@pytest.fixture(autouse=True)
def patient_node_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that hold layers are threads of the test: one that is silent waits for its turn on a busy machine, and is not lost. One that
    was lost is shown for as long as the test takes."""
    monkeypatch.setattr(node_server, "SILENCE_S", HANG_S)
    monkeypatch.setattr(node_timing, "GRACE_S", HANG_S)
    monkeypatch.setattr(node_timing, "SLOW_S", HANG_S)
    monkeypatch.setattr(placement, "_SHOWN_S", HANG_S)


FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium; where it or playwright is missing, pages are not tested. It ends with each file: while it is there, this thread
    has an event loop, and other tests need one of their own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="pages are tested by playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        sync_api.expect.set_options(timeout=HANG_S * 1000)
        yield started
        started.close()
