# SPDX-License-Identifier: Apache-2.0
"""Graceful interruption: the first Ctrl-C asks the work to stop at a good point, the second one stops it at once."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from . import console

# Ctrl-C, a scheduler's request to end, the end of a terminal; there is no SIGHUP on Windows
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interruptible:
    """Work that checks `requested` from time to time, and stops if it is true."""

    def __init__(self, message: str | None = None):
        """
        Args:
            message: printed at the first request: what is still finished before the end.
        """
        self.requested = False
        self._message = message

    def listening(self, *signals: int) -> contextlib.AbstractContextManager[None]:
        """A context in which these signals are requests to stop."""
        return _handling(self._request, *signals)

    def _request(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._message is not None:
            console.note(self._message)


@contextlib.contextmanager
def raise_interrupts() -> Iterator[None]:
    """Let every stop signal raise KeyboardInterrupt, and raise it again where Python ignores exceptions.

    Python ignores what is raised in a `__del__` or in a callback of a library: a Ctrl-C at such a moment would be lost.
    """
    report = sys.unraisablehook

    def raise_again(unraisable: Any) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            report(unraisable)
            return
        # from another thread and a moment later: the main thread has then left the place that ignores exceptions
        number = next(one for one in STOP_SIGNALS if signal.getsignal(one) is not signal.SIG_IGN)
        timer = threading.Timer(0.05, signal.raise_signal, [number])
        timer.daemon = True
        timer.start()

    sys.unraisablehook = raise_again
    try:
        with _handling(signal.default_int_handler, *STOP_SIGNALS):
            yield
    finally:
        sys.unraisablehook = report


@contextlib.contextmanager
def _handling(handler: Any, *signals: int) -> Iterator[None]:
    """Handle some signals while the context is active. Those that are ignored, as by nohup, stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    heard = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
