# SPDX-License-Identifier: Apache-2.0
"""`carryforward reproduce`."""

from pathlib import Path
from typing import Annotated

import typer

from ..settings.base import RUN
from ..settings.recurrence import BUNDLED
from .errors import user_errors
from .options import TrainingDevice, check_folder


def reproduce(
    what: Annotated[str, typer.Argument(help="Folder of an experiment: table2, windows, alternatives, ...")],
    setting: Annotated[str, typer.Option(help="Recipe of the experiment.")] = BUNDLED,
    experiments: Annotated[Path, typer.Option(help="Folder of the experiments.")] = Path("experiments/paper"),
    work: Annotated[Path, typer.Option(help="Folder for the models.")] = Path("runs"),
    model: Annotated[str | None, typer.Option(help="Base model, in place of the recipe's.")] = None,
    data: Annotated[str | None, typer.Option(help="Corpus, in place of the recipe's.")] = None,
    cell: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>...", help="Run only these cells: plain, or plain-seed1."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, metavar="<int>", help="Cells to run in parallel, each in its own process.")
    ] = 1,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="<float>",
            show_default="no limit",
            help="Save and stop after so many seconds; the same command resumes.",
        ),
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Also score the test split. Do this once, after all choices are made.")
    ] = False,
    tables_only: Annotated[bool, typer.Option("--tables-only", help="Run nothing; only rewrite the pages.")] = False,
    pages: Annotated[
        bool, typer.Option(rich_help_panel=RUN, show_default=False, help="Leave the pages as they are.")
    ] = True,
    keep_models: Annotated[
        bool, typer.Option(rich_help_panel=RUN, show_default=False, help="Delete each model once it is scored.")
    ] = True,
    device: TrainingDevice = None,
) -> None:
    """Run what is missing of an experiment of the paper, and rewrite the pages of tables, figures and claims."""
    with user_errors(work):
        from ..reproduction import pages as published
        from ..reproduction import reproduce as job

        check_folder(work, "--work")
        if not tables_only:
            job.reproduce(
                what, setting, program=("-m", "carryforward", "reproduce"), experiments=experiments, work=work,
                model=model, data=data, cells=cell or (), jobs=jobs, seconds=seconds, test=test,
                keep_models=keep_models, device=device,
            )  # fmt: skip
        for page in published.publish(experiments) if pages else []:
            typer.echo(page)
