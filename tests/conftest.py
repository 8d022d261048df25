"""What all tests share: how examples are made up, and the specification and the data beside the checkout, where they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"

# The same examples in every run, and none fails because the machine is slow or busy.
settings.register_profile("everywhere", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("everywhere")


@pytest.fixture(scope="session")
def spec() -> Path:
    if not (SHARED / "spec").is_dir():
        pytest.skip("the specification is not beside this checkout (../shared/spec)")
    return SHARED / "spec"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not (SHARED / "data").is_dir():
        pytest.skip("the data for tests is not beside this checkout (../shared/data)")
    return SHARED / "data"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine reaches a test."""
    for name in ("DB_PASSWORD", "HF_TOKEN", "CONFIG_PATH", "TELEMETRY_ALPHA", "LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
