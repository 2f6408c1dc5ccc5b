# SPDX-License-Identifier: Apache-2.0
"""Atomic, durable writes: the one place that writes under a temporary name and then renames.

A file or folder appears under its final name when it is complete and on disk, or not at all: it is synced before it is
renamed, and its folder afterwards, so that it survives a power cut too. Temporary names are hidden and lie on the same
file system:

* `.NAME.XXXXXXXX.tmp`: a folder in which NAME is being written. It is locked; one that is not locked was left by a
  killed process, and is deleted by the next write of NAME.
* `.NAME.XXXXXXXX.ready` and `.moving`: a complete model that is being moved to its place in the folder NAME, file by
  file. If that is interrupted, `finish_replacement` completes it.
* `.NAME.XXXXXXXX.deleted`: a folder that is being deleted.
"""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .locks import LOCK, lock_output, try_lock
from .parsing import read_json_object

_SEAL = "sha256"  # the key of a JSON file's own digest
_MAX_STEM = 100  # characters of the readable part of a result's file name
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.(?P<kind>tmp|ready|moving|deleted)")
_MOVING = ".carryforward.moving"  # the lock that is held while a model is moved into a folder
SAVING = ".saving"  # where a training run writes a checkpoint: all processes of the run must find it

# The names under which transformers writes weights, whole or in shards, with or without a variant.
_WEIGHTS = re.compile(r"model(?P<shard>-\d{5}-of-\d{5})?\.safetensors(\.index(\.(?P<index>\w+))?\.json)?|"
                      r"model\.(?P<variant>\w+)(-\d{5}-of-\d{5})?\.safetensors")  # fmt: skip


# --- files ---------------------------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` afterwards. On an error, `path` is unchanged."""
    path = Path(path)
    with _staging(path.parent, path.name) as staging:
        temporary = staging / path.name  # same name: some writers choose the format by its suffix
        yield temporary
        publish(temporary, path)


def write_json(path: str | os.PathLike, content: Any) -> None:
    """Write JSON atomically. It is ASCII: any locale can read it, and unpaired surrogates can be written."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_sealed_json(path: str | os.PathLike, content: dict[str, Any]) -> None:
    """Write a JSON object atomically, with a digest of its content."""
    write_json(path, {**content, _SEAL: _json_digest(content)})


def read_sealed_json(path: Path, remedy: str = "") -> dict[str, Any]:
    """Read a JSON object, without its digest. A ValueError says that the file is damaged, and what to do (`remedy`);
    one without a digest, from elsewhere, is accepted."""
    content = read_json_object(path, remedy)
    digest = content.pop(_SEAL, None)
    if digest is not None and digest != _json_digest(content):
        raise ValueError(f"{path} is damaged: its content does not match its digest. {remedy}".rstrip())
    return content


def _json_digest(content: dict[str, Any]) -> str:
    as_read = json.loads(json.dumps(content))  # keys are strings, tuples are lists
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


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

    A new folder appears complete or not at all. In an existing one, files are replaced one by one, and config.json is
    missing meanwhile: old and new files are never read together. See `finish_replacement`.
    """
    target = Path(folder).resolve()
    if target.is_file():
        raise ValueError(f"save_directory={str(folder)!r} is a file; give a folder.")
    if not target.exists():
        with staging_folder(target.parent, target.name) as staging:
            yield staging
            if target.exists():
                raise ValueError(f"{folder} was written by another process meanwhile. Use another folder.")
            publish(staging, target)
        return
    with staging_folder(target, target.name) as staging:
        yield staging
        _sync_tree(staging)
        with lock_output(target / _MOVING, target, wait=True):
            _finish_moves(target)
            _move_into_place(_advance(staging.parent, "ready"), target)


@contextmanager
def staging_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new temporary folder, for `publish` to move into `parent`. Otherwise it is deleted afterwards."""
    parent.mkdir(parents=True, exist_ok=True)
    with _staging(parent, name) as staging:
        folder = staging / name
        folder.mkdir()
        yield folder


def publish(temporary: Path, path: Path) -> None:
    """Rename a complete file or folder to its final name, durably. A file replaces an existing one."""
    _sync_tree(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def replace_folder(new: Path, folder: Path) -> None:
    """Rename the folder `new` to `folder`; an existing `folder` is deleted first."""
    if folder.exists():
        delete_folder(folder)
    publish(new, folder)


def delete_folder(folder: Path) -> None:
    """Delete a folder, renaming it first: if this is interrupted, no incomplete folder is left under its name."""
    hidden = _hidden(folder.parent, folder.name, "deleted")
    folder.rename(hidden)
    _sync(folder.parent)
    _delete(hidden)


# --- what killed processes left ------------------------------------------------------------------------------------


def clear_leftovers(parent: Path, name: str | None = None) -> None:
    """Delete temporary folders in `parent` that killed processes left, of all names or of one."""
    for leftover in _temporaries(parent, ("tmp", "deleted"), name):
        if leftover.suffix == ".deleted":
            _delete(leftover)
            continue
        with suppress(OSError):  # without locks, nothing tells whether it is in use
            if (descriptor := try_lock(leftover / LOCK)) is not None:
                _delete(leftover, descriptor)


def _delete(path: Path, lock: int | None = None) -> None:
    """Delete a file or folder for good, and release the lock on it."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)
        shutil.rmtree(path, ignore_errors=True)  # NFS keeps a deleted file in its folder while it is open


def is_vacant(folder: Path) -> bool:
    """Whether a folder holds no files, but for what killed processes may leave."""
    return all(is_leftover(path) or (path.is_dir() and is_vacant(path)) for path in folder.iterdir())


def is_leftover(path: Path) -> bool:
    """Whether a file or folder has a name that only temporary ones have."""
    return path.name in (LOCK, _MOVING, SAVING) or _TEMPORARY.fullmatch(path.name) is not None


def finish_replacement(folder: Path) -> None:
    """Complete an interrupted `atomic_folder` on an existing folder, if it can be written to."""
    if _temporaries(folder, ("ready", "moving")):
        with suppress(PermissionError, ValueError), lock_output(folder / _MOVING, folder, wait=True):
            _finish_moves(folder)


def _finish_moves(folder: Path) -> None:
    """Move what interrupted processes have left ready. The caller holds the lock: no other process is moving it."""
    for ready in _temporaries(folder, ("ready", "moving")):
        _move_into_place(ready, folder)


def _move_into_place(ready: Path, folder: Path) -> None:
    """Move a complete model into a folder: remove config.json and earlier weights, move all other files, and
    config.json last."""
    content = next((path for path in ready.iterdir() if path.name != LOCK), None)
    if content is None:  # all was moved, and only the folder was left
        shutil.rmtree(ready, ignore_errors=True)
        return
    names = sorted((path.name for path in content.iterdir()), key=lambda name: (name == "config.json", name))
    if ready.suffix == ".ready":
        if "config.json" in names:
            (folder / "config.json").unlink(missing_ok=True)
        variants = {_weights_variant(name) for name in names} - {None}
        for path in folder.iterdir():
            if _weights_variant(path.name) in variants:
                path.unlink()
        ready = _advance(ready, "moving")
        content = ready / content.name
    for name in names:
        if name == "config.json":
            _sync(folder)
        if (folder / name).is_dir():
            delete_folder(folder / name)
        os.replace(content / name, folder / name)
    _sync(folder)
    shutil.rmtree(ready, ignore_errors=True)


def _weights_variant(file: str) -> str | None:
    """Return the variant of a weights file ("" for the default one), or None if the file holds no weights."""
    match = _WEIGHTS.fullmatch(file)
    return match and (match["variant"] or match["index"] or "")


# --- temporary names and syncing -----------------------------------------------------------------------------------


@contextmanager
def _staging(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new hidden folder in `parent`, which is locked, and is deleted afterwards."""
    clear_leftovers(parent, name)
    staging, descriptor = _create_staging(parent, name)
    try:
        yield staging
    finally:
        _delete(staging, descriptor)


def _create_staging(parent: Path, name: str) -> tuple[Path, int | None]:
    while True:
        staging = _hidden(parent, name, "tmp")
        staging.mkdir()
        try:
            descriptor = try_lock(staging / LOCK)
        except FileNotFoundError:
            continue  # another process took it for a leftover, before it was locked
        except OSError:
            return staging, None  # no locks here
        if descriptor is not None:
            return staging, descriptor


def _hidden(parent: Path, name: str, kind: str) -> Path:
    return parent / f".{_short(name)}.{uuid.uuid4().hex[:8]}.{kind}"


def _short(name: str) -> str:
    """A name that leaves room for a prefix and a suffix: file systems allow 255 bytes."""
    return os.fsencode(name)[:200].decode("utf-8", "ignore")


def _advance(temporary: Path, kind: str) -> Path:
    """Rename a temporary folder to its next kind, durably."""
    renamed = temporary.rename(temporary.with_suffix(f".{kind}"))
    _sync(renamed.parent)
    return renamed


def _temporaries(parent: Path, kinds: tuple[str, ...], name: str | None = None) -> list[Path]:
    """The temporary folders of some kinds in `parent`, of all names or of one."""
    with os.scandir(parent) as entries:
        matches = [match for entry in entries if (match := _TEMPORARY.fullmatch(entry.name))]
    own = [match for match in matches if name is None or match["name"] == _short(name)]
    return [parent / match[0] for match in own if match["kind"] in kinds]


def _sync_tree(path: Path) -> None:
    """Write a file, or a folder and all that is in it, to disk."""
    for inner in path.iterdir() if path.is_dir() else ():
        _sync_tree(inner)
    _sync(path)


def _sync(path: Path) -> None:
    """Write a file's content, or a folder's list of names, to disk."""
    windows = os.name == "nt"
    if windows and path.is_dir():
        return  # folders cannot be opened there
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)
