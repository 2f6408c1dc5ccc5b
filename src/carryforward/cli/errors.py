# SPDX-License-Identifier: Apache-2.0
"""What all commands share: options, and errors told in a sentence."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from .options import read_config

Config = Annotated[
    Path | None,
    typer.Option("--config", callback=read_config, is_eager=True, help="YAML file with settings; flags win."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; the best there is by default.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
RunFolder = Annotated[Path, typer.Option(help="Folder of the run. The same command again goes on where it stopped.")]
ReportTo = Annotated[str, typer.Option(help="tensorboard, wandb, ... as Trainer's report_to.")]


def only_cpu(device: str | None) -> bool:
    """Whether a training is to stay on the CPU; other devices are not chosen by name."""
    import torch

    if device not in (None, "cpu", getattr(torch.accelerator.current_accelerator(), "type", None)):
        raise ValueError(
            f"--device {device}: training runs on the best device there is, or on cpu. Leave it out, and choose "
            "GPUs with CUDA_VISIBLE_DEVICES."
        )
    return device == "cpu"


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """What goes wrong is said in a sentence; CARRYFORWARD_DEBUG=1 shows where it happened."""
    from ..utils.console import note, quiet_libraries

    try:
        with quiet_libraries():
            yield
    except BrokenPipeError:  # whoever read the results has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except KeyboardInterrupt as end:
        note(str(end) or "interrupted")
        raise typer.Exit(130) from None
    except Exception as error:
        told = _told(error)
        if told is None or os.environ.get("CARRYFORWARD_DEBUG"):
            raise
        note(f"error: {told}")
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error


def _told(error: Exception) -> str | None:
    """What went wrong, where it is not the program's own fault."""
    text = str(error)
    # neither safetensors nor torch.save raise OSError when they cannot write
    unwritten = "No space left" in text or ("inline_container" in text and "Reader" not in text)
    if getattr(error, "errno", None) == errno.ENOSPC or unwritten:
        return f"The disk is full ({text}). Free some space and give the same command again: what was saved is whole."
    if type(error).__name__ == "OutOfMemoryError":
        return f"{text.partition('. ')[0]}. Use a smaller --batch-size, --bf16 or, in training, --keep-windows 0."
    return text if isinstance(error, ValueError | OSError | ArithmeticError | ImportError) else None
