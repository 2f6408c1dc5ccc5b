# SPDX-License-Identifier: Apache-2.0
"""`carryforward reproduce`."""

from pathlib import Path
from typing import Annotated

import typer

from ..settings import BUNDLED, RUN
from .errors import user_errors
from .options import TrainingDevice, check_folder, uses_cpu


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
        from ..reproduction import parallel, recipes, run

        check_folder(work, "--work")
        use_cpu = uses_cpu(device)
        recipe = recipes.read(recipes.path_of(experiments, what, setting), model=model, data=data)
        cells, folder = tuple(cell or ()), work / what / setting
        if jobs > 1 and not tables_only:
            names = [one.name for one, missing in run.unfinished(recipe, cells, test) if missing and not one.borrowed]
            options = {"setting": setting, "experiments": experiments, "work": work, "model": model, "data": data,
                       "device": device}  # fmt: skip
            arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
            flags = ["--no-pages", *["--test"] * test, *["--no-keep-models"] * (not keep_models)]
            command = ["-m", "carryforward", "reproduce", what, *arguments, *flags, "--cell"]
            parallel.run_parallel({name: [*command, name] for name in names}, folder, jobs)
        elif not tables_only:
            run.run(recipe, folder, labels=cells, test=test, keep_models=keep_models, use_cpu=use_cpu)
        if not pages:
            return
        for page in published.publish(experiments):
            typer.echo(page)
