"""One service for all tests of a file that only ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="serving needs fastapi: pip install 'shoal[serve]'")
pytest.importorskip("uvicorn", reason="serving needs uvicorn: pip install 'shoal[serve]'")

from serving import running, small_served

from shoal.serve.server import Service


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(small_served(), ports=2) as one:
        yield one
