"""Whoever watches a class at a terminal is told who comes and who leaves."""

from __future__ import annotations

from typing import Any

from shoal.runs.monitoring.members import ArrivalNotices


def rows(*names: str, gone: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    return [{"name": name, "alive": name not in gone} for name in (*names, *gone)]


def test_each_is_told_once_when_it_comes_and_once_when_it_leaves() -> None:
    attendance = ArrivalNotices()
    assert list(attendance.update(rows("mia", "noah"))) == ["mia joined", "noah joined"]
    assert list(attendance.update(rows("mia", "noah"))) == []
    assert list(attendance.update(rows("mia", gone=("noah",)))) == ["noah left"]


def test_a_crowd_is_a_number_and_a_name_steers_no_terminal() -> None:
    attendance = ArrivalNotices()
    assert list(attendance.update(rows(*(f"student-{number}" for number in range(30))))) == ["30 workers joined"]
    assert "\x1b" not in "".join(ArrivalNotices().update(rows("evil\x1b[31m")))
