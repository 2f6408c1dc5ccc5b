# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: the one place that writes under a temporary name and then renames.

A file or folder appears under its final name when it is complete, or not at all. Temporary names are hidden and lie on
the same file system: `.NAME.XXXXXXXX.tmp` for folders being written, `.NAME.XXXXXXXX.deleted` for those being deleted.
"""

import glob
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_MAX_STEM = 100  # characters of the readable part of a result's file name
_STALE = 3600  # seconds without a write after which a temporary folder is taken to be left by a killed process

# The names under which transformers writes weights, whole or in shards, with or without a variant.
_WEIGHTS = re.compile(r"model(?P<shard>-\d{5}-of-\d{5})?\.safetensors(\.index(\.(?P<index>\w+))?\.json)?|"
                      r"model\.(?P<variant>\w+)(-\d{5}-of-\d{5})?\.safetensors")  # fmt: skip


# --- files ---------------------------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` afterwards. On an error, `path` is unchanged."""
    path = Path(path)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")  # same suffix: some writers choose the format by it
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, content: Any) -> None:
    """Write JSON atomically. It is ASCII: any locale can read it, and unpaired surrogates can be written."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write UTF-8 text atomically, without translating line ends."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def result_stem(parts: Sequence[str], details: Any) -> str:
    """Return a file name for a result, without a suffix: readable parts, and a digest of these and of `details`."""
    digest = hashlib.blake2b(json.dumps([*parts, details], sort_keys=True).encode(), digest_size=3).hexdigest()
    return re.sub(r"[^\w.-]+", "-", "-".join(parts)).strip("-.")[-_MAX_STEM:] + f"-{digest}"


# --- folders -------------------------------------------------------------------------------------------------------


@contextmanager
def atomic_folder(folder: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary folder to write a model to, and move its content to `folder` afterwards.

    A new folder appears complete or not at all. In an existing one, files are replaced one by one: first all but
    config.json, then weights of an earlier save in more or fewer shards are removed, and config.json comes last.
    """
    target = Path(folder).resolve()
    if target.is_file():
        raise ValueError(f"save_directory={str(folder)!r} is a file; give a folder.")
    parent = target if target.exists() else target.parent  # either is on the same file system
    with staging_folder(parent, target.name) as staging:
        yield staging
        if target.exists():
            _replace_files(staging, target)
        else:
            staging.rename(target)


@contextmanager
def staging_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new hidden folder in `parent` to write to. Unless it was renamed, it is deleted afterwards.

    Temporary folders of the same name that killed processes left are deleted once they are an hour old.
    """
    _delete_stale(parent, name)
    staging = _hidden(parent, name, "tmp")
    staging.mkdir(parents=True)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def replace_folder(new: Path, folder: Path) -> None:
    """Rename the folder `new` to `folder`; an existing `folder` is deleted first."""
    if folder.exists():
        delete_folder(folder)
    new.rename(folder)


def delete_folder(folder: Path) -> None:
    """Delete a folder, renaming it first: if this is interrupted, no incomplete folder is left under its name."""
    hidden = _hidden(folder.parent, folder.name, "deleted")
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def finish_deletions(parent: Path, pattern: str) -> None:
    """Delete what interrupted calls of `delete_folder` left of the folders in `parent` whose names match a pattern."""
    for leftover in parent.glob(f".{pattern}.*.deleted"):
        shutil.rmtree(leftover, ignore_errors=True)


def _replace_files(staging: Path, target: Path) -> None:
    written = {path.name for path in staging.iterdir()}
    for file in sorted(written - {"config.json"}):
        os.replace(staging / file, target / file)
    variants = {_weights_variant(file) for file in written} - {None}
    for path in target.iterdir():
        if path.name not in written and _weights_variant(path.name) in variants:
            path.unlink()
    if "config.json" in written:
        os.replace(staging / "config.json", target / "config.json")


def _weights_variant(file: str) -> str | None:
    """Return the variant of a weights file ("" for the default one), or None if the file holds no weights."""
    match = _WEIGHTS.fullmatch(file)
    return match and (match["variant"] or match["index"] or "")


def _hidden(parent: Path, name: str, suffix: str) -> Path:
    return parent / f".{name}.{uuid.uuid4().hex[:8]}.{suffix}"


def _delete_stale(parent: Path, name: str) -> None:
    for suffix in ("tmp", "deleted"):
        for leftover in parent.glob(f".{glob.escape(name)}.*.{suffix}"):
            with suppress(OSError):
                if time.time() - max(path.stat().st_mtime for path in (leftover, *leftover.rglob("*"))) > _STALE:
                    shutil.rmtree(leftover, ignore_errors=True)
