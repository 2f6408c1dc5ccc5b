# SPDX-License-Identifier: Apache-2.0
"""Graceful interruption: the first Ctrl-C asks the work to stop at a good point, the second one stops it at once."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from . import console


class Interruptible:
    """Work that checks `requested` from time to time, and stops if it is true."""

    def __init__(self, message: str | None = None):
        """
        Args:
            message: printed at the first request: what is still finished before the end.
        """
        self.requested = False
        self._message = message

    @contextlib.contextmanager
    def listening(self, *signals: int) -> Iterator[None]:
        """Treat these signals as requests to stop while the context is active."""
        previous = {number: signal.signal(number, self._request) for number in signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _request(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._message is not None:
            console.note(self._message)
