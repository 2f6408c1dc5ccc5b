# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hugging Face Hub, through the optional library `datasets`, with errors that say what to do.

The library memory-maps its files, so a row is read only when it is accessed.
"""

from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

from ..utils.install import install_hint
from .texts import Text, get_text


def split_names(path: str, config: str | None) -> list[str]:
    """Return the names of a data set's splits."""
    return _call_datasets(path, config, lambda library: library.get_dataset_split_names(path, config))


def load_rows(path: str, config: str | None, split: str, field: str) -> Any:
    """Return the rows of one split; raise a ValueError if there are none, or if they have no `field`."""
    rows = _call_datasets(path, config, lambda library: library.load_dataset(path, config, split=split))
    if field not in rows.column_names:
        fields = ", ".join(map(repr, rows.column_names))
        raise ValueError(f"{path}, split {split!r}, has no field {field!r}: set text_field to one of {fields}.")
    if not len(rows):
        raise ValueError(f"{path}, split {split!r}, is empty: there is no document in it.")
    return rows


def read_texts(path: str, rows: Any, field: str) -> Iterator[Text]:
    """Yield one document per row."""
    for number, row in enumerate(rows):
        if row[field] is not None:  # an empty cell
            yield Text(f"row-{number}", get_text(row, field, f"{path}, row {number}"))


def digest_rows(rows: Any, *identity: object) -> str:
    """Return a digest of the library's fingerprint of the rows and of `identity`."""
    fingerprint = getattr(rows, "_fingerprint", None)
    return blake2b(repr((fingerprint, len(rows), *identity)).encode(), digest_size=16).hexdigest()


def size_in_bytes(rows: Any, split: str) -> int | None:
    """Return the size of the rows, or None if the data set does not state it."""
    splits = getattr(getattr(rows, "info", None), "splits", None) or {}
    return getattr(splits.get(split), "num_bytes", None) or None


def _call_datasets(path: str, config: str | None, function: Callable[[Any], Any]) -> Any:
    """Call `function` with the library `datasets`; turn its errors into a ValueError that says what to do."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{path} is not a local file or folder, and reading it from the Hugging Face Hub needs the library "
            f"`datasets`: {install_hint('hub')}"
        ) from error
    try:
        return function(datasets)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} is neither a local file or folder nor a data set found on the Hugging Face Hub. Check the name; "
            f"without a connection, only data sets that were loaded before are available. ({error})"
        ) from error
    except Exception as error:  # without a connection, `datasets` raises errors of many types
        name = f"{path}:{config}" if config else path
        raise ValueError(
            f"{name} could not be loaded from the Hugging Face Hub. Check the connection and the name "
            f"(owner/name:config if there are several), or give a folder or file. ({type(error).__name__}: {error})"
        ) from error
