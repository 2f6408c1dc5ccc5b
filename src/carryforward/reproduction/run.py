# SPDX-License-Identifier: Apache-2.0
"""Running a recipe: each cell is trained, then scored on its texts. What is finished is never run again.

Models stay in a working folder and can be thrown away once everything is scored.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from ..evaluation.evaluate import evaluate
from ..models.loading import RUN_FILE
from ..settings import EvaluateSettings
from ..training.finishing import free
from ..training.train import train
from ..utils import console
from .recipes import Cell, Recipe
from .results import asked, differing, identity, record_of, result_of, write


def run(
    recipe: Recipe,
    work: Path,
    *,
    labels: tuple[str, ...] = (),
    test: bool = False,
    keep_models: bool = True,
    use_cpu: bool = False,
) -> None:
    """Run what is not finished yet.

    Args:
        work: for models, a folder for each cell.
        labels: run these cells only: names, or names with a seed (`plain-seed1`).
        test: score on test splits as well: once, when nothing is left to choose.
        keep_models: False throws a cell's model away once it is scored.
    """
    lacking = unfinished(recipe, labels, test)
    for cell, some in lacking:
        if some and cell.borrowed:
            console.note(f"{cell.name} is another experiment's ({cell.folder}): run that one.")
        elif some:
            console.note(f"\n{cell.name}: {', '.join(some)}")
            _run(cell, some, work / cell.name, use_cpu)
            free()
            if not keep_models:
                shutil.rmtree(work / cell.name)


def unfinished(recipe: Recipe, labels: tuple[str, ...], test: bool) -> list[tuple[Cell, list[str]]]:
    """Cells, by label or with their seed, and what each lacks."""
    unknown = set(labels) - {name for cell in recipe.cells for name in (cell.label, cell.name)}
    if unknown:
        known = ", ".join(dict.fromkeys(cell.label for cell in recipe.cells))
        raise ValueError(f"--cell {' '.join(sorted(unknown))}: this recipe has {known}.")
    cells = [cell for cell in recipe.cells if not labels or {cell.label, cell.name} & {*labels}]
    lacking = [(cell, missing(cell, test)) for cell in cells]
    console.note(f"{sum(not some for _, some in lacking)} of {len(cells)} cells are finished.")
    return lacking


def missing(cell: Cell, test: bool) -> list[str]:
    """What a cell lacks: the run's record, results. Refuses a folder whose record is of other settings."""
    wanted = [name for name, text in cell.texts.items() if test or text["split"] != "test"]
    record = record_of(cell)
    if record is None:
        return [RUN_FILE, *wanted]
    told = differing(cell, record)
    if told:
        raise ValueError(f"{cell.folder} has results of another recipe ({told}). Move them away to run the cell again.")
    return [name for name in wanted if result_of(cell, name, record) is None]


def _run(cell: Cell, lacking: list[str], model: Path, use_cpu: bool) -> None:
    record = record_of(cell)
    if record is None:
        record = train(cell.resolved(), model, use_cpu=use_cpu)
        free()
        shutil.rmtree(cell.folder, ignore_errors=True)  # results of a model that is no more
        write(cell.folder / RUN_FILE, record)
    elif not (model / RUN_FILE).exists() or json.loads((model / RUN_FILE).read_text()) != record:
        raise ValueError(
            f"{cell.name} is to be scored on {', '.join(lacking)}, but {model} no longer has its model. Move "
            f"{cell.folder} away to train it again."
        )
    for text in lacking:
        if text != RUN_FILE:
            found = _score(cell, model, text, use_cpu)
            write(cell.folder / f"{text}.json", {**found, "run": identity(record), "asked": asked(cell, text)})


def _score(cell: Cell, model: Path, text: str, use_cpu: bool) -> dict[str, Any]:
    shared = {name: getattr(cell.settings, name) for name in ("batch_size", "data", "bf16")}
    found = evaluate(
        str(model), EvaluateSettings(**{**shared, "overlap": cell.overlaps, **cell.texts[text]}),
        device="cpu" if use_cpu else None, fast_path=cell.settings.fast_path,  # type: ignore[arg-type]
        seed=cell.settings.seed,
    )  # fmt: skip
    found["model"]["name"] = cell.label
    return found
