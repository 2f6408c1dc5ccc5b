# SPDX-License-Identifier: Apache-2.0
"""`carryforward samples`."""

import json
from typing import Annotated

import typer

from ..settings.commands import ContinuationSettings
from .errors import user_errors
from .options import Config, Device, Json, OutFolder, Recurrent, check_folder, options


@options(ContinuationSettings)
def samples(
    settings: ContinuationSettings,
    model: Recurrent,
    out: OutFolder,
    rows: Annotated[int, typer.Option(min=1, metavar="<int>", help="Rows of each table.")] = 10,
    config: Config = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Show generated texts side by side, with and without the state: by topic, and by the people they mention."""
    with user_errors(out):
        from ..analysis import samples as job
        from ..utils import console

        check_folder(out)
        result = job.samples(model, settings, out, rows=rows, device=device)
        typer.echo(json.dumps(result) if as_json else job.markdown(result))
        console.note(f"written to {out}: samples.html and samples.md (the texts side by side), samples.json")
