# SPDX-License-Identifier: Apache-2.0
"""Run a job in a forked process, and do something to it before its n-th file operation.

An audit hook sees the operations that Python makes: opening a file to write, renaming, deleting, making folders. Native
writers (safetensors, torch.save, pyarrow) write between two of them; `tear` and `cut_power` damage what they wrote.
"""

import errno
import gc
import json
import logging
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.truncate": 1, "os.rename": 2, "os.link": 2}
_FOLDER = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.rename": 2}  # the argument that holds a dir_fd
_LIMIT = 120  # seconds after which a process that hangs is ended


class Operations:
    """An audit hook that numbers the file operations under a folder from 1, and calls `act(self)` before one.

    Attributes:
        log: the operations so far, as "event path".
        stamps: the files before the last operation: see `stamps_of`.
    """

    def __init__(self, folder: Path, at: int = 0, act: Callable[["Operations"], object] | None = None):
        self.folder, self.at, self.act = folder, at, act
        self.log: list[str] = []
        self.stamps: dict[str, tuple] = {}
        self.synced: set[tuple] = set()
        self._busy = False

    def install(self) -> None:
        """Begin to count. There is no way back: audit hooks stay until the process ends."""
        self.stamps = stamps_of(self.folder)
        self.synced = set(self.stamps.values())
        os.fsync = os.fdatasync = self._sync
        sys.addaudithook(self)

    def _sync(self, file: Any) -> None:
        self.synced.add(_stamp(os.fstat(file if isinstance(file, int) else file.fileno())))

    def __call__(self, event: str, arguments: tuple) -> None:
        if self._busy or (event not in _PATHS and not (event == "open" and (arguments[2] or 0) & _WRITE)):
            return
        self._busy = True
        try:
            paths = [path for path in _paths(event, arguments) if path.startswith(f"{self.folder}/")]
            if paths:
                self.log.append(f"{event} {paths[-1]}")
                self._before_operation()
        finally:
            self._busy = False

    def end(self) -> None:
        """The job has ended: act now if that was to happen before one more operation."""
        self._busy = True
        if self.act is not None and self.at == len(self.log) + 1:
            self.act(self)

    def _before_operation(self) -> None:
        if len(self.log) == self.at - 1:
            self.stamps = stamps_of(self.folder)
        if self.act is not None and len(self.log) >= self.at:
            self.act(self)


def _paths(event: str, arguments: tuple) -> list[str]:
    """The absolute paths of an operation; `shutil.rmtree` gives names relative to open folders."""
    paths = []
    for name in arguments[: _PATHS.get(event, 1)]:
        if not isinstance(name, int):
            path, folder = os.fsdecode(name), arguments[_FOLDER[event]] if event in _FOLDER else -1
            here = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else os.getcwd()
            paths.append(os.path.normpath(os.path.join(here, path)))
    return paths


def stamps_of(folder: Path) -> dict[str, tuple]:
    """For each file, what changes when it is written, but not when it is renamed."""
    paths = [os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names]
    return {path: _stamp(os.lstat(path)) for path in paths}


def _stamp(stat: os.stat_result) -> tuple:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


# --- what happens before the operation -------------------------------------------------------------------------------


def kill(operations: Operations | None = None) -> None:
    """The process is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def tear(operations: Operations) -> None:
    """The process is killed while it writes: of the file written last since the operation before, half is there."""
    now = stamps_of(operations.folder)
    written = [path for path, stamp in now.items() if stamp not in operations.stamps.values()]
    if written:
        newest = max(written, key=lambda path: now[path][2])
        os.truncate(newest, now[newest][1] // 2)
    kill()


def cut_power(operations: Operations) -> None:
    """The machine loses power: files that were not synced since they were written are there, and empty."""
    for path, stamp in stamps_of(operations.folder).items():
        if stamp not in operations.synced:
            os.truncate(path, 0)
    kill()


CRASHES = {"killed": kill, "torn": tear, "power cut": cut_power}


def fail_with(number: int) -> Callable[[Operations], None]:
    """This and all later operations fail: with EROFS all of them, else those that need space."""

    def fail(operations: Operations) -> None:
        event, path = operations.log[-1].split(" ", 1)
        if number == errno.EROFS or event not in ("os.remove", "os.rmdir"):
            raise OSError(number, os.strerror(number), path)

    return fail


def send(number: int) -> Callable[[Operations], None]:
    """The process receives a signal, once."""

    def signal_once(operations: Operations) -> None:
        if len(operations.log) == operations.at:
            os.kill(os.getpid(), number)

    return signal_once


class Gate:
    """Holds a process before an operation until it is told to go on."""

    def __init__(self) -> None:
        self._reached, self._opened = os.pipe(), os.pipe()

    def __call__(self, operations: Operations) -> None:
        if len(operations.log) == operations.at:
            os.write(self._reached[1], b".")
            os.read(self._opened[0], 1)

    def wait(self) -> None:
        """Wait until the process is there."""
        os.close(self._reached[1])  # so that the end of the process ends the wait
        assert os.read(self._reached[0], 1), "the process ended before it was held"

    def open(self) -> None:
        os.write(self._opened[1], b".")


# --- processes -------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """The exit code (negative: the signal that ended the process), the output and the file operations of a job."""

    code: int
    output: str
    log: list[str]

    @property
    def unforeseen(self) -> bool:
        """Whether a traceback was shown, or written elsewhere."""
        return "traceback" in self.output.lower()

    def __str__(self) -> str:
        return f"exit code {self.code}: {next(reversed(self.output.strip().splitlines()), '')}"


class Child:
    """A job in a forked process."""

    def __init__(self, job: Callable[[], object], operations: Operations | None = None):
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        self._printed = b""
        self._log = os.memfd_create("log")
        self.pid = os.fork()
        if not self.pid:
            signal.alarm(_LIMIT)
            gc.freeze()  # collections would look at all that was there before
            _redirect(output)
            code = _run(job, operations)
            if operations is not None:
                operations.end()
                os.write(self._log, json.dumps(operations.log).encode())
            os._exit(code)
        os.close(output)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def read(self) -> None:
        """Read what was printed so far: a job that prints more than a pipe holds would wait."""
        with suppress(BlockingIOError):
            while piece := os.read(self._output, 1 << 16):
                self._printed += piece

    def wait(self) -> Result:
        """Wait for the end of the process, not of its output: processes that it has started may hold the pipe."""
        ended = os.pidfd_open(self.pid)
        while ended not in select.select([self._output, ended], [], [])[0]:
            self.read()
        self.read()
        os.close(ended)
        os.close(self._output)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.lseek(self._log, 0, os.SEEK_SET)
        with os.fdopen(self._log) as file:
            return Result(code, self._printed.decode(errors="replace"), json.loads(file.read() or "[]"))


def run(job: Callable[[], object], operations: Operations | None = None) -> Result:
    """Run a job in a forked process, to its end."""
    return Child(job, operations).wait()


def _redirect(output: int) -> None:
    """Send stdout, stderr and all warnings to a file descriptor."""
    for number in (1, 2):
        os.dup2(output, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    logging.getLogger().handlers = [logging.StreamHandler(sys.stderr)]


def _run(job: Callable[[], object], operations: Operations | None) -> int:
    """The exit code of a job."""
    try:
        if operations is not None:
            operations.install()
        job()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 70
    return 0
