# SPDX-License-Identifier: Apache-2.0
"""The processes of one command, as torchrun or `accelerate launch` starts them.

Commands that only read (evaluate, embed, qa evaluate) need no collective operations: each process works alone, and the
results are put together at the end. So processes talk through the key-value store of the launcher, on the CPU, whatever
their devices are: there is nothing that could wait on a GPU, and a process can wait for hours. Training has process
groups of its own.
"""

import itertools
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..utils import console
from ..utils.progress import ProgressBar

_PIECE = 4 << 20  # bytes; the store takes values of up to 8 MB
_POLL = 0.05  # seconds between two looks at the store
_GRACE = 0.5  # seconds that the first to fail has for its message: once a process has ended, the launcher ends all
_REPORT = 0.5  # seconds between two messages about progress
_GROUPS = itertools.count()  # names the keys of each group of this process; the same in all of a command's processes


class OtherProcessFailed(RuntimeError):
    """Another process of the command has failed and says why. This one ends without a message."""


class Processes:
    """The processes of a command; by default this one alone.

    Attributes:
        rank, count: the number of this process, from 0, and of all. All processes must call the methods below in the
            same order.
    """

    def __init__(self, store: Any = None, rank: int = 0, count: int = 1):
        self.rank, self.count, self._store = rank, count, store
        self._calls = itertools.count()
        self._bar: tuple[str, ProgressBar] | None = None  # the key of the units done, and the bar
        self._unreported, self._reported = 0, 0.0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def device(self, name: str | None) -> str | None:
        """The device of this process: with several, the GPU with its number on this machine."""
        import torch

        if self.count == 1 or (name or "cuda").partition(":")[0] != "cuda" or not torch.cuda.is_available():
            return name
        if name is not None and ":" in name:
            raise ValueError(
                f"--device {name}: all {self.count} processes would use it. Leave it out, and choose GPUs with "
                "CUDA_VISIBLE_DEVICES."
            )
        return f"cuda:{os.environ.get('LOCAL_RANK', self.rank)}"

    # --- values ----------------------------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in their order, in every process. Waits for all."""
        if self.count == 1:
            return [value]
        call = next(self._calls)
        self._put(f"{call}/{self.rank}", pickle.dumps(value))
        return [value if i == self.rank else pickle.loads(self._get(f"{call}/{i}")) for i in range(self.count)]

    def wait(self) -> None:
        """Wait until all processes are here."""
        self.gather(None)

    def first(self, function: Callable[[], Any]) -> Any:
        """Call a function in the first process only; all get its result."""
        return self.gather(function() if self.is_first else None)[0]

    def first_alone(self, function: Callable[[], Any]) -> Any:
        """Call a function in the first process, and then in the others, which find what it has left in a cache."""
        if self.is_first:
            value = function()
        self.wait()
        return value if self.is_first else function()

    def _put(self, key: str, value: bytes) -> None:
        pieces = range(0, len(value), _PIECE)
        for number, start in enumerate(pieces):
            self._store.set(f"{key}/{number}", value[start : start + _PIECE])
        self._store.set(key, str(len(pieces)))  # last: the value is complete

    def _get(self, key: str) -> bytes:
        while not self._store.check([key]):
            time.sleep(_POLL)
            self._check_others()
            self._report_progress()
        pieces = range(int(self._store.get(key)))
        return b"".join(self._store.get(f"{key}/{number}") for number in pieces)

    # --- progress --------------------------------------------------------------------------------------------------

    @contextmanager
    def progress_bar(self, description: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """A progress bar in the first process for the work of all. Yields a function that takes each advance."""
        with ProgressBar(description, total, unit) as bar:
            if self.count == 1:
                yield bar.advance
                return
            self._bar = f"done/{next(self._calls)}", bar
            yield self._advance
            self._report_progress(now=True)
            self._bar = None

    def _advance(self, count: int) -> None:
        self._unreported += count
        if time.monotonic() - self._reported > _REPORT:
            self._check_others()
            self._report_progress()

    def _report_progress(self, now: bool = False) -> None:
        """Add this process's units to those of all, and show them; at most twice a second."""
        if self._bar is None or not (now or time.monotonic() - self._reported > _REPORT):
            return
        key, bar = self._bar
        done = self._store.add(key, self._unreported)
        self._unreported, self._reported = 0, time.monotonic()
        if self.is_first:
            bar.update(done)

    # --- errors ----------------------------------------------------------------------------------------------------

    def _check_others(self) -> None:
        if self._store.add("failed", 0):
            raise OtherProcessFailed

    def _fails_first(self) -> bool:
        """Tell the others that this process fails; whether it is the first, which has the word."""
        try:
            return self._store.add("failed", 1) == 1
        except Exception:  # the store is gone: the launcher has ended
            return self.is_first

    def _leave(self) -> None:
        """The first process may hold the store: it leaves last."""
        self._store.add("left", 1)
        while self.is_first and self._store.add("left", 0) < self.count:
            time.sleep(_POLL)
            self._check_others()


ALONE = Processes()


@contextmanager
def launched() -> Iterator[Processes]:
    """The processes that a launcher has started for this command; one alone without a launcher.

    If one of them fails, all end: the first one to fail raises its error, and may print it; the others raise
    `OtherProcessFailed`.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 or "RANK" not in os.environ:  # a launcher sets both
        yield ALONE
        return
    processes = Processes(_connect(), int(os.environ["RANK"]), count)
    try:
        yield processes
        processes._leave()
    except OtherProcessFailed:
        time.sleep(_GRACE)
        raise
    except BaseException:
        if not processes._fails_first():
            time.sleep(_GRACE)
            raise OtherProcessFailed from None
        console.speak()
        raise


def _connect() -> Any:
    """The key-value store of the launcher, or one of the first process where the launcher has none."""
    from torch import distributed

    with suppress(StopIteration):
        store, *_ = next(distributed.rendezvous("env://"))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"carryforward/{restart}/{next(_GROUPS)}", store)
