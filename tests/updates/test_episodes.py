"""Episodes that several workers tell of: whole rows are taken, from each in turn."""

from __future__ import annotations

import torch

from shoal.updates.episodes import EpisodeRows

ROWS = EpisodeRows(at=1, rows=3, width=2)


def report(*importance: float) -> torch.Tensor:
    """Rows of an importance and a number; before them one that is averaged."""
    rows = [[one, 10 + one] for one in importance] + [[-1.0, -1.0]] * (3 - len(importance))
    return torch.tensor([7.0, *(number for row in rows for number in row)])


def chosen(*reports: torch.Tensor) -> list[float]:
    together = ROWS.put(torch.full((7,), 7.0), torch.stack(reports))
    assert together[0] == 7
    assert all(number in (-1.0, 10 + one) for one, number in together[1:].view(3, 2).tolist())
    return together[1::2].tolist()


def test_the_best_of_each_come_first() -> None:
    assert chosen(report(1.0, 9.0), report(2.0, 3.0)) == [9.0, 3.0, 2.0]


def test_one_who_claims_much_does_not_keep_out_the_others() -> None:
    assert chosen(report(2.0**99, 2.0**99, 2.0**99), report(0.5), report(0.25)) == [2.0**99, 0.5, 0.25]


def test_where_few_are_told_of_the_rest_is_empty() -> None:
    assert chosen(report(0.5), report()) == [0.5, -1.0, -1.0]


def test_what_is_not_a_number_is_nothing() -> None:
    assert chosen(report(float("nan")), report(0.5)) == [0.5, -1.0, -1.0]
