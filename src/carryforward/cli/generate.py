# SPDX-License-Identifier: Apache-2.0
"""`carryforward generate`; the job is in `text_generation`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..settings.base import ADVANCED
from ..settings.commands import GenerateSettings
from ..settings.recurrence import BUNDLED
from .errors import user_errors
from .options import Config, Device, Json, options


@options(GenerateSettings)
def generate(
    *,
    model: Annotated[
        str, typer.Argument(help="Recurrent or plain model: run folder, model folder or Hub name.")
    ] = BUNDLED,
    source: Annotated[str | None, typer.Argument(metavar="-", help="Read the prompt from standard input.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the text to continue.")] = None,
    settings: GenerateSettings,
    state_in: Annotated[
        Path | None, typer.Option(rich_help_panel=ADVANCED, help="Continue from a state that --state-out saved.")
    ] = None,
    state_out: Annotated[
        Path | None, typer.Option(rich_help_panel=ADVANCED, help="Save the state after the whole text to this file.")
    ] = None,
    config: Config = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt, without a length limit. The text is streamed to stdout."""
    with user_errors():
        from . import text_generation

        if model == "-" and source is None:  # `carryforward generate -`
            model, source = BUNDLED, "-"

        record = text_generation.generate(
            model, text_generation.read_prompt(prompt, prompt_file, source), settings, state_in=state_in,
            state_out=state_out, device=device, show=None if as_json else stream,
        )  # fmt: skip
        if as_json:
            typer.echo(json.dumps(record))
        elif sys.stdout.isatty():
            typer.echo()
        text_generation.print_summary(record)
        if record["ended"] == "interrupted":
            raise typer.Exit(130)


def stream(text: str) -> None:
    """Print a piece of text at once."""
    typer.echo(text, nl=False)
    sys.stdout.flush()
