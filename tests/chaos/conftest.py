"""Chaos takes minutes: it is run by name (`make chaos`), not with all the other tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for room in ("coordinator", "classroom", "serve"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / room))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if any("chaos" in argument for argument in config.args) else True
