# SPDX-License-Identifier: Apache-2.0
"""Messages of the commands to the user, on stderr: stdout is for results. Progress bars are in `progress`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console


class _Stderr:
    """Standard error, whichever it is at the moment. A terminal that is gone does not end the work: it can be saved."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    @property
    def _file(self) -> Any:
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # rich replaces it while a bar is shown


stderr = Console(file=_Stderr(), highlight=False)  # type: ignore[arg-type]
_speaks = False


def is_first_process() -> bool:
    """Whether this is the first of the processes that a launcher has started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def speak() -> None:
    """Let this process print, although it may not be the first one: it alone knows what went wrong."""
    global _speaks
    _speaks = True


def note(message: str) -> None:
    """Print a line on stderr, in the first of several processes only."""
    if is_first_process() or _speaks:
        stderr.print(message, markup=False, soft_wrap=True)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Disable the progress bars of Hugging Face's libraries; warnings are still shown."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
