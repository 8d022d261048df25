"""Every transport, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transport_harness import KINDS, Harness


@pytest.fixture(params=KINDS)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    made = Harness(request.param)
    yield made
    made.close()
