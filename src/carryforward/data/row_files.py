# SPDX-License-Identifier: Apache-2.0
"""Files with a row for each document: JSON lines, JSON and Parquet.

JSON lines and Parquet are read as a stream. Of a Parquet file, some rows of the text's column are in memory at a time,
and the page that they stand in, whose size was chosen when the file was written. A JSON file is parsed as a whole.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..utils.install import import_pyarrow
from ..utils.parsing import parse_json
from . import texts
from .texts import Text, get_text

_ROWS = 64  # of a Parquet file, in memory at a time
_BUFFER = 1 << 20  # bytes; without a buffer, all pages of a row group would be read at once

Belongs = Callable[[int], bool]


@dataclass(frozen=True)
class RowFormat:
    """How to read a kind of file.

    Attributes:
        numbers: the numbers of the rows of a file.
        name: a row's name, by its number.
        read: yields the texts of those rows of a file, in a field, whose number belongs to a split.
        size: bytes of the texts in a field, about.
    """

    numbers: Callable[[Path], Sequence[int]]
    name: Callable[[int], str]
    read: Callable[[Path, str, Belongs], Iterator[Text]]
    size: Callable[[Path, str], int]


def _line_numbers(path: Path) -> Sequence[int]:
    return array("q", (number for number, line in enumerate(texts.read_lines(path), 1) if line.strip()))


def _json_rows(path: Path) -> list[Any]:
    try:
        rows = parse_json(texts.read_text(path), path)
    except ValueError as error:
        raise ValueError(f"{error} A file with one object on each line must be named .jsonl.") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} must hold a list of objects, one for each document.")
    return rows


def _read_json(path: Path, field: str, belongs: Belongs) -> Iterator[Text]:
    for number, row in enumerate(_json_rows(path)):
        if belongs(number):
            yield Text(_row_name(number), get_text(row, field, f"{path}, row {number}"))


def _open_parquet(path: Path) -> Any:
    pyarrow = import_pyarrow()
    texts.file_size(path)  # refuses what cannot be read
    try:
        return pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file, or it is damaged ({error}). Write it again.") from error


def _check_columns(file: Any, path: Path, fields: Sequence[str]) -> None:
    """Refuse fields that are not columns of plain values."""
    columns = file.schema_arrow.names
    plain = [file.schema.column(i).path for i in range(len(file.schema))]
    for field in fields:
        if field not in columns:
            known = ", ".join(map(repr, columns))
            raise ValueError(f"{path} has no field {field!r}: set text_field to one of {known}.")
        if field not in plain:
            kind = file.schema_arrow.field(field).type
            raise ValueError(f"{path}: text_field={field!r} must be a column of strings, not of {kind}.")


def read_parquet_rows(path: Path, fields: Sequence[str]) -> Iterator[list[Any]]:
    """Yield the values of some columns, row by row."""
    number = 0
    with _open_parquet(path) as file:
        _check_columns(file, path, fields)
        try:
            for batch in file.iter_batches(_ROWS, columns=list(fields), use_threads=False):
                columns = [batch.column(field).to_pylist() for field in fields]
                for row in zip(*columns, strict=True):
                    yield list(row)
                    number += 1
        except (import_pyarrow().ArrowException, OSError) as error:
            raise ValueError(f"{path} is damaged from row {number} on ({error}). Write it again.") from error


def parquet_columns(path: Path) -> list[str]:
    """The names of a file's columns."""
    with _open_parquet(path) as file:
        return file.schema_arrow.names


def _read_parquet(path: Path, field: str, belongs: Belongs) -> Iterator[Text]:
    for number, (text,) in enumerate(read_parquet_rows(path, [field])):
        if text is not None and belongs(number):  # None: an empty cell
            yield Text(_row_name(number), get_text({field: text}, field, f"{path}, row {number}"))


def _parquet_rows(path: Path) -> Sequence[int]:
    with _open_parquet(path) as file:
        return range(file.metadata.num_rows)


def _parquet_size(path: Path, field: str) -> int:
    with _open_parquet(path) as file:
        _check_columns(file, path, [field])
        column = [file.schema.column(i).path for i in range(len(file.schema))].index(field)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        return sum(group.column(column).total_uncompressed_size for group in groups)


def _row_name(number: int) -> str:
    return f"row-{number}"


FORMATS = {
    ".jsonl": RowFormat(
        _line_numbers, lambda number: f"line-{number}", texts.read_json_lines, lambda path, field: texts.file_size(path)
    ),
    ".parquet": RowFormat(_parquet_rows, _row_name, _read_parquet, _parquet_size),
    ".json": RowFormat(
        lambda path: range(len(_json_rows(path))), _row_name, _read_json, lambda path, field: texts.file_size(path)
    ),
}
