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

# The interface of processes that talk to each other: not that of the host's name, which must be looked up.
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


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


def accelerate(*arguments, cache, seconds):
    """Run `accelerate launch` on CPUs. Once the time is over, it ends with the processes that it has started: killed
    alone, it would leave them, and they hold the pipes."""
    # Below the ports that a system gives away: accelerate looks for a free one, which others may take before it does.
    port = 20_000 + os.getpid() % 10_000
    environment = {
        **os.environ, "CARRYFORWARD_CACHE": str(cache), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK,
    }  # fmt: skip
    launch = ["-m", "accelerate.commands.launch", "--main_process_port", port, *arguments]
    with subprocess.Popen(
        [sys.executable, *map(str, launch)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            output = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            output = process.communicate()
    return Result(process.returncode, *output)


def into_a_closed_pipe(*arguments):
    """Run a command whose reader has closed the pipe: it must end without a message."""
    read, written = os.pipe()
    os.close(read)
    # without torchao, which transformers imports where it is installed, and which may print messages of its own
    code = "import sys; sys.modules['torchao'] = None; from carryforward.cli.main import main; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, stdout=written, stderr=subprocess.PIPE, text=True, timeout=100)
    os.close(written)
    assert (done.returncode, done.stderr) == (1, "")
