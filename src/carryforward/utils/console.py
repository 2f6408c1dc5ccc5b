# SPDX-License-Identifier: Apache-2.0
"""Messages of the commands to the user, on stderr: stdout is for results. Progress bars are in `progress`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

stderr = Console(stderr=True, highlight=False)


def note(message: str) -> None:
    """Print a line on stderr, in the first of several processes only."""
    if os.environ.get("RANK", "0") != "0":
        return
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
