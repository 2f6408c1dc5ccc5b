# SPDX-License-Identifier: Apache-2.0
"""`carryforward report`."""

from pathlib import Path
from typing import Annotated

import typer

from .errors import user_errors
from .options import check_folder


def report(
    results: Annotated[list[Path], typer.Argument(help="Result JSON files of `evaluate`, or folders with them.")],
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for table, CSV and figure.")] = None,
) -> None:
    """Combine results of `evaluate` into one table, CSV file and figure."""
    with user_errors(out):
        from ..evaluation import report

        check_folder(out)
        loaded = report.load(results)
        if out is not None:
            report.write(loaded, out)
        typer.echo(report.markdown(loaded))
