# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward reproduce` and `experiments/paper/run.py`: run what is missing of an experiment."""

import math
from collections.abc import Sequence
from pathlib import Path

from ..settings.recurrence import BUNDLED
from ..training.lifecycle import uses_cpu
from ..utils.checks import check_count
from . import recipes
from .parallel import run_parallel
from .run import run, unfinished

EXPERIMENTS, WORK = Path("experiments/paper"), Path("runs")


def reproduce(
    what: str,
    setting: str = BUNDLED,
    *,
    program: Sequence[str],
    experiments: Path = EXPERIMENTS,
    work: Path = WORK,
    model: str | None = None,
    data: str | None = None,
    cells: Sequence[str] = (),
    jobs: int = 1,
    seconds: float | None = None,
    test: bool = False,
    keep_models: bool = True,
    device: str | None = None,
) -> None:
    """Run the cells of an experiment that are not finished. The pages are written by `pages.publish`.

    Args:
        what, setting: the experiment's folder, and which of its recipes.
        program: how Python is told to run one cell in a process of its own, `-m carryforward reproduce` or the path of
            a script; it is called with the options below, `--no-pages` and `--cell`.
        experiments, work: folders of the experiments, and of the models.
        model, data: base model and corpus, in place of the recipe's.
        cells: run these only, by label or by name; by default all.
        jobs: cells to run in parallel.
        seconds: after so many, cells are saved and stopped; the same call resumes them.
        test: score the test splits, too.
        keep_models: False deletes each model once it is scored.
        device: "cpu" leaves a GPU unused.
    """
    check_count("jobs", jobs)
    use_cpu = uses_cpu(device)
    recipe = recipes.read(recipes.path_of(experiments, what, setting), model=model, data=data)
    folder = work / what / setting
    if jobs == 1 and seconds is None:
        run(recipe, folder, labels=tuple(cells), test=test, keep_models=keep_models, use_cpu=use_cpu)
        return
    names = [cell.name for cell, missing in unfinished(recipe, tuple(cells), test) if missing and not cell.borrowed]
    options = {"setting": setting, "experiments": experiments, "work": work, "model": model, "data": data,
               "device": device}  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
    flags = ["--no-pages", *["--test"] * test, *["--no-keep-models"] * (not keep_models)]
    commands = {name: [*program, what, *arguments, *flags, "--cell", name] for name in names}
    run_parallel(commands, folder, jobs, seconds=math.inf if seconds is None else seconds)
