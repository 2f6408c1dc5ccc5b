# SPDX-License-Identifier: Apache-2.0
"""`carryforward horizon`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ..settings.commands import HorizonSettings
from .errors import user_errors
from .options import Config, Device, Json, check_folder, options


@options(HorizonSettings)
def horizon(
    settings: HorizonSettings,
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="Recurrent models: run folders, model folders or Hub names.")
    ],
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for JSON and figure.")] = None,
    config: Config = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Measure how many windows back the state helps, and where in a window and in a document."""
    with user_errors(out):
        from ..evaluation import horizon as job
        from ..models.loading import need_state

        check_folder(out)
        if out is not None:
            job.read_earlier(out)  # refuses a damaged file
        for name in models:
            need_state(name)
        results = []
        for name in models:
            results.append(job.horizon(name, settings, device=device))
            if out is not None:
                job.write(results, out)
        typer.echo(json.dumps(results) if as_json else "\n\n".join(map(job.markdown, results)))
