# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C that loses nothing: a first one is a request to stop where it suits, a second one ends at once."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from . import console


class Interruptible:
    """Work that looks at `requested` now and then."""

    def __init__(self, remark: str | None = None):
        """
        Args:
            remark: said on the first request: what will still be done.
        """
        self.requested = False
        self._remark = remark

    @contextlib.contextmanager
    def listening(self, *signals: int) -> Iterator[None]:
        """While inside, these signals are requests."""
        before = {number: signal.signal(number, self._request) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _request(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._remark is not None:
            console.note(self._remark)
