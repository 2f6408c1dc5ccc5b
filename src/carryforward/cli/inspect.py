# SPDX-License-Identifier: Apache-2.0
"""`carryforward inspect`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ..settings.commands import AS_TRAINED
from ..settings.recurrence import OVERLAP
from .errors import user_errors
from .options import Device, Json, Recurrent, check_file


def inspect(
    model: Recurrent,
    text: Annotated[str, typer.Option(help="Text file, or - for standard input.")],
    out: Annotated[Path, typer.Option(help="HTML page to write, such as report.html.")],
    top: Annotated[int, typer.Option(help="Predictions to show for each token, with and without the state.")] = 5,
    overlap: Annotated[int | None, typer.Option(help=OVERLAP, show_default=AS_TRAINED)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Use only the first N tokens of the text.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write an HTML page that colours each token of a text by how much the state helped to predict it."""
    with user_errors(out):
        from ..analysis import inspect as job

        check_file(out)
        result = job.inspect(model, text, out, top=top, overlap=overlap, max_tokens=max_tokens, device=device)
        summary = (
            f"{out}: {result['tokens']:,} tokens in {result['windows']:,} windows, perplexity "
            f"{result['perplexity']:,.2f} with the state, {result['perplexity_without']:,.2f} without"
        )
        typer.echo(json.dumps(result) if as_json else summary)
