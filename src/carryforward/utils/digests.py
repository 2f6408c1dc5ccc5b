# SPDX-License-Identifier: Apache-2.0
"""Digests of files: damage that keeps a file's size is found when it is read.

SHA-256, which processors compute at 1 to 2 GB per second; `sha256sum` gives the same digits.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path


def digest_file(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_files(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """The digest of each file, by its path relative to `folder`."""
    return {path.relative_to(folder).as_posix(): digest_file(path) for path in files}


def damaged_file(folder: Path, digests: dict[str, str]) -> str | None:
    """The first file that is missing or whose content differs from its digest; None if all are intact."""
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file() or digest_file(path) != digest:
            return name
    return None
