# SPDX-License-Identifier: Apache-2.0
"""Cache entries: folders that are created once, even if several processes need the same one at the same time.

This module does not know what an entry contains: the caller writes it, and checks that it is intact.
"""

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from ..utils.files import clear_leftovers, delete_folder, publish, staging_folder

Entry = TypeVar("Entry")


def cache_root(cache: Path | str | None) -> Path:
    """Return the cache folder: `cache`, `$CARRYFORWARD_CACHE`, or `carryforward` in the user's cache folder."""
    if cache == "":
        raise ValueError("cache='' is empty: give a folder, or leave it out for the user's cache folder.")
    folder = cache or os.environ.get("CARRYFORWARD_CACHE")
    if not folder:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "carryforward")
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{folder}: there is no such home folder. Set CARRYFORWARD_CACHE to a folder.") from error


def open_or_create(
    folder: Path, open_entry: Callable[[Path], Entry | None], write_entry: Callable[[Path], None]
) -> Entry:
    """Open a cache entry, or create it if it is missing or damaged.

    Args:
        open_entry: opens the entry in a folder; None if it is missing or damaged.
        write_entry: writes the entry to a folder.
    """
    if (entry := open_entry(folder)) is not None:
        with suppress(OSError):  # a cache that cannot be written to can be read
            clear_leftovers(folder.parent, folder.name)
        return entry
    damaged = folder.exists()
    with ExitStack() as stack:
        try:
            staging = stack.enter_context(staging_folder(folder.parent, folder.name))
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            raise ValueError(
                f"cache={str(folder.parent)!r} cannot be written to ({error.strerror}). Give another folder, or set "
                "CARRYFORWARD_CACHE to one."
            ) from error
        write_entry(staging)
        if damaged:
            with suppress(OSError):  # another process has just deleted it
                delete_folder(folder)
        for _ in range(10):
            try:
                publish(staging, folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process has just created it
                    raise
            if (entry := open_entry(folder)) is not None:
                return entry
            with suppress(OSError):  # another process has just deleted it
                delete_folder(folder)
    raise ValueError(f"{folder} cannot be replaced. Delete it, or set CARRYFORWARD_CACHE to another folder.")
