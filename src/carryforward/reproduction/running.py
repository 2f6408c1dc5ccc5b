# SPDX-License-Identifier: Apache-2.0
"""Running a recipe: each cell is trained, then scored on its texts. What is finished is never run again.

A cell's results are a folder: `run.json`, the record of its training, and one result of `carryforward evaluate` for
each text. They are all that tables and figures are made of; models stay in a working folder and can be thrown away.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from .. import console
from ..evaluating import evaluate
from ..files import written_whole
from ..loading import RUN_FILE
from ..training import train
from .recipes import Cell, Recipe

_ELSEWHERE = ("model", "data", "validation_data")  # settings that say where things are on a machine


def run(
    recipe: Recipe,
    results: Path,
    work: Path,
    *,
    labels: tuple[str, ...] = (),
    test: bool = False,
    keep_models: bool = True,
    use_cpu: bool = False,
) -> None:
    """Run what is not finished yet.

    Args:
        results, work: folders for JSON and for models, with a folder for each cell in both.
        labels: run these cells only.
        test: score on test splits as well: once, when nothing is left to choose.
        keep_models: False throws a cell's model away once it is scored.
    """
    unknown = set(labels) - {cell.label for cell in recipe.cells}
    if unknown:
        known = ", ".join(dict.fromkeys(cell.label for cell in recipe.cells))
        raise ValueError(f"--cell {' '.join(sorted(unknown))}: this recipe has {known}.")
    cells = [cell for cell in recipe.cells if not labels or cell.label in labels]
    lacking = [(cell, _missing(cell, results / cell.name, test)) for cell in cells]
    console.note(f"{sum(not missing for _, missing in lacking)} of {len(cells)} cells are finished.")
    for cell, missing in lacking:
        if not missing:
            continue
        console.note(f"\n{cell.name}: {', '.join(missing)}")
        model, target = work / cell.name, results / cell.name
        record = train(cell.resolved(), model, use_cpu=use_cpu)
        for text in missing:
            if text != RUN_FILE:
                _write(target / f"{text}.json", _score(cell, model, text, use_cpu))
        _write(target / RUN_FILE, record)  # last: without it nothing of the cell counts as finished
        if not keep_models:
            shutil.rmtree(model)


def _missing(cell: Cell, folder: Path, test: bool) -> list[str]:
    """What a cell lacks: the run's record, results. Refuses to mix those of two different cells."""
    wanted = [name for name, text in cell.texts.items() if test or text["split"] != "test"]
    if not (folder / RUN_FILE).exists():
        return [RUN_FILE, *wanted]
    before = json.loads((folder / RUN_FILE).read_text())["settings"]
    now = json.loads(json.dumps(dataclasses.asdict(cell.resolved())))
    differing = [name for name in now if name not in _ELSEWHERE and now[name] != before.get(name)]
    if differing:
        told = ", ".join(f"{name}: {before.get(name)} there, {now[name]} in the recipe" for name in differing)
        raise ValueError(f"{folder} has results of another recipe ({told}). Move them away to run the cell again.")
    missing = []
    for name in wanted:
        file = folder / f"{name}.json"
        scored = {row["overlap"] for row in json.loads(file.read_text())["rows"]} if file.exists() else set()
        if not set(cell.overlaps) <= scored:
            missing.append(name)
    return missing


def _score(cell: Cell, model: Path, text: str, use_cpu: bool) -> dict[str, Any]:
    told = {"batch_size": cell.settings.batch_size, "data": cell.settings.data, **cell.texts[text]}
    found = evaluate(
        str(model), told.pop("data"), overlaps=cell.overlaps, window=None, bf16=cell.settings.bf16,
        device="cpu" if use_cpu else None, seed=cell.settings.seed, **told,
    )  # fmt: skip
    found["model"]["name"] = cell.label
    return found


def _write(file: Path, record: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as beside:
        beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
