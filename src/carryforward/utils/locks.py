# SPDX-License-Identifier: Apache-2.0
"""Locks on outputs: while a process works on one, a second process is refused. A lock dies with its process.

A lock is an advisory lock of the operating system (`flock`) on a small file. The file is deleted when the lock is
released; one that a killed process left is taken over. (A child that the process has forked holds it too, while it
lives.) Where the file system has no such locks, nothing is locked.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".carryforward.lock"  # the file's name in a folder that is locked
_held: dict[tuple[int, str], list[int | None]] = {}  # by process and path: the descriptor, once for each entry


class OutputInUse(ValueError):
    """Another process works on the output."""


@contextmanager
def lock_output(lock: Path, output: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock on an output, or raise `OutputInUse`. A process can enter its own lock again.

    Args:
        lock: the lock's file, in a folder that exists.
        output: what the lock protects, for the message.
        wait: wait for the other process instead of raising; for work of a moment.
    """
    key = os.getpid(), os.path.realpath(lock)
    entries = _held.setdefault(key, [])
    entries.append(entries[0] if entries else _acquire(lock, output, wait))
    try:
        yield
    finally:
        descriptor = entries.pop()
        if not entries:
            _release(lock, descriptor)


def try_lock(path: Path) -> int | None:
    """Lock a file, which is created if it is missing. Returns a descriptor, or None if another process holds the lock.

    Raises:
        OSError: the file cannot be opened, or there are no locks here.
    """
    if fcntl is None:
        raise OSError("there are no locks on this system")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass  # held by another process, which may just have deleted the file
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _acquire(lock: Path, output: Path, wait: bool) -> int | None:
    while True:
        try:
            descriptor = try_lock(lock)
        except PermissionError as error:
            raise ValueError(f"{output} cannot be written to: {lock} ({error.strerror}).") from error
        except OSError:
            if not lock.parent.is_dir():
                raise
            return None  # no locks here
        if descriptor is not None:
            with suppress(OSError):  # a full disk: the lock is held all the same
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
            return descriptor
        if not wait:
            raise OutputInUse(
                f"{output} is in use by another process{_holder(lock)}. Wait until that has ended, or use another "
                "output."
            )
        time.sleep(0.05)


def _holder(lock: Path) -> str:
    with suppress(OSError, ValueError):
        return f" ({int(lock.read_text())})"
    return ""


def _release(lock: Path, descriptor: int | None) -> None:
    if descriptor is not None:
        try:
            with suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.stat(lock)):  # its folder may be another one by now
                    lock.unlink()  # while it is locked: nobody else can hold this file
        finally:
            os.close(descriptor)
