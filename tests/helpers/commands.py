# SPDX-License-Identifier: Apache-2.0
"""Commands of the command line, run and checked."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

from carryforward.cli.errors import UNFORESEEN
from carryforward.cli.main import main


class Result(NamedTuple):
    """The exit code and output of a command."""

    code: int
    out: str
    err: str


def run(*arguments):
    """Run a command in this process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    assert "Traceback" not in err.getvalue()
    assert UNFORESEEN not in err.getvalue(), err.getvalue()
    return Result(code, out.getvalue(), err.getvalue())


def succeed(*arguments):
    """Run a command that must end with exit code 0."""
    result = run(*arguments)
    assert result.code == 0, result.err
    return result


def fail(*arguments, code):
    """Run a command that must end with `code` and a message. Returns the message, on one line."""
    result = run(*arguments)
    assert result.code == code, result
    assert result.out == ""
    return " ".join(result.err.replace("│", " ").split())


def into_a_closed_pipe(*arguments):
    """Run a command whose reader has closed the pipe: it must end without a message."""
    read, written = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "carryforward", *map(str, arguments)]
    done = subprocess.run(command, stdout=written, stderr=subprocess.PIPE, text=True, timeout=100)
    os.close(written)
    assert (done.returncode, done.stderr) == (1, "")
