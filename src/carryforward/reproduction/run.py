# SPDX-License-Identifier: Apache-2.0
"""Run a recipe: train each cell, then score it on its texts. Finished work is never repeated.

Models stay in a working folder and can be deleted once everything is scored.
"""

import shutil
from pathlib import Path
from typing import Any

from ..evaluation.evaluate import evaluate
from ..settings.commands import EvaluateSettings
from ..training.lifecycle import release_memory
from ..training.train import train
from ..utils import console
from ..utils.checkpoints import RUN_FILE, read_run
from .recipes import Cell, Recipe
from .results import differences, read_record, read_result, run_id, scoring, write


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
        work: where models go, one folder per cell.
        labels: run these cells only: labels, or labels with a seed (`plain-seed1`).
        test: score the test splits too. Do this once, when nothing is left to choose.
        keep_models: False deletes a cell's model once it is scored.
    """
    for cell, lacking in unfinished(recipe, labels, test):
        if lacking and cell.borrowed:
            console.note(f"{cell.name} belongs to another experiment ({cell.folder}): run that one.")
        elif lacking:
            console.note(f"\n{cell.name}: {', '.join(lacking)}")
            _run(cell, lacking, work / cell.name, use_cpu)
            release_memory()
            if not keep_models:
                shutil.rmtree(work / cell.name)


def unfinished(recipe: Recipe, labels: tuple[str, ...], test: bool) -> list[tuple[Cell, list[str]]]:
    """The selected cells, each with the files it lacks."""
    unknown = set(labels) - {name for cell in recipe.cells for name in (cell.label, cell.name)}
    if unknown:
        known = ", ".join(dict.fromkeys(cell.label for cell in recipe.cells))
        raise ValueError(f"--cell {' '.join(sorted(unknown))}: this recipe has {known}.")
    cells = [cell for cell in recipe.cells if not labels or {cell.label, cell.name} & {*labels}]
    pairs = [(cell, missing(cell, test)) for cell in cells]
    console.note(f"{sum(not lacking for _, lacking in pairs)} of {len(cells)} cells are finished.")
    return pairs


def missing(cell: Cell, test: bool) -> list[str]:
    """The files a cell lacks: the run's record, results. Refuses a folder whose record has other settings."""
    texts = [name for name, text in cell.texts.items() if test or text["split"] != "test"]
    record = read_record(cell)
    if record is None:
        return [RUN_FILE, *texts]
    differing = differences(cell, record)
    if differing:
        raise ValueError(
            f"{cell.folder} has results of another recipe ({differing}). Move them away to run the cell again."
        )
    return [name for name in texts if read_result(cell, name, record) is None]


def _run(cell: Cell, lacking: list[str], model: Path, use_cpu: bool) -> None:
    """Train a cell, unless that is done, and score it on the texts it lacks."""
    record = read_record(cell)
    if record is None:
        record = train(cell.resolved(), model, use_cpu=use_cpu)
        release_memory()
        shutil.rmtree(cell.folder, ignore_errors=True)  # results of an earlier model
        write(cell.folder / RUN_FILE, record)
    elif not (model / RUN_FILE).exists() or read_run(model / RUN_FILE) != record:
        raise ValueError(
            f"{cell.name} is to be scored on {', '.join(lacking)}, but {model} no longer has its model. Move "
            f"{cell.folder} away to train it again."
        )
    for text in lacking:
        if text != RUN_FILE:
            result = _score(cell, model, text, use_cpu)
            write(cell.folder / f"{text}.json", {**result, "run": run_id(record), "asked": scoring(cell, text)})


def _score(cell: Cell, model: Path, text: str, use_cpu: bool) -> dict[str, Any]:
    shared = {name: getattr(cell.settings, name) for name in ("batch_size", "data", "bf16")}
    result = evaluate(
        str(model), EvaluateSettings(**{**shared, "overlap": cell.overlaps, **cell.texts[text]}),
        device="cpu" if use_cpu else None, fast_path=cell.settings.fast_path,  # type: ignore[arg-type]
        seed=cell.settings.seed,
    )  # fmt: skip
    result["model"]["name"] = cell.label
    return result
