"""Every unit of the data is learned from once, named as given up, or named as not done; an audit says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator.audit.files import gather
from shoal.coordinator.audit.run import AuditReport, audit
from shoal.coordinator.audit.units import LagRule
from shoal.coordinator.driver import CoordinatorDriver
from shoal.coordinator.turn import Turn
from shoal.updates import staleness
from tests.coordinator.test_driver import STRATEGIES, Walker, World


class Units(World):
    """Eight epochs of six units, of which a run takes so many versions at most."""

    def __init__(self, folder: Path, most: int | None, seed: int = 5) -> None:
        self.most = most
        super().__init__(folder, STRATEGIES["workunits"], seed)

    def begin(self, resume: bool) -> CoordinatorDriver:
        if self.most is not None:
            self.plan = self.plan._replace(total_batches=None, total_steps=self.most)
        return super().begin(resume)

    def live(self, steps_s: tuple[float, ...] = (1.0, 2.0, 9.0)) -> None:
        for number, step_s in enumerate(steps_s):
            Walker(self, f"w{number}", step_s)
        self.run()

    def audited(self, complete: bool = False) -> AuditReport:
        found: list[str] = []
        evidence = gather(self.folder / "coordinator", sorted((self.folder / "workers").glob("*.jsonl")), found)
        return audit(evidence, found, units=True, complete=complete, lags=LagRule(None))


def test_a_run_that_did_everything_is_complete(tmp_path: Path) -> None:
    world = Units(tmp_path, None)
    world.live()
    report = world.audited(complete=True)
    assert report.violations == []
    assert "units     48 learned from, 0 given up, 0 passed over and not done yet" in report.checked


def test_units_after_the_last_epoch_of_a_run_that_was_made_shorter_are_told(tmp_path: Path) -> None:
    world, found = Units(tmp_path, None), list[str]()
    world.live()
    evidence = gather(world.folder / "coordinator", [], found)
    assert evidence.snapshot is not None
    assert evidence.snapshot.cut is not None
    per_epoch, per_unit, epochs = evidence.snapshot.cut
    evidence.snapshot = evidence.snapshot._replace(cut=(per_epoch, per_unit, epochs - 1))
    report = audit(evidence, found, units=True, lags=LagRule(None))
    assert report.violations == []
    assert "units     6 learned from are of epochs after the last: the run was made shorter" in report.checked


def test_units_that_were_offered_ahead_are_no_gap_when_the_run_ends_early(tmp_path: Path) -> None:
    """Two of five workers make a version; what the others had when the run ended is done by nobody."""
    undone: list[str] = []
    for most in range(2, 24):
        world = Units(tmp_path / str(most), most, seed=most)
        world.live((1.0, 0.9, 0.6, 0.5, 0.4))
        report = world.audited()
        assert report.violations == []
        undone += [line for line in report.checked if line.startswith("not done")]
        assert "was never done, and the run says that it is complete" in world.audited(complete=True).violations[0]
    assert any("batches 10 to 11" in line for line in undone), "the last unit of an epoch, passed over for units of the next one"


def test_units_that_the_coordinator_passed_over_are_named(tmp_path: Path) -> None:
    world = Units(tmp_path, 16)
    for number in (3, 7, 8):
        world.driver.coordinator.replayed.settled.add(number)
    world.live()
    violations = world.audited().violations
    assert "epoch 1, batches 6 to 7 is nowhere: neither learned from nor given up, and it would not be given out again" in violations
    assert "epoch 2, batches 2 to 5 is nowhere: neither learned from nor given up, and it would not be given out again" in violations


def test_units_that_were_given_up_are_named_with_the_reason(tmp_path: Path) -> None:
    world = Units(tmp_path, None)
    units = world.driver.coordinator.units
    assert units is not None
    units.leases.patience_s = 0.0
    given_up = None
    while given_up is None:
        lease = units.leases.claim("mallory", world.now)
        assert lease is not None
        given_up = units.leases.fail("mallory", lease.unit, "no \x1b[31mwish", world.now)
    turn = Turn(world.now, world.driver.coordinator.replayed, {})
    units._settle_as_failed(turn, given_up)
    world.driver._carry_out(turn.effects)
    world.live()
    report = world.audited(complete=True)
    assert report.violations == []
    assert any(line.startswith("units     47 learned from, 1 given up") for line in report.checked)
    assert any(line.startswith("given up  epoch ") and "no ?[31mwish" in line for line in report.checked)


def test_a_unit_that_is_given_out_again_after_it_was_learned_from(tmp_path: Path) -> None:
    world = Units(tmp_path, 16)
    world.live()
    found: list[str] = []
    evidence = gather(tmp_path / "coordinator", [], found)
    assert evidence.snapshot is not None
    evidence.snapshot = evidence.snapshot._replace(settled_below=evidence.snapshot.settled_below - 1)
    assert "is settled, and would be given out again" in audit(evidence, found, units=True).violations[0]


def test_a_late_result_that_counted_too_much_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Units(tmp_path / "fair", None)
    world.live((1.0, 2.0, 9.0))
    lags = [version["version"] - 1 - one[2] for version in _versions(world) for one in version["from"]]
    assert max(lags) > 0, "some results came late"
    assert world.audited().violations == []
    bound = audit(gather(world.folder / "coordinator", [], []), [], units=True, lags=LagRule(max(lags) - 1)).violations
    assert bound
    assert all(f"lags {max(lags)} versions; strategy.max_lag is {max(lags) - 1}" in one for one in bound)
    monkeypatch.setattr(staleness, "weight", lambda lag: 1.0)
    unfair = Units(tmp_path / "unfair", None)
    unfair.live((1.0, 2.0, 9.0))
    assert "lags 1 versions and counted 1, not 0.5" in unfair.audited().violations[0]


def _versions(world: Units) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (world.folder / "coordinator" / "ledger.jsonl").read_text().splitlines())
    return [line for line in lines if "version" in line]
