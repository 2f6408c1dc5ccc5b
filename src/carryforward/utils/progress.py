# SPDX-License-Identifier: Apache-2.0
"""The progress bar, of commands and of library functions."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from .console import is_first_process, note, stderr

ProgressCallback = Callable[[int, int | None], object]  # how much is done, and the total if it is known
LOG_EVERY = 30  # seconds between a command's log lines where there is no terminal
LIBRARY_DELAY = 2  # seconds before a library function shows a bar


class _Display(Progress):
    """A bar with the remark on a line of its own: beside the bar, a narrow terminal has no room for it."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(task.fields["remark"]) for task in self.tasks if task.fields["remark"])


class ProgressBar:
    """A progress bar on stderr, if that is a terminal; of several processes, only the first shows it.

    The bar of a command is shown at once; without a terminal, it logs a line every 30 seconds. The bar of a library
    function is shown after 2 seconds and disappears at the end; without a terminal, nothing is shown.

    Attributes:
        done, total: units done and in all; `total` is None if it is unknown.
        remark: text on a line of its own, below the bar.
    """

    def __init__(
        self, description: str, total: int | None, unit: str, *, done: int = 0, library: bool = False,
        callback: ProgressCallback | None = None,
    ):  # fmt: skip
        """
        Args:
            unit: what is counted, such as "tokens".
            done: units done in an earlier run; they do not count for the rate.
            library: this is the bar of a library function.
            callback: called with `done` and `total` at every update, in place of a bar.
        """
        self.description, self.total, self.unit, self.done = description, total, unit, done
        self.remark = ""
        self.started = self._logged = time.monotonic()
        self._initial, self._library, self._callback = done, library, callback
        self._terminal = callback is None and stderr.is_terminal and is_first_process()
        self._display: Progress | None = None

    def __enter__(self) -> "ProgressBar":
        if not self._library:
            self._show()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._display is not None:
            self._display.stop()

    @property
    def rate(self) -> float:
        """Units per second."""
        return (self.done - self._initial) / max(time.monotonic() - self.started, 1e-9)

    def advance(self, count: int) -> None:
        """Add to the units done."""
        self.update(self.done + count)

    def update(self, done: int, total: int | None = None, remark: str | None = None) -> None:
        """Set the units done; `total` and `remark` stay as they are unless given."""
        self.done = done
        self.total = self.total if total is None else total
        self.remark = self.remark if remark is None else remark
        if self._callback is not None:
            self._callback(done, self.total)
        elif self._display is not None:
            self._display.update(self._display.task_ids[0], completed=done, total=self.total, **self._fields())
        elif self._library:
            if self._terminal and time.monotonic() - self.started > LIBRARY_DELAY:
                self._show()
        elif time.monotonic() - self._logged > LOG_EVERY:
            self._log()

    @contextmanager
    def subtask(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes units done of other work, such as validation during training.

        Its progress is shown as the remark, and its time does not count for the rate.
        """
        done, last = 0, time.monotonic()

        def advance(count: int) -> None:
            nonlocal done, last
            done, now = done + count, time.monotonic()
            self.started, last = self.started + now - last, now
            self.update(self.done, remark=f"{name}: {done / max(total, 1):.0%}")

        yield advance
        advance(0)

    def _show(self) -> None:
        if self._terminal:
            # A library function has a console of its own: several may run at once, in threads.
            self._display = _Display(
                TextColumn("{task.description}", markup=False), BarColumn(bar_width=None),
                TextColumn("{task.fields[count]}"), TextColumn("{task.fields[rate]}"), TimeElapsedColumn(),
                TimeRemainingColumn(), console=Console(stderr=True) if self._library else stderr,
                transient=self._library,
            )  # fmt: skip
            self._display.add_task(self.description, total=self.total, completed=self.done, **self._fields())
            self._display.start()

    def _fields(self) -> dict[str, Any]:
        count = f"{self.done:,}" if self.total is None else f"{self.done:,}/{self.total:,}"
        return {"count": count, "rate": self._format_rate(), "remark": self.remark}

    def _format_rate(self) -> str:
        if self.done <= self._initial:
            return ""
        rate = self.rate
        return f"{rate:{',.0f' if rate >= 10 else '.2g'}} {self.unit}/s"

    def _log(self) -> None:
        self._logged = time.monotonic()
        count = f"{self.done:,} {self.unit}" if self.total is None else f"{self.done:,} of {self.total:,} {self.unit}"
        left = (self.total - self.done) / self.rate if self.total is not None and self.rate > 0 else 0
        note(f"{self.description}: {count}, {self._format_rate()}, {left:,.0f} s left {self.remark}")
