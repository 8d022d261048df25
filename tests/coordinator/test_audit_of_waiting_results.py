"""Results that lie in a database, confirmed, are not lost while nobody coordinates."""

from __future__ import annotations

import pytest

from shoal.coordinator.audit.files import AuditedReceipt, AuditInput, gather_from
from shoal.coordinator.audit.run import audit


@pytest.mark.parametrize(("waiting", "found"), [([("mia", 3)], 0), ([("mia", 4)], 1), ([], 1)])
def test_a_confirmed_result_that_waits_in_the_database_is_not_lost(waiting: list[tuple[str, int]], found: int) -> None:
    evidence = AuditInput(receipts=[("mia.jsonl:1", AuditedReceipt("mia", 3, "accepted", 0))])
    report = audit(gather_from(evidence, [], None, [], waiting), [])
    assert len([one for one in report.violations if "is nowhere" in one]) == found
    assert any("until the coordinator comes back" in line for line in report.checked) == bool(waiting)
