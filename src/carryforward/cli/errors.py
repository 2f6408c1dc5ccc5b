# SPDX-License-Identifier: Apache-2.0
"""The user-error handler: errors that a user can fix end a command with a message, not with a traceback."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

import typer


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn user errors into a message on stderr and an exit code; CARRYFORWARD_DEBUG=1 shows the traceback.

    Exit codes: 1 failed, 2 wrong usage, 130 interrupted. Bugs keep their traceback.
    """
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
    except Exception as error:
        message = _user_message(error)
        if message is None or os.environ.get("CARRYFORWARD_DEBUG"):
            raise
        note(f"error: {message}")
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error


def _user_message(error: Exception) -> str | None:
    """The message for the user; None for a bug."""
    text = str(error)
    # neither safetensors nor torch.save raise OSError when they cannot write
    write_failed = "No space left" in text or ("inline_container" in text and "Reader" not in text)
    if getattr(error, "errno", None) == errno.ENOSPC or write_failed:
        return f"The disk is full ({text}). Free some space and run the same command again: what was saved is complete."
    if type(error).__name__ == "OutOfMemoryError":
        return f"{text.partition('. ')[0]}. Use a smaller --batch-size, --bf16 or, in training, --keep-windows 0."
    return text if isinstance(error, ValueError | OSError | ArithmeticError | ImportError) else None
