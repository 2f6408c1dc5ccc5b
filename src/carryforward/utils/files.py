# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole: written beside, then put in place. Folders that do are in `checkpoints` and `data.cache`."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LONGEST = 100  # characters of a name that is to be read


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """A path to write to, which then takes the place of `path`. If writing fails, nothing has changed."""
    path = Path(path)
    beside = path.with_name(f".{os.getpid()}.{path.name}")  # the ending stays: some writers go by it
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def name_of(parts: Sequence[str], how: Any) -> str:
    """What to call a result's file: readable parts, and a digest of them and of what else tells it from others."""
    digest = hashlib.blake2b(json.dumps([*parts, how], sort_keys=True).encode(), digest_size=3).hexdigest()
    return re.sub(r"[^\w.-]+", "-", "-".join(parts)).strip("-.")[-_LONGEST:] + f"-{digest}"


def write_json(path: str | os.PathLike, content: Any) -> None:
    """Write JSON whole: in ASCII, so that any locale reads it and names that are no Unicode can be written."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file whole, its line ends as they are."""
    with atomic_write(path) as beside:
        beside.write_text(text, encoding="utf-8", newline="")
