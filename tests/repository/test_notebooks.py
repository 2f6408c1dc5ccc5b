# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from top to bottom, offline, and hold no results of an earlier run."""

import json
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def cells(notebook, kind):
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, monkeypatch, tmp_path, capsys):
    """Its assertions hold, too. The folder is empty but for the example's text."""
    shutil.copy(ROOT / "examples" / "the_ferry_at_halden.txt", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARRYFORWARD_CACHE", str(tmp_path / "cache"))
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells(notebook, "code"), 1):
        exec(compile("".join(cell["source"]), f"{notebook.name}, code cell {number}", "exec"), names)
    assert capsys.readouterr().out.count("\n") > 3


def test_there_are_three_notebooks_without_outputs():
    assert len(NOTEBOOKS) == 3
    for notebook in NOTEBOOKS:
        code = cells(notebook, "code")
        assert any("assert " in "".join(cell["source"]) for cell in code), "it checks what it says"
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
        assert "".join(cells(notebook, "markdown")[0]["source"]).startswith("# ")
