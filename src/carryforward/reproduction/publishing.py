# SPDX-License-Identifier: Apache-2.0
"""Pages from results: `experiments/WHAT/README.md` with tables and figures of every setting, and the claims page."""

import logging
from collections.abc import Sequence
from pathlib import Path

from ..files import written_whole
from . import claims, figures, recipes, tables
from .claims import Results
from .tables import Row

logger = logging.getLogger(__name__)

PARTS = {"overlaps": "table2", "windows": "windows", "alternatives": "alternatives"}
_NOTE = "Written by `carryforward reproduce`; every number comes from a JSON file in `results/`."


def recipe_path(folder: Path, what: str, setting: str) -> Path:
    return folder / what / "recipes" / f"{setting}.yaml"


def results_path(folder: Path, what: str, setting: str) -> Path:
    return folder / what / "results" / setting


def publish(folder: Path) -> list[Path]:
    """Write every page anew; which they are."""
    made = []
    for what in sorted({path.parents[1].name for path in folder.glob("*/recipes/*.yaml")}):
        page = _page(folder, what)
        if page is not None:
            made.append(_write(folder / what / "README.md", page))
    made.append(_write(folder / "CLAIMS.md", _claims(folder)))
    return made


def _page(folder: Path, what: str) -> str | None:
    """What one experiment showed, setting by setting; None before there is anything."""
    sections = []
    for path in sorted((folder / what / "recipes").glob("*.yaml")):
        results = results_path(folder, what, path.stem)
        rows = tables.rows_of(results)
        if not rows:
            continue
        recipe = recipes.read(path)
        section = [f"## {path.stem}", "", recipe.about, "", tables.markdown(recipe.table, rows)]
        try:
            made = figures.write(recipe.table, rows, folder / what / path.stem)
            section += [f"![{figure.stem}]({figure.name})\n" for figure in made]
        except ImportError as error:
            logger.warning("figures of %s are left out: %s", what, error)
        tried = tables.searches(results)
        sections.append("\n".join([*section, *([f"{tried}\n"] if tried else []), tables.origin(results)]))
    if not sections:
        return None
    return "\n\n".join([f"# {what}", _NOTE, *sections]) + "\n"


def _claims(folder: Path) -> str:
    found: dict[str, dict[str, Results]] = {}
    for path in sorted((folder / PARTS["overlaps"] / "recipes").glob("*.yaml")):
        rows = {kind: tables.rows_of(results_path(folder, what, path.stem)) for kind, what in PARTS.items()}
        if any(rows.values()):
            found[path.stem] = {
                text: Results(*(_final(some, text) for some in rows.values())) for text in ("books", tables.BESIDE)
            }
    intro = (
        "# The paper's claims, here\n\n"
        "Held against text and models that can be had: no figure here is one of PG-19, and no model is the paper's.\n"
        f"{_NOTE} C6 and C7 are about continuations and question answering.\n"
    )
    return f"{intro}\n{claims.page(found)}\n" if found else f"{intro}\nNothing is measured yet.\n"


def _final(rows: Sequence[Row], text: str) -> list[Row]:
    """The rows of one kind of text: of its test split where it was scored, else of validation."""
    some = [row for row in rows if row.text.startswith(tables.BESIDE) == (text == tables.BESIDE)]
    test = [row for row in some if "test" in row.text]
    return test or some


def _write(path: Path, text: str) -> Path:
    with written_whole(path) as beside:
        beside.write_text(text, encoding="utf-8")
    return path
