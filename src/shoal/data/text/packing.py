"""Whole documents in rows of a fixed length, none of them cut, so that little is padded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.data.text.encoding import Encoding, Sample, full


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """The numbers of the documents of each row. Best fit decreasing: the longest document comes first, and each goes into the row with
    the least room that it fits into. Holds: the result depends on the lengths alone.

    Bit r of `rooms` is set if a row has r tokens left: the least room that suffices is found without a search.
    """
    rows: list[list[int]] = []
    rows_with: list[list[int]] = [[] for _ in range(room + 1)]
    rooms = 0
    for number in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        fitting = rooms >> lengths[number]
        if fitting:
            left = lengths[number] + (fitting & -fitting).bit_length() - 1
            row = rows_with[left].pop()
            rooms ^= 0 if rows_with[left] else 1 << left
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(number)
        left -= lengths[number]
        if left:
            rows_with[left].append(row)
            rooms |= 1 << left
    return sorted(sorted(row) for row in rows)


def packed_rows(samples: Sequence[Sample], encoding: Encoding) -> list[Sample]:
    """Samples of one document each as rows of several."""
    rows = best_fit([len(sample.inputs) for sample in samples], encoding.sequence_length)
    return [_row([samples[number] for number in row], encoding) for row in rows]


def _row(samples: Sequence[Sample], encoding: Encoding) -> Sample:
    row = Sample(
        np.concatenate([sample.inputs for sample in samples]),
        np.concatenate([sample.labels for sample in samples]),
        tuple(origin for sample in samples for origin in sample.origins),
        lengths=tuple(len(sample.inputs) for sample in samples),
    )
    return full(row, encoding.sequence_length, encoding.tokenizer.pad_id)
