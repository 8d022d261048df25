"""What all tests share: how examples are made up, and the specification and the data beside the checkout, where they are."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"

# One thread for each process, before anything reads this: tests run side by side, and threads that wait for each other on a busy
# machine take several times the time of the work itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Runs write to the disk and wait for it all the time. Where there is room the tests' folders lie in memory, which has nothing to wait for.
MEMORY, ROOM = Path("/dev/shm"), 4 << 30
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY.resolve()))

# The same examples in every run, and none fails because the machine is slow or busy.
settings.register_profile("everywhere", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("everywhere")


# What `make quick` leaves to `make test`: folders whose tests train or serve with several machines, tests that can start processes, as
# their file, a file of ours that it imports, or the file of a fixture that they take imports one of these, and tests with the mark.
WHOLE_RUNS = ("chaos", "classroom", "hostile", "hub", "launch", "serve", "simulate", "strategies")
STARTERS = {"subprocess", "multiprocessing", "torch.multiprocessing", "shoal.launch.forkserver"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A folder of whole runs is not even read where whole runs are not asked for. None leaves the choice to others."""
    whole = collection_path.name in WHOLE_RUNS and collection_path.is_dir()
    return True if whole and config.option.markexpr.startswith("not whole") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and (item.path.parent.name in WHOLE_RUNS or not STARTERS.isdisjoint(imported_for(item))):
            item.add_marker(pytest.mark.whole)


def imported_for(item: pytest.Function) -> set[str]:
    """Names of all modules that the files behind a test import, as far as those files are ours."""
    fixtures = (one.func for several in item._fixtureinfo.name2fixturedefs.values() for one in several)
    files = [vars(item.module), *(getattr(function, "__globals__", {}) for function in fixtures)]  # every conftest.py has the same name
    return set().union(*(imported_from(str(names.get("__file__")), names) for names in files))


_found: dict[str, set[str]] = {}


def imported_from(file: str, names: dict[str, Any]) -> set[str]:
    """Names of all modules that a file imports, and that files of ours imported by it import. Every file is looked at once."""
    if file not in _found:
        _found[file] = set()  # files that import each other end here
        if file.startswith(f"{ROOT / 'tests'}/"):
            modules = set(modules_in(names))
            _found[file] = {module.__name__ for module in modules}.union(
                *(imported_from(str(module.__file__), vars(module)) for module in modules if getattr(module, "__file__", None))
            )
    return _found[file]


def modules_in(names: dict[str, Any]) -> Iterator[ModuleType]:
    """Modules that have been imported, whole or something of them."""
    for value in names.values():
        origin = value if isinstance(value, ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
        if origin is not None and not origin.__name__.endswith("conftest"):
            yield origin


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
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No variable of the machine reaches a test, and no test writes into the user's own folders."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))
    for name in ("DB_PASSWORD", "HF_TOKEN", "SHOAL_API_KEY", "CONFIG_PATH", "TELEMETRY_ALPHA", "LOG_LEVEL", "LOG_FORMAT"):
        monkeypatch.delenv(name, raising=False)
