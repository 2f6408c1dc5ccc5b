# SPDX-License-Identifier: Apache-2.0
"""Recipes: the cells (models) of an experiment to train, and the texts to score each on.

A recipe is a YAML file, `experiments/paper/WHAT/recipes/SETTING.yaml`:

    about: what is compared, in a sentence or two
    table: overlaps                 # how results are shown (see `tables`)
    train: {model: bundled, ...}    # settings of `carryforward train`, for every cell
    score:                          # a name for each text, and settings of `carryforward evaluate`
      validation: {split: validation, max_document_tokens: 15000}
      test: {split: test}
    seeds: [0, 1]
    cells:
      plain: {train: {recurrence: false}, overlaps: [0, 50]}
      recurrent-50: {train: {overlap: 50}, overlaps: [50], rates_of: rates/recurrent}
      recurrent-0: {same_as: table2/recurrent-0, overlaps: [0]}

With `rates_of` a cell uses the learning rates that another cell's search has chosen. With `same_as` it is another cell,
which another experiment trains. Both name an experiment and a cell of the same setting.
"""

import dataclasses
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ..settings.commands import TrainSettings
from ..utils.checkpoints import RUN_FILE, read_run
from ..utils.parsing import read_yaml

KINDS = ("overlaps", "windows", "variants")
RATES = ("learning_rate", "recurrence_learning_rate")
_SCORE = ("data", "split", "max_document_tokens", "batch_size", "control")  # of `evaluate`


@dataclass(frozen=True)
class Cell:
    """One model to train.

    Attributes:
        label: its name in the recipe, shared by its seeds.
        folder: where its results are.
        overlaps: the overlaps it is scored at.
        texts: settings of `evaluate` for each text it is scored on, by the text's name.
        rates_of: record of the run whose learning rates it uses.
        borrowed: whether another experiment trains it (`same_as`).
    """

    label: str
    settings: TrainSettings
    folder: Path
    overlaps: tuple[int, ...]
    texts: dict[str, dict[str, Any]]
    rates_of: Path | None = None
    borrowed: bool = False

    @property
    def name(self) -> str:
        return f"{self.label}-seed{self.settings.seed}"

    def resolved(self) -> TrainSettings:
        """Its settings, with the learning rates of `rates_of` filled in."""
        if self.rates_of is None:
            return self.settings
        if not self.rates_of.exists():
            raise ValueError(f"{self.label} uses the learning rates of {self.rates_of}: run that experiment first.")
        record = read_run(self.rates_of)
        rates = record.get("chosen") or record["settings"]  # a single rate needed no search
        try:
            values = {name: _cast(tuple[float, ...], rates[name]) for name in RATES}
            return dataclasses.replace(self.settings, **values)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.rates_of} is damaged: its learning rates cannot be read ({error}).") from error


@dataclass(frozen=True)
class Recipe:
    """Cells in the order in which they are run, and how their results are shown."""

    about: str
    table: str
    cells: tuple[Cell, ...]


def path_of(experiments: Path, what: str, setting: str) -> Path:
    return experiments / what / "recipes" / f"{setting}.yaml"


def read(path: Path, *, model: str | None = None, data: str | None = None) -> Recipe:
    """Read a recipe.

    Args:
        model, data: the base model and the text on this machine, in place of those of the recipe.
    """
    content = _content(path)
    shared = dict(content["train"])
    shared |= {name: value for name, value in (("model", model), ("data", data)) if value is not None}
    texts = {name: _keys(f"{path}: score {name}", text, ("split",), _SCORE) for name, text in content["score"].items()}
    cells: list[Cell] = []
    for label, entry in content["cells"].items():
        where = f"{path}: cell {label}"
        own = _keys(where, entry, ("overlaps",), ("train", "seeds", "texts", "rates_of", "same_as"))
        unknown = set(own.get("texts", texts)) - set(texts)
        if unknown:
            raise ValueError(f"{where}: texts {', '.join(unknown)} are not under `score`.")
        scored = {name: text for name, text in texts.items() if name in own.get("texts", texts)}
        for seed in own.get("seeds", content.get("seeds", [0])):
            if "same_as" in own:
                cells.append(_borrowed(where, path, label, own, seed, scored, model, data))
                continue
            settings = _settings(where, shared | dict(own.get("train") or {}) | {"seed": seed})
            rates = _results_of(where, path, own["rates_of"], 0) / RUN_FILE if "rates_of" in own else None
            folder = path.parents[1] / "results" / path.stem / f"{label}-seed{seed}"
            cells.append(Cell(str(label), settings, folder, tuple(own["overlaps"]), scored, rates))
    cells.sort(key=lambda cell: cell.settings.seed)  # one seed of everything before the next
    return Recipe(" ".join(content["about"].split()), content["table"], tuple(cells))


def _content(path: Path) -> dict[str, Any]:
    if not path.is_file():
        present = ", ".join(sorted(recipe.stem for recipe in path.parent.glob("*.yaml")))
        hint = f"Settings there: {present}." if present else "Give the folder of the recipes with --experiments."
        raise ValueError(f"{path}: no such recipe. {hint}")
    content = _keys(path, read_yaml(path), ("about", "table", "train", "score", "cells"), ("seeds",))
    if content["table"] not in KINDS:
        raise ValueError(f"{path}: table {content['table']!r} is not one of {', '.join(KINDS)}.")
    return content


def _results_of(where: str, path: Path, name: str, seed: int) -> Path:
    """The results folder of a cell EXPERIMENT/LABEL, in the setting of the recipe at `path`."""
    what, slash, label = str(name).partition("/")
    if not slash:
        raise ValueError(f"{where}: {name} must be EXPERIMENT/CELL.")
    return path.parents[2] / what / "results" / path.stem / f"{label}-seed{seed}"


def _borrowed(
    where: str,
    path: Path,
    label: str,
    own: dict[str, Any],
    seed: int,
    texts: dict[str, dict[str, Any]],
    model: str | None,
    data: str | None,
) -> Cell:
    """The cell that `same_as` names, read from the recipe of its experiment."""
    folder = _results_of(where, path, own["same_as"], seed)
    if "train" in own or "rates_of" in own:
        raise ValueError(f"{where}: it is {own['same_as']}, so it cannot have settings of its own.")
    other = read(path_of(path.parents[2], folder.parents[2].name, path.stem), model=model, data=data)
    for cell in other.cells:
        if cell.folder == folder:
            return dataclasses.replace(
                cell, label=str(label), overlaps=tuple(own["overlaps"]), texts=texts, borrowed=True
            )
    raise ValueError(f"{where}: there is no cell {own['same_as']} with seed {seed}.")


def _keys(where: Any, content: Any, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """Check that the content is a mapping with these keys, and return it."""
    if not isinstance(content, dict):
        raise ValueError(f"{where}: `name: value` lines are expected, not {reprlib.repr(content)}.")
    lacking, unknown = [key for key in required if key not in content], set(content) - {*required, *optional}
    if lacking or unknown:
        what = f"{', '.join(lacking)} missing" if lacking else f"{', '.join(map(str, sorted(unknown)))} unknown"
        raise ValueError(f"{where}: {what}. Its keys are: {', '.join([*required, *optional])}.")
    return content


def _settings(where: str, values: dict[str, Any]) -> TrainSettings:
    hints = get_type_hints(TrainSettings)
    unknown = set(values) - {field.name for field in dataclasses.fields(TrainSettings)}
    if unknown:
        raise ValueError(f"{where}: {', '.join(sorted(unknown))} unknown to `carryforward train`.")
    try:
        return TrainSettings(**{name: _cast(hints[name], value) for name, value in values.items()})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


def _cast(hint: Any, value: Any) -> Any:
    """Convert a value of YAML, which reads 1e-4 as a string and has no tuples, to the type of a setting."""
    if isinstance(hint, UnionType):
        if value is None:
            return None
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is tuple:
        return tuple(_cast_one(get_args(hint)[0], item) for item in (value if isinstance(value, list) else [value]))
    return _cast_one(hint, value)


def _cast_one(kind: type, value: Any) -> Any:
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false.")
    if isinstance(value, bool) and kind is not bool:
        raise ValueError(f"{value!r} is a flag's value: give a number or a name.")
    if kind is int and isinstance(value, float):
        raise ValueError(f"{value!r} is not an integer.")
    return kind(value)
