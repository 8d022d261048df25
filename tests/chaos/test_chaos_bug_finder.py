"""Hostile schedules by the thousand: all planted mistakes are found within a minute each, and in the coordinator as it is, none."""

from __future__ import annotations

import pytest

from tests.support.bug_finder import Found, look
from tests.support.planted_mistakes import MISTAKES

MINUTES = 10
"""How long to look for mistakes that were not planted."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_planted_mistake_is_found_within_a_minute(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[mistake](monkeypatch)
    found = look(0, longest_s=60.0)
    assert isinstance(found, Found), f"none of {found} schedules broke a promise"
    print(f"\n{mistake}: found with schedule {found.seed}, after {found.tried}\n{found.case.story()}")
    assert len(found.case.schedule) <= 15


@pytest.mark.timeout(60 * MINUTES + 300)
def test_no_schedule_breaks_a_promise() -> None:
    found = look(10**6, longest_s=60.0 * MINUTES)
    assert not isinstance(found, Found), f"schedule {found.seed}:\n{found.case.story()}"
    print(f"\n{found:,} schedules, and none broke a promise")
