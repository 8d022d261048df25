"""Chaos takes minutes: it is run by name (`make chaos`), not with all the other tests."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if any("chaos" in argument for argument in config.args) else True
