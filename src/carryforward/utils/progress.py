# SPDX-License-Identifier: Apache-2.0
"""Progress of the library's own functions, which may be called in a program that shows it in a way of its own."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

Progress = Callable[[int, int | None], object]  # how much is done, and how much there is if that is known


@contextlib.contextmanager
def bar(progress: Progress | None, description: str, after: float) -> Iterator[Progress]:
    """What to report to: the caller's function, or a bar if there is a terminal and the work takes so many seconds."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or (lambda done, total: None)
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        shown = Bar(console=Console(stderr=True), transient=True)
        task = shown.add_task(description)

        def report(done: int, total: int | None) -> None:
            if not shown.live.is_started and time.monotonic() - begun > after:
                stack.enter_context(shown)
            shown.update(task, completed=done, total=total)

        yield report
