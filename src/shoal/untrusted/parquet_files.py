"""Parquet files, checked before a library decodes them.

A value that is written once may stand in any number of rows, so a file of some hundred bytes can become any amount of text.

Holds: what the rows of a group become in memory is at most `MOST_GROUP_BYTES`, or `MOST_RATIO` times the group's size in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import ShoalError
from shoal.untrusted.data_files import MOST_RATIO

MOST_GROUP_BYTES = 8 << 30
_MOST_ROWS = 1 << 28
_ROW_BYTES = 8
"""What a row of a column takes at least: a number, or where its text begins."""


def check_parquet(file: Path) -> None:
    """Raises ShoalError where a file is no Parquet file, or would become more than it may."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(file) as opened:
            for number in range(opened.metadata.num_row_groups):
                _check_group(file, opened.metadata.row_group(number), number)
    except (arrow.ArrowException, OSError, ValueError, KeyError, IndexError) as error:
        raise ShoalError(f"{file} is no Parquet file that can be read: {str(error).splitlines()[0]}") from None


def _check_group(file: Path, group: Any, number: int) -> None:
    if group.num_rows > _MOST_ROWS:
        raise ShoalError(f"{file} is refused: a group of it claims {group.num_rows:,} rows, and at most {_MOST_ROWS:,} are read")
    columns = [group.column(at) for at in range(group.num_columns)]
    most = max(MOST_GROUP_BYTES, MOST_RATIO * sum(column.total_compressed_size for column in columns))
    _expect(file, sum(map(_least_bytes, columns)), most)  # now a page can be decompressed
    _expect(file, sum(_most_bytes(file, column, number, most // len(columns)) for column in columns), most)


def _expect(file: Path, size: int, most: int) -> None:
    if size > most:
        raise ShoalError(f"{file} is refused: a group of its rows becomes {size:,} bytes, and {most:,} are read: use smaller groups")


def _least_bytes(column: Any) -> int:
    return int(max(column.total_uncompressed_size, column.num_values * _ROW_BYTES))


def _most_bytes(file: Path, column: Any, number: int, share: int) -> int:
    """An upper bound of what the values of a column become. More of the file is read where a bound exceeds the column's share."""
    least, repeats = _least_bytes(column), column.has_dictionary_page or "DELTA_BYTE_ARRAY" in column.encodings
    if not repeats or column.physical_type not in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"):
        return least
    if (most := int(column.num_values * column.total_uncompressed_size)) <= share or "DELTA_BYTE_ARRAY" in column.encodings:
        return most
    first = next(_dictionaries(file, column.path_in_schema, number, rows=1), None)
    if first is not None and (most := least + column.num_values * max(first.lengths, default=0)) <= share:
        return most
    return least + sum(batch.size for batch in _dictionaries(file, column.path_in_schema, number, rows=1 << 16))


class _Dictionary(NamedTuple):
    """The texts that repeat in some rows."""

    lengths: list[int]
    size: int
    """Of all rows together, in bytes."""


def _dictionaries(file: Path, name: str, number: int, rows: int) -> Iterator[_Dictionary]:
    """The texts of a column, with numbers in place of those that repeat, so that repeating them takes no memory here."""
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(file, read_dictionary=[name]) as opened:
        for batch in opened.iter_batches(batch_size=rows, row_groups=[number], columns=[name]):
            column = batch.column(0)
            while hasattr(column, "flatten") and not hasattr(column, "dictionary"):
                flat = column.flatten()
                column = flat[0] if isinstance(flat, list) else flat
            if hasattr(column, "dictionary"):
                lengths = compute.binary_length(column.dictionary)
                yield _Dictionary(lengths.to_pylist(), compute.sum(lengths.take(column.indices)).as_py() or 0)
            else:
                yield _Dictionary([], column.nbytes)
