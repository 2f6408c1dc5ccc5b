# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole: written beside, then put in place. Folders that do are in `checkpoints` and `data.cache`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | os.PathLike) -> Iterator[Path]:
    """A path to write to, which then takes the place of `path`. If writing fails, nothing has changed."""
    path = Path(path)
    beside = path.with_name(f".{os.getpid()}.{path.name}")  # the ending stays: some writers go by it
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Write a text file whole, its line ends as they are."""
    with written_whole(path) as beside:
        beside.write_text(text, encoding="utf-8", newline="")
