"""Side texts: contexts and retrieved passages that a model attends to while it generates or scores texts.

Shapes: B rows, L tokens, R some of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_NO_TOKEN = -1


class PassageSearch(Protocol):
    """Finds passages for texts."""

    @property
    def chunk_size(self) -> int:
        """Tokens of a chunk; each complete chunk is a new query."""

    def text_columns(self, texts: Sequence[Sequence[int]], own: Sequence[Sequence[str]], starts: Sequence[int]) -> dict[str, Tensor]:
        """Passages for each text, none of them from the text's own documents. `starts`: the column where each text begins."""
        ...


class SideTexts(NamedTuple):
    """The side texts of the rows of a batch."""

    columns: Callable[[Sequence[int], Sequence[Sequence[int]], Sequence[int]], dict[str, Tensor]]
    """The batch columns of the side texts of some rows, given their numbers, their tokens, and the column where each begins."""
    every: int | None
    """Tokens after which side texts may change; None: they never do."""


def make_side_texts(
    finder: PassageSearch | None, contexts: Sequence[Sequence[int]] = (), own: Sequence[Sequence[str]] = ()
) -> SideTexts | None:
    """Side texts from retrieved passages and from the context of each row. `contexts`, and `own` (documents of a row, which are excluded
    from its passages), have an entry for each row or are empty. None: there are no side texts."""
    if finder is None and not contexts:
        return None

    def columns(rows: Sequence[int], texts: Sequence[Sequence[int]], starts: Sequence[int]) -> dict[str, Tensor]:
        found = {"context_ids": _filled_up([contexts[row] for row in rows])} if contexts else {}
        if finder is not None:
            found |= finder.text_columns(texts, [own[row] if own else () for row in rows], starts)
        return found

    return SideTexts(columns, None if finder is None else finder.chunk_size)


def side_text_columns(beside: SideTexts | None, ids_BL: Tensor, mask_BL: Tensor) -> dict[str, Tensor]:
    """Batch columns of the side texts of complete rows, on their device. `mask_BL`: False at padding, on either side."""
    if beside is None:
        return {}
    texts, starts = _without_padding(ids_BL, mask_BL)
    return {name: value.to(ids_BL.device) for name, value in beside.columns(range(len(texts)), texts, starts).items()}


class SideTextReader:
    """Gives a model the side texts of rows that grow during generation."""

    def __init__(self, model: Any, beside: SideTexts | None, any_of_all: Callable[[bool], bool] = bool) -> None:
        """`any_of_all`: over processes that must compute together, whether any has new side texts."""
        self.model, self.beside, self.any_of_all = model, beside, any_of_all
        self.texts: list[list[int]] = []
        self.starts: list[int] = []
        self.going: list[bool] = []
        """Which rows still grow; the others are not searched for any more. Empty: all of them."""
        self._chunks: list[int] = []
        """Number of chunks of each row that have been searched for."""

    def after(self, new_BL: Tensor, mask_BL: Tensor | None = None) -> dict[str, Any]:
        """Arguments for the model's next call; empty where nothing is new. `mask_BL`: False at padding before the first tokens."""
        if self.beside is None:
            return {}
        if not self.texts:
            self.texts, self.starts = _without_padding(new_BL, mask_BL)
            return self._given(range(len(self.texts)))
        for row, new in enumerate(new_BL.tolist()):
            if not self.going or self.going[row]:
                self.texts[row] += new
        if self.beside.every is None:
            return {}
        due = [row for row, chunks in enumerate(self._looked_up()) if chunks != self._chunks[row]]
        return self._given(due or [0]) if self.any_of_all(bool(due)) else {}

    def _looked_up(self) -> list[int]:
        every = self.beside.every if self.beside is not None else None
        return [0 if every is None else (len(text) - 1) // every for text in self.texts]

    def _given(self, rows: Sequence[int]) -> dict[str, Any]:
        assert self.beside is not None
        self._chunks = self._looked_up()
        found = self.beside.columns(rows, [self.texts[row] for row in rows], [self.starts[row] for row in rows])
        device = next(self.model.parameters()).device
        columns = {name: value.to(device) for name, value in found.items()}
        if len(rows) < len(self.texts):
            columns["rows_R"] = torch.tensor(rows, device=device)
        return {"beside": self.model.new_beside(**columns)}


def _without_padding(ids_BL: Tensor, mask_BL: Tensor | None) -> tuple[list[list[int]], list[int]]:
    """The tokens of each row, and the column of the first."""
    if mask_BL is None:
        return ids_BL.tolist(), [0] * len(ids_BL)
    rows = [ids_L[mask_L].tolist() for ids_L, mask_L in zip(ids_BL.cpu(), mask_BL.bool().cpu(), strict=True)]
    return rows, mask_BL.long().argmax(1).tolist()


def _filled_up(contexts: Sequence[Sequence[int]]) -> Tensor:
    """Contexts [B, 1, C], at least one token wide."""
    longest = max(1, *map(len, contexts))
    return torch.tensor([[[*one, *[_NO_TOKEN] * (longest - len(one))]] for one in contexts])
