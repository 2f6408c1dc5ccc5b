# SPDX-License-Identifier: Apache-2.0
"""Write the pages from the results: `experiments/paper/WHAT/README.md` with tables and figures, and CLAIMS.md."""

import logging
from pathlib import Path

from ..utils.files import write_text
from . import claims, figures, recipes, tables
from .claims import ExperimentRows, SettingResults
from .tables import RecipeResults

logger = logging.getLogger(__name__)

_NOTE = "Written by `carryforward reproduce`; every number comes from a JSON file in `results/`."
_TABLE1, _TABLE2, _WINDOWS, _VARIANTS = "table1", "table2", "windows", "alternatives"
_NOTHING = RecipeResults([], {}, ["everything"], ["everything"])
_PARTS = {"overlaps": "table 2", "wikitext": "C8", "windows": "windows", "variants": "alternatives"}  # as notes say it


def publish(folder: Path) -> list[Path]:
    """Write every page and return the paths. An experiment that cannot be read is logged, and its page is left as it
    was."""
    written = []
    for what in sorted({path.parents[1].name for path in folder.glob("*/recipes/*.yaml")}):
        try:
            page = _page(folder, what)
        except ValueError as error:
            logger.warning("the page of %s is left as it was: %s", what, error)
            continue
        if page is not None:
            written.append(_write(folder / what / "README.md", page))
    written.append(_write(folder / "CLAIMS.md", _claims(folder)))
    return written


def _page(folder: Path, what: str) -> str | None:
    """One experiment's page, with a section for each setting; None if it has no results."""
    sections = []
    for path in sorted((folder / what / "recipes").glob("*.yaml")):
        recipe = recipes.read(path)
        results = tables.load(recipe)
        if not results.rows:
            continue
        parts = [f"## {path.stem}", "", recipe.about, "", tables.markdown(recipe.table, results.rows)]
        try:
            drawn = figures.write(recipe.table, results.rows, folder / what / path.stem)
            parts += [f"![{figure.stem}]({figure.name})\n" for figure in drawn]
        except ImportError as error:
            logger.warning("the figures of %s are left out: %s", what, error)
        parts += [f"{part}\n" for part in (tables.searches(results.runs),) if part]
        parts += [tables.origin(results.runs)]
        if results.unfinished:
            parts += [f"Unfinished, or run with other settings: {', '.join(results.unfinished)}."]
        sections.append("\n".join(parts))
    return "\n\n".join([f"# {what}", _NOTE, *sections]) + "\n" if sections else None


def _claims(folder: Path) -> str:
    """The page of claims: a table with a column for each setting, and a note on the data of each."""
    settings, notes = {}, []
    for path in sorted((folder / _TABLE2 / "recipes").glob("*.yaml")):
        found = {what: _load(folder, what, path.stem) for what in (_TABLE1, _TABLE2, _WINDOWS, _VARIANTS)}
        if not any(results.rows for results in found.values()):
            continue
        wikitext = found[_TABLE1] if found[_TABLE1].rows else found[_TABLE2]
        parts = {
            "overlaps": _select(found[_TABLE2], wikitext=False),
            "wikitext": _select(wikitext, wikitext=wikitext is found[_TABLE2]),
            "windows": _select(found[_WINDOWS], wikitext=False),
            "variants": _select(found[_VARIANTS], wikitext=False),
        }
        settings[path.stem] = SettingResults(**parts)
        texts = [f"{_PARTS[name]} on {part.rows[0].title}" for name, part in parts.items() if part.rows]
        texts += [
            f"the state of {name} enters at layer {at}" for name in (_TABLE2, _WINDOWS) for at in _layers(found[name])
        ]
        seeds = sorted({row.seed for part in parts.values() for row in part.rows})
        trained = ". The models scored on WikiText were trained on books" * (wikitext is found[_TABLE2])
        notes.append(f"* {path.stem}: {'; '.join(texts)}; seeds {', '.join(map(str, seeds))}{trained}.")
    others = "C6 ([topics](../other/topics/README.md)) and C7 ([questions](../other/questions/README.md))"
    intro = f"# The paper's claims, here\n\n{_NOTE}\n{others} are on pages of their own.\n"
    if not settings:
        return f"{intro}\nNothing is measured yet.\n"
    if "paper" not in settings:
        intro += "No model here is the paper's, and no number is measured on PG-19.\n"
    return "\n".join([intro, claims.page(settings), "", *notes]) + "\n"


def _load(folder: Path, what: str, setting: str) -> RecipeResults:
    path = recipes.path_of(folder, what, setting)
    try:
        return tables.load(recipes.read(path)) if path.exists() else _NOTHING
    except ValueError as error:
        logger.warning("%s is used for no claim: %s", path, error)
        return _NOTHING


def _layers(results: RecipeResults) -> list[str]:
    """The layers states enter, where they are not the paper's."""
    layers = [run["settings"]["insert_at"] for run in results.runs.values() if run["settings"]["recurrence"]]
    return sorted({", ".join(map(str, given)) for given in layers if given})


def _select(results: RecipeResults, wikitext: bool) -> ExperimentRows:
    """The rows of WikiText or of the other texts: of the test split if every cell was scored on it, else validation."""
    rows = [row for row in results.rows if row.text.startswith(tables.WIKITEXT) == wikitext]
    split = "test" if not results.untested and any(row.split == "test" for row in rows) else "validation"
    return ExperimentRows([row for row in rows if row.split == split], complete=not results.unfinished)


def _write(path: Path, text: str) -> Path:
    write_text(path, text)
    return path
