# SPDX-License-Identifier: Apache-2.0
"""`carryforward memory-tasks`: tasks that need memory, a command each."""

import json
from pathlib import Path

import typer

from ..settings.memory_tasks import (
    CopySettings,
    FactsSettings,
    PassKeySettings,
    RetrievalSettings,
    ReverseSettings,
    TaskSettings,
)
from .errors import user_errors
from .options import Command, Config, Device, Group, Json, OutFolder, check_folder, options

memory_tasks = typer.Typer(
    name="memory-tasks",
    cls=Group,
    help="Tasks that need memory: train and test what a state can carry from window to window.",
    no_args_is_help=True,
    add_completion=False,
)


@memory_tasks.command(cls=Command)
@options(RetrievalSettings)
def retrieval(
    settings: RetrievalSettings, out: OutFolder, config: Config = None, device: Device = None, as_json: Json = False
) -> None:
    """Find the value of a key among pairs, one pair a window. Sizes count pairs."""
    _run(settings, out, device, as_json)


@memory_tasks.command(cls=Command)
@options(CopySettings)
def copy(
    settings: CopySettings, out: OutFolder, config: Config = None, device: Device = None, as_json: Json = False
) -> None:
    """Repeat a sequence of symbols. Sizes count symbols."""
    _run(settings, out, device, as_json)


@memory_tasks.command(cls=Command)
@options(ReverseSettings)
def reverse(
    settings: ReverseSettings, out: OutFolder, config: Config = None, device: Device = None, as_json: Json = False
) -> None:
    """Repeat a sequence of symbols backwards. Sizes count symbols."""
    _run(settings, out, device, as_json)


@memory_tasks.command(cls=Command)
@options(PassKeySettings)
def passkey(
    settings: PassKeySettings, out: OutFolder, config: Config = None, device: Device = None, as_json: Json = False
) -> None:
    """Find a number in a long text, at any depth. Sizes count tokens."""
    _run(settings, out, device, as_json)


@memory_tasks.command(cls=Command)
@options(FactsSettings)
def facts(
    settings: FactsSettings, out: OutFolder, config: Config = None, device: Device = None, as_json: Json = False
) -> None:
    """Say where people or things are, from sentences strewn in a long text. Sizes count tokens."""
    _run(settings, out, device, as_json)


def _run(settings: TaskSettings, out: Path, device: str | None, as_json: bool) -> None:
    with user_errors(out):
        from ..tasks import memory_tasks as job
        from ..tasks.report import markdown

        check_folder(out)
        result = job.memory_tasks(settings, out, device=device)
        typer.echo(json.dumps(result) if as_json else markdown(result))
