# SPDX-License-Identifier: Apache-2.0
"""`carryforward evaluate`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ..distributed.processes import launched
from ..settings.commands import EvaluateSettings
from ..settings.recurrence import BUNDLED
from .errors import user_errors
from .options import Config, Device, Json, check_folder, options


@options(EvaluateSettings)
def evaluate(
    settings: EvaluateSettings,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL", help="Run folders, model folders or Hub names.", show_default="the bundled model"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for JSON, table, CSV, figure and predictions.")
    ] = None,
    config: Config = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Measure perplexity, masked tokens or classes, and FLOPs, at some overlaps, with and without the state."""
    with user_errors(out), launched() as processes:
        from ..evaluation import report
        from ..evaluation.evaluate import check
        from ..evaluation.evaluate import evaluate as evaluate_model

        names = models or [BUNDLED]
        check_folder(out)  # before hours of work
        for name in names if len(names) > 1 else ():  # a single model is checked soon enough
            check(name, settings)
        results = [evaluate_model(name, settings, device=device, processes=processes, out=out) for name in names]
        if processes.is_first:
            typer.echo(json.dumps(results) if as_json else report.markdown(results))
