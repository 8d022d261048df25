"""Rows of a class's database that were changed outside Shoal: a result counts for the unit that it is of, or for none.

Records, the ledger and snapshots have checksums: tests/transports/test_postgres_damage.py. PostgreSQL notices what a disk has changed.
"""

from __future__ import annotations

import pytest

from shoal.coordinator.events import LeaseResult, UnusableResult
from shoal.coordinator.units.cut import DataUnit
from shoal.protocol.messages import Delivered, Failed
from tests.coordinator.test_work_units import Board, made
from tests.support.small_cluster import encoded

FLIPPED = [DataUnit(0, 3, 2), DataUnit(0, 2, 3), DataUnit(0, 2**40, 2), DataUnit(2**40, 2, 2), DataUnit(0, -2, 2), DataUnit(-1, 2, 2)]
"""What may stand in the row of the unit of two batches that begins at the second batch."""


@pytest.mark.parametrize("unit", FLIPPED)
@pytest.mark.parametrize("kind", ["delivered", "failed", "unusable"])
def test_a_result_of_what_is_no_unit_is_not_counted_and_the_run_ends_complete(unit: DataUnit, kind: str) -> None:
    board = Board(made())
    board.offered.discard(1)  # as the database has it: this unit is done
    if kind == "unusable":
        board.carry_out(board.coordinator.handle(UnusableResult(unit.epoch, unit.start, "it cannot be read"), 0.0))
    else:
        delivered = Delivered("w", 1, 0, 2.0, 2, *unit, {})
        asked = delivered if kind == "delivered" else Failed(*unit, "broken")
        board.carry_out(board.coordinator.handle(LeaseResult(asked, encoded(1.0, 1.0, 1.0, 1.0)), 0.0))
        assert ["the row of a result in the database is damaged" in note for note in board.notes] == [True]
    assert board.records == []
    assert 1 in board.offered, "the unit is on offer again"
    assert board.offered <= set(range(10))
    while board.offered:
        board.deliver(min(board.offered))
    assert board.coordinator.finished
    assert board.spans() == [(epoch, start, 2) for epoch in range(2) for start in range(0, 10, 2)]
