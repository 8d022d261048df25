"""What all tests share: how examples are made up, and the specification and the data beside the checkout, where they are."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

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


# Folders whose tests train or serve with several machines: all of them are `whole`, which `make quick` leaves to `make test`. In the other
# folders a file or a test that starts a process says so itself: `pytestmark = pytest.mark.whole`.
WHOLE_FOLDERS = ("chaos", "classroom", "hostile", "hub", "launch", "serve", "simulate", "strategies", "whole")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A folder of whole runs is not even read where whole runs are deselected. None leaves the choice to others."""
    whole = collection_path.name in WHOLE_FOLDERS and collection_path.is_dir()
    return True if whole and config.option.markexpr.startswith("not whole") else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Modules and tests stay until the end: the garbage collector need not go through these million objects again and again."""
    gc.disable()
    try:
        import_own_share(session.config)
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_own_share(config: pytest.Config) -> None:
    """The processes of xdist all import the same files. Each begins with others: one process rewrites the asserts of a file that pytest has
    not seen yet, which takes longer than the import, and the others find what it wrote."""
    if config.args != ["tests"] or "PYTEST_XDIST_WORKER" not in os.environ:
        return
    number, count = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    files = [file for file in sorted(ROOT.glob("tests/**/test_*.py")) if not pytest_ignore_collect(file.parent, config)]
    for file in files[number::count]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection, which imports it again, reports that
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in WHOLE_FOLDERS:
            item.add_marker(pytest.mark.whole)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason why tests were skipped. A reason says what would enable them."""
    reasons = Counter(reason_of(report) for report in terminalreporter.stats.get("skipped", []))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count:>3}: {reason}")


def reason_of(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, (tuple, list)) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    missing = re.match(r"could not import '(\w+)", reason)
    return f"needs the Python package {missing[1]}: pip install {missing[1].replace('_', '-')}" if missing else reason


@pytest.fixture(scope="session")
def spec() -> Path:
    if not (SHARED / "spec").is_dir():
        pytest.skip("needs the specification beside this checkout (../shared/spec)")
    return SHARED / "spec"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not (SHARED / "data").is_dir():
        pytest.skip("needs the data for tests beside this checkout (../shared/data)")
    return SHARED / "data"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No variable of the machine reaches a test, and no test writes into the user's own folders."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))
    for name in ("DB_PASSWORD", "HF_TOKEN", "SHOAL_API_KEY", "CONFIG_PATH", "TELEMETRY_ALPHA", "LOG_LEVEL", "LOG_FORMAT"):
        monkeypatch.delenv(name, raising=False)
