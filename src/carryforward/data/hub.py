# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hugging Face Hub, through the optional library `datasets`, with errors that say what to do.

The library keeps rows in memory-mapped files, so a row is read when it is asked for. This file only finds data sets
and their rows; what a row means is for `corpora` to say.
"""

from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

from .texts import Text, text_of


def split_names(path: str, config: str | None) -> list[str]:
    return _ask(path, config, lambda library: library.get_dataset_split_names(path, config))


def load(path: str, config: str | None, split: str, field: str) -> Any:
    """The rows of one split, known to be some and to have `field`."""
    rows = _ask(path, config, lambda library: library.load_dataset(path, config, split=split))
    if field not in rows.column_names:
        fields = ", ".join(map(repr, rows.column_names))
        raise ValueError(f"{path}, split {split!r}, has no field {field!r}: set text_field to one of {fields}.")
    if not len(rows):
        raise ValueError(f"{path}, split {split!r}, is empty: there is no document in it.")
    return rows


def documents(path: str, rows: Any, field: str) -> Iterator[Text]:
    """One document a row."""
    for number, row in enumerate(rows):
        if row[field] is not None:  # an empty cell
            yield Text(f"row-{number}", text_of(row, field, f"{path}, row {number}"))


def digest(rows: Any, *identity: object) -> str:
    """The library's own fingerprint of the rows, together with what else tells them apart."""
    own = getattr(rows, "_fingerprint", None)
    return blake2b(repr((own, len(rows), *identity)).encode(), digest_size=16).hexdigest()


def size(rows: Any, split: str) -> int | None:
    """Bytes of the rows, where the data set says."""
    splits = getattr(getattr(rows, "info", None), "splits", None) or {}
    return getattr(splits.get(split), "num_bytes", None) or None


def _ask(path: str, config: str | None, question: Callable[[Any], Any]) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{path} is no file or folder here, and reading it from the Hugging Face Hub needs the library `datasets`: "
            "pip install carryforward[hub]"
        ) from error
    try:
        return question(datasets)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} is neither a file or folder here nor a data set of the Hugging Face Hub that can be found. Check "
            f"the name; without a connection only data sets loaded before can be. ({error})"
        ) from error
    except Exception as error:  # the library and those below it raise errors of many kinds when there is no connection
        whole = f"{path}:{config}" if config else path
        raise ValueError(
            f"{whole} could not be loaded from the Hugging Face Hub. Check the connection and the name "
            f"(owner/name:config where there are several), or give a folder or file. ({type(error).__name__}: {error})"
        ) from error
