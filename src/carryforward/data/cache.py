# SPDX-License-Identifier: Apache-2.0
"""Cache entries that are folders: each appears whole or not at all, however many processes make it at once.

What is in an entry, and whether it is sound, is not known here.
"""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

Entry = TypeVar("Entry")

_STALE = 3600  # seconds after which a folder that nobody has written to belongs to nobody


def root(cache: Path | str | None) -> Path:
    """Where entries lie: `cache`, `$CARRYFORWARD_CACHE`, or `carryforward` in the user's cache folder."""
    chosen = cache or os.environ.get("CARRYFORWARD_CACHE")
    if not chosen:
        chosen = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "carryforward")
    return Path(chosen).expanduser().absolute()


@contextlib.contextmanager
def beside(folder: Path) -> Iterator[Path]:
    """A new folder next to `folder` to write to, gone in the end. What killed processes left long ago is removed."""
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - max(path.stat().st_mtime for path in (left, *left.iterdir())) > _STALE:
                shutil.rmtree(left, ignore_errors=True)
    new = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        new.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            f"cache={str(folder.parent)!r} cannot be written to ({error.strerror}). Give another folder, or set "
            "CARRYFORWARD_CACHE to one."
        ) from error
    try:
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)


def put(new: Path, folder: Path, open_entry: Callable[[Path], Entry | None]) -> Entry:
    """Give a finished entry its name, and open it. Where another process was faster, its entry is used."""
    for _ in range(10):
        with contextlib.suppress(OSError):  # there is an entry already
            new.rename(folder)
        if (entry := open_entry(folder)) is not None:
            return entry
        aside = new.with_name(f"{new.name}.damaged.tmp")  # a folder cannot be replaced in one step
        with contextlib.suppress(OSError):
            folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    raise ValueError(f"{folder} cannot be replaced. Remove it, or set CARRYFORWARD_CACHE to another folder.")
