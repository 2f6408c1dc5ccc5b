# SPDX-License-Identifier: Apache-2.0
"""Messages and bars go to stderr, and a terminal that is gone does not end the work."""

import errno
import io
import sys

from carryforward.utils import console
from carryforward.utils.progress import ProgressBar


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, *text):
        raise OSError(errno.EIO, "Input/output error")

    flush = write

    def isatty(self):
        return True


def test_a_terminal_that_is_gone_is_ignored(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Gone())
    console.note("finishing this step")
    with ProgressBar("training", 10, "steps") as bar:
        bar.update(5)
        console.note("in between")


def test_messages_go_where_stderr_is_now(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    console.note("a [b]note[/b]")
    assert sys.stderr.getvalue() == "a [b]note[/b]\n"
