"""Thousands of flips and cuts, and a disk that fails at every byte: the same tests as in every run of the suite, for minutes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.coordinator import test_damaged_state as damaged
from tests.coordinator import test_failing_disk as failing
from tests.coordinator.test_damaged_state import Killed, killed  # noqa: F401
from tests.coordinator.test_failing_disk import Crash, Disk, inserted  # noqa: F401

pytestmark = pytest.mark.timeout(1800)


def test_thousands_of_damages_are_made_up_for_or_told(killed: Killed, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(damaged, "DAMAGES", 2000)
    damaged.test_whatever_is_flipped_or_cut_off_is_made_up_for_or_told(killed)


@pytest.mark.parametrize("problem", [Crash, failing._full])
def test_the_disk_may_fail_at_every_byte(
    tmp_path: Path,
    inserted: Callable[[Disk], None],  # noqa: F811
    problem: Callable[[], BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failing, "POSITIONS", 1 << 30)
    failing.test_wherever_the_disk_fails_what_was_confirmed_comes_back(tmp_path, inserted, problem)
