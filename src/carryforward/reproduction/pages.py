# SPDX-License-Identifier: Apache-2.0
"""Pages from results: `experiments/WHAT/README.md` with tables and figures of every setting, and the claims page."""

import logging
from pathlib import Path

from ..utils.files import write_text
from . import claims, figures, recipes, tables
from .claims import Part, Results
from .tables import Found

logger = logging.getLogger(__name__)

_NOTE = "Written by `carryforward reproduce`; every number comes from a JSON file in `results/`."
_TABLE1, _TABLE2, _WINDOWS, _VARIANTS = "table1", "table2", "windows", "alternatives"
_NOTHING = Found([], {}, ["everything"], ["everything"])


def publish(folder: Path) -> list[Path]:
    """Write every page anew; which they are. What is wrong with one is said, and keeps none of the others back."""
    made = []
    for what in sorted({path.parents[1].name for path in folder.glob("*/recipes/*.yaml")}):
        try:
            page = _page(folder, what)
        except ValueError as error:
            logger.warning("the page of %s is left as it was: %s", what, error)
            continue
        if page is not None:
            made.append(_write(folder / what / "README.md", page))
    made.append(_write(folder / "CLAIMS.md", _claims(folder)))
    return made


def _page(folder: Path, what: str) -> str | None:
    """What one experiment showed, setting by setting; None before there is anything."""
    sections = []
    for path in sorted((folder / what / "recipes").glob("*.yaml")):
        recipe = recipes.read(path)
        found = tables.find(recipe)
        if not found.rows:
            continue
        parts = [f"## {path.stem}", "", recipe.about, "", tables.markdown(recipe.table, found.rows)]
        try:
            made = figures.write(recipe.table, found.rows, folder / what / path.stem)
            parts += [f"![{figure.stem}]({figure.name})\n" for figure in made]
        except ImportError as error:
            logger.warning("figures of %s are left out: %s", what, error)
        parts += [f"{part}\n" for part in (tables.searches(found.runs),) if part]
        parts += [tables.origin(found.runs)]
        parts += [f"Not finished, or not with these settings: {', '.join(found.unfinished)}."] * bool(found.unfinished)
        sections.append("\n".join(parts))
    return "\n\n".join([f"# {what}", _NOTE, *sections]) + "\n" if sections else None


def _claims(folder: Path) -> str:
    settings, notes = {}, []
    for path in sorted((folder / _TABLE2 / "recipes").glob("*.yaml")):
        found = {what: _find(folder, what, path.stem) for what in (_TABLE1, _TABLE2, _WINDOWS, _VARIANTS)}
        if not any(some.rows for some in found.values()):
            continue
        articles = found[_TABLE1] if found[_TABLE1].rows else found[_TABLE2]
        parts = {
            "overlaps": _part(found[_TABLE2], beside=False),
            "beside": _part(articles, beside=articles is found[_TABLE2]),
            "windows": _part(found[_WINDOWS], beside=False),
            "variants": _part(found[_VARIANTS], beside=False),
        }
        settings[path.stem] = Results(**parts)
        texts = [f"{name} on {part.rows[0].title}" for name, part in parts.items() if part.rows]
        texts += [f"the state of {name} at layer {at}" for name in (_TABLE2, _WINDOWS) for at in _layers(found[name])]
        seeds = sorted({row.seed for part in parts.values() for row in part.rows})
        trained = ". The models scored on WikiText were trained on books" * (articles is found[_TABLE2])
        notes.append(f"* {path.stem}: {'; '.join(texts)}; seeds {', '.join(map(str, seeds))}{trained}.")
    elsewhere = "C6 ([topics](topics/README.md)) and C7 ([questions](questions/README.md)) are on pages of their own."
    intro = f"# The paper's claims, here\n\n{_NOTE}\n{elsewhere}\n"
    if not settings:
        return f"{intro}\nNothing is measured yet.\n"
    if "paper" not in settings:
        intro += "No model here is the paper's, and no figure is one of PG-19.\n"
    return "\n".join([intro, claims.page(settings), "", *notes]) + "\n"


def _find(folder: Path, what: str, setting: str) -> Found:
    path = recipes.path_of(folder, what, setting)
    try:
        return tables.find(recipes.read(path)) if path.exists() else _NOTHING
    except ValueError as error:
        logger.warning("%s counts for no claim: %s", path, error)
        return _NOTHING


def _layers(found: Found) -> list[str]:
    """Where states enter, if not where the paper's does."""
    given = [run["settings"]["insert_at"] for run in found.runs.values() if run["settings"]["recurrence"]]
    return sorted({", ".join(map(str, layers)) for layers in given if layers})


def _part(found: Found, beside: bool) -> Part:
    """The rows of one text, of the books or beside them: of the test split if every cell has been scored on it."""
    rows = [row for row in found.rows if row.text.startswith(tables.BESIDE) == beside]
    split = "test" if not found.untested and any(row.split == "test" for row in rows) else "validation"
    return Part([row for row in rows if row.split == split], complete=not found.unfinished)


def _write(path: Path, text: str) -> Path:
    write_text(path, text)
    return path
