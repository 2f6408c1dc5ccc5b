# SPDX-License-Identifier: Apache-2.0
"""The user-error handler: a command that fails ends with a message and an exit code, not with a traceback."""

import contextlib
import errno
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import typer

UNFORESEEN = "This is a bug, or an input file is damaged"  # of the message for errors that nobody foresaw

# errors of the disk or its settings, not of the call
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_ADVICE = {
    errno.ENOTDIR: "a part of this path is a file, where a folder is needed",
    errno.EISDIR: "this is a folder, where a file is needed",
    errno.EEXIST: "a file of this name is in the way of a folder",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "it is a link to itself",
}


@contextlib.contextmanager
def user_errors(out: Path | None = None) -> Iterator[None]:
    """Turn errors into a message on stderr and an exit code; CARRYFORWARD_DEBUG=1 shows the traceback.

    Args:
        out: what the command writes, for errors of writing that do not say what was written.

    Of several processes only the one that fails first prints its message, inside `launched`.

    Exit codes: 1 failed, 2 wrong usage, 130 interrupted. The traceback of an error that nobody foresaw is written to a
    file, which the message names.
    """
    from ..distributed.processes import OtherProcessFailed
    from ..utils.console import note, quiet_libraries
    from ..utils.signals import raise_interrupts

    try:
        with raise_interrupts(), quiet_libraries():
            yield
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except KeyboardInterrupt as interrupt:
        note(str(interrupt) or "interrupted")
        raise typer.Exit(130) from None
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except OtherProcessFailed:
        raise typer.Exit(1) from None
    except Exception as error:
        if os.environ.get("CARRYFORWARD_DEBUG"):
            raise
        note(f"error: {_user_message(error, out) or _unforeseen(error)}")
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error


def _user_message(error: Exception, out: Path | None) -> str | None:
    """The message for the user; None if nobody foresaw the error."""
    text = str(error)
    if (reason := _write_error(error)) is not None:
        full = "The disk is full: " * (reason == os.strerror(errno.ENOSPC))
        name = getattr(error, "filename", None) or out or "a file"
        return (
            f"{full}{name} could not be written ({reason}). Make room or use another place, and run the same command "
            "again: what was saved is complete."
        )
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or "can't allocate memory" in text:
        first = text.rpartition("] err == 0. ")[2].partition(". ")[0] or "out of memory"
        return f"{first}. Use a smaller --batch-size, --bf16 or, in training, --keep-windows 0."
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return f"{error.filename}: {_ADVICE.get(error.errno, error.strerror)}. Check the path."
    return text if isinstance(error, ValueError | OSError | ArithmeticError | ImportError) and text else None


def _write_error(error: Exception) -> str | None:
    """Why a file could not be written; None if that is not what happened."""
    text = str(error)
    # safetensors, tokenizers and pyarrow name the number in their text, torch.save nothing at all
    found = None if isinstance(error, OSError | ValueError) else re.search(r"os error (\d+)", text)
    number = int(found[1]) if found else getattr(error, "errno", None)
    if number in _WRITE_ERRORS or (found and type(error).__name__ == "SafetensorError" and number is not None):
        return os.strerror(number)
    if "No space left" in text and not isinstance(error, OSError):
        return os.strerror(errno.ENOSPC)
    if "inline_container" in text and "Reader" not in text:
        return "the disk is full, or a quota or size limit is reached"
    return None


def _unforeseen(error: Exception) -> str:
    """The message for an error that nobody foresaw. Writes its traceback to a file."""
    text = " ".join(str(error).split())
    short = f"{type(error).__name__}: {text[:200]}{'…' * (len(text) > 200)}"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="carryforward-", suffix=".log", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write("".join(traceback.format_exception(error)))
        where = f"The traceback is in {file.name}; CARRYFORWARD_DEBUG=1 shows it."
    except OSError:
        where = "CARRYFORWARD_DEBUG=1 shows the traceback."
    return f"{short.rstrip('.')}. {UNFORESEEN}. {where}"
