"""Processes of a real run are killed and come back: nothing confirmed is lost, and the run ends as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.kill_and_recover import Victims, audit

pytestmark = pytest.mark.whole

STEPS, SLOWDOWN = 800, 8.0
"""The last kill is due at version 450: what comes after it takes longer than this process may stand still."""


def test_a_run_survives_the_death_of_its_processes(tmp_path: Path) -> None:
    victims = Victims(tmp_path, "{kind: async, contributions_per_update: 2}", steps=STEPS, workers=2, slowdown=SLOWDOWN)
    try:
        victims.start_workers()
        assert sum(1 for _ in victims.killing(6, random.Random(4), until=540 / STEPS)) == 6
        summary = victims.finish()
    finally:
        victims.close()
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert victims.kills["coordinator"] > 1
    assert victims.kills["worker"] > 1
    assert "nothing is missing, nothing is counted twice" in audit(victims.run)
    eventually(lambda: not victims.left_behind())
