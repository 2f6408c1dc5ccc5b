# SPDX-License-Identifier: Apache-2.0
"""How the commands talk to people: progress and notes on stderr, where a terminal is; results never pass here."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

stderr = Console(stderr=True, highlight=False)
LOG_EVERY = 30  # seconds between progress lines where there is no terminal


def note(message: str) -> None:
    """A line on stderr, from the first of several processes."""
    if os.environ.get("RANK", "0") != "0":
        return
    stderr.print(message, markup=False, soft_wrap=True)


class _Progress(Progress):
    """The remark has a line of its own: beside the bar it would leave no room in a narrow terminal."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(task.fields["remark"]) for task in self.tasks if task.fields["remark"])


class Bar:
    """A progress bar on a terminal; a line now and then elsewhere."""

    def __init__(self, description: str, total: int, unit: str, done: int = 0):
        self.description, self.total, self.unit, self.done = description, total, unit, done
        self.begun, self.shown, self.skipped = time.monotonic(), time.monotonic(), done
        self.remark = ""
        self._progress: Progress | None = None
        if stderr.is_terminal:
            self._progress = _Progress(
                TextColumn("{task.description}", markup=False), BarColumn(bar_width=None),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f}"), TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(), TimeRemainingColumn(), console=stderr,
            )  # fmt: skip
            self._task = self._progress.add_task(description, total=total, completed=done, rate="", remark="")

    @property
    def rate(self) -> float:
        """Units a second since the bar began."""
        return (self.done - self.skipped) / max(time.monotonic() - self.begun, 1e-9)

    def advance(self, count: int) -> None:
        self.set(self.done + count)

    def set(self, done: int, remark: str | None = None) -> None:
        self.done, self.remark = done, self.remark if remark is None else remark
        rate = f"{self.rate:{',.0f' if self.rate >= 10 else '.2g'}} {self.unit}/s" if done > self.skipped else ""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, rate=rate, remark=self.remark)
        elif time.monotonic() - self.shown > LOG_EVERY:
            self.shown = time.monotonic()
            left = (self.total - done) / self.rate if self.rate > 0 else 0
            note(
                f"{self.description}: {done:,} of {self.total:,} {self.unit}, {rate}, {left:,.0f} s left {self.remark}"
            )

    @contextmanager
    def aside(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Other work in between, whose progress is the remark and whose time is not in the rate."""
        done, last = 0, time.monotonic()

        def progress(count: int) -> None:
            nonlocal done, last
            done, now = done + count, time.monotonic()
            self.begun, last = self.begun + now - last, now
            self.set(self.done, f"{what}: {done / max(total, 1):.0%}")

        yield progress
        progress(0)

    def __enter__(self) -> "Bar":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hugging Face's own bars and advice stay out of the way; its warnings do not."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()
