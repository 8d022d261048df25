"""The bug finder finds planted mistakes, and tells them as short stories. (`make chaos` looks for all of them, and for real ones.)"""

from __future__ import annotations

import pytest

from tests.support.bug_finder import Found, drawn, look
from tests.support.planted_mistakes import MISTAKES
from tests.support.processes import HANG_S

QUICK = ["a contribution that comes again is taken again", "a snapshot forgets open rounds", "that a round closed is not kept"]
QUICK += ["what two journals hold is counted twice"]


@pytest.mark.parametrize("mistake", QUICK)
def test_a_planted_mistake_is_found_and_shrunk(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[mistake](monkeypatch)
    found = look(0, longest_s=HANG_S)
    assert isinstance(found, Found), f"none of {found} schedules broke a promise"
    assert len(found.case.schedule) <= 15
    assert found.case.broken(), "the story can be told again"
    assert len(found.case.story().splitlines()) <= 17


def test_a_coordinator_without_mistakes_breaks_no_promise() -> None:
    assert look(1000, longest_s=HANG_S, most=40) == 40


def test_a_seed_draws_the_same_schedule_for_ever() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
