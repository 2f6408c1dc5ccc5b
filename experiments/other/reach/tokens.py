# SPDX-License-Identifier: Apache-2.0
"""Tokenised documents in one file, and large files in pieces."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from carryforward.data.documents import Documents
from carryforward.utils.files import atomic_write, write_text

_COUNTS = ("lengths", "words", "bytes", "line_ends")
_ABOUT = ("name", "split", "key", "max_tokens")


def save(path: Path, texts: dict[str, Documents]) -> None:
    """Write token ids and counts: no text."""
    arrays: dict[str, Any] = {}
    for name, documents in texts.items():
        arrays[f"{name}.tokens"] = np.concatenate([*documents])
        arrays |= {f"{name}.{count}": getattr(documents, count) for count in _COUNTS}
        arrays[f"{name}.about"] = np.array(json.dumps({key: getattr(documents, key) for key in _ABOUT}))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        np.savez_compressed(temporary, **arrays)


def load(path: Path) -> dict[str, Documents]:
    """Read what `save` wrote; documents are named by numbers."""
    with np.load(path) as file:
        names = [key.removesuffix(".tokens") for key in file.files if key.endswith(".tokens")]
        return {name: _documents(file, name) for name in names}


def _documents(file: Any, name: str) -> Documents:
    counts = {count: file[f"{name}.{count}"] for count in _COUNTS}
    starts = np.cumsum(counts["lengths"]) - counts["lengths"]
    about = json.loads(str(file[f"{name}.about"]))
    return Documents(file[f"{name}.tokens"], starts, counts, [*map(str, range(len(starts)))], **about)


def split_file(path: Path, folder: Path, size: int) -> None:
    """Write a file as pieces of at most `size` bytes, NAME.part-00 and so on, with the SHA-256 of the whole."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for number, piece in enumerate(iter(lambda: file.read(size), b"")):
            (folder / f"{path.name}.part-{number:02}").write_bytes(piece)
            digest.update(piece)
    write_text(folder / f"{path.name}.sha256", digest.hexdigest() + "\n")


def join_file(path: Path) -> None:
    """Join a file that was split, if it is not there; raises SystemExit if pieces are missing."""
    pieces = sorted(path.parent.glob(f"{path.name}.part-*"))
    if path.exists() or not pieces:
        return
    content = b"".join(piece.read_bytes() for piece in pieces)
    expected = path.with_name(f"{path.name}.sha256").read_text().strip()
    if hashlib.sha256(content).hexdigest() != expected:
        raise SystemExit(f"{path}: its {len(pieces)} pieces are not the whole file: some are missing or damaged.")
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
