"""Merging the episodes that workers report beside their updates: rows of numbers whose first is the importance.

Holds: rows are taken from contributions in turn, the most important of each first, so no worker can crowd out the others.

Shapes: N contributions, W rows of a contribution, R numbers of a row, B numbers that a contribution has beside its update.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class EpisodeRows(NamedTuple):
    """Where the episode rows are in a worker's report."""

    at: int
    rows: int
    width: int

    def put(self, together_B: Tensor, reports_NB: Tensor) -> Tensor:
        """Replace the rows in the mean report `together_B` with rows chosen from the contributions: a mean of rows has no meaning."""
        together_B[self.at : self.at + self.rows * self.width] = self._chosen(reports_NB).flatten().to(together_B)
        return together_B

    def _chosen(self, reports_NB: Tensor) -> Tensor:
        """[W, R]: first the best row of each contribution, then the second of each; within a rank the more important first."""
        rows_NWR = reports_NB[:, self.at : self.at + self.rows * self.width].view(-1, self.rows, self.width)
        importance_NW, order_NW = rows_NWR[:, :, 0].nan_to_num(-1.0).sort(stable=True, dim=1, descending=True)
        rows_NWR = rows_NWR.gather(1, order_NW[:, :, None].expand_as(rows_NWR))
        by_importance = importance_NW.t().argsort(stable=True, dim=1, descending=True)
        rows_WNR = rows_NWR.transpose(0, 1).gather(1, by_importance[:, :, None].expand(-1, -1, self.width))
        rows_XR = rows_WNR.flatten(0, 1)
        there_X = (rows_XR[:, 0] > 0).nonzero().flatten()[: self.rows]
        chosen_WR = rows_XR.new_full((self.rows, self.width), -1.0)
        chosen_WR[: len(there_X)] = rows_XR[there_X]
        return chosen_WR
