# SPDX-License-Identifier: Apache-2.0
"""Recipes: cells are run once, results are read back, and tables, figures and claims are made from them."""

import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers import prose
from typer.testing import CliRunner

import carryforward as cf
from carryforward.cli.main import app
from carryforward.reproduction import claims, figures, pages, recipes, run, tables
from carryforward.reproduction.tables import Row

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "experiments/paper").glob("*/recipes/*.yaml"))

CONTENT = {
    "about": "A tiny model.",
    "table": "overlaps",
    "train": {
        "model": "model", "data": "text", "window": 16, "windows_per_sample": 3, "batch_size": 2, "train_tokens": 300,
        "eval_tokens": 300, "warmup_steps": 1, "max_validation_tokens": 60,
    },
    "score": {
        "validation": {"split": "validation", "max_document_tokens": 60},
        "test": {"split": "test", "max_document_tokens": 60},
    },
    "cells": {
        "plain": {"train": {"recurrence": False, "learning_rate": "1e-4"}, "overlaps": [0, 4]},
        "recurrent-4": {"train": {"preset": "paper", "overlap": 4}, "overlaps": [4], "rates_of": "table2/plain"},
    },
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An experiment with a tiny model, ready to run."""
    return prepare(tmp_path, monkeypatch)


def prepare(folder, monkeypatch):
    """Make a folder with a recipe, a model and texts, and work there."""
    work_in(folder, monkeypatch)
    prose.save_model(folder / "model")
    prose.save_topics(folder / "text")
    write(CONTENT)
    return folder / "experiments/paper"


def work_in(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CARRYFORWARD_CACHE", str(folder / "cache"))


def write(content, setting="tiny"):
    path = recipes.path_of(Path("experiments/paper"), "table2", setting)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def reproduce(*more):
    return CliRunner().invoke(app, ["reproduce", "table2", "--setting", "tiny", "--device", "cpu", *more])


def changed(**more):
    return {**CONTENT, **more}


# --- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parents[1].name}-{path.stem}")
def test_every_recipe_that_is_shipped_can_be_read(path):
    recipe = recipes.read(path)
    assert recipe.cells
    for cell in recipe.cells:
        assert cell.settings.max_validation_tokens == 15_000 or "wikitext" in cell.settings.data
        if cell.rates_of is not None:  # a cell that exists, plain for plain
            name, setting, what = (cell.rates_of.parents[i].name for i in (0, 1, 3))
            others = {c.name: c for c in recipes.read(recipes.path_of(ROOT / "experiments/paper", what, setting)).cells}
            assert others[name].settings.recurrence == cell.settings.recurrence
            assert setting == path.stem
    if recipe.table == "windows":  # as many tokens in a step whatever the window
        steps = {cell.settings.batch_size * cell.settings.window for cell in recipe.cells}
        assert max(steps) < 1.05 * min(steps)


def test_settings_have_the_types_that_training_expects(folder):
    plain, recurrent = recipes.read(recipes.path_of(folder, "table2", "tiny")).cells
    assert plain.settings.learning_rate == (1e-4,)  # YAML reads 1e-4 as a string
    assert plain.settings.recurrence is False
    assert (recurrent.settings.overlap, recurrent.name) == (4, "recurrent-4-seed0")


def test_all_cells_of_a_seed_run_before_the_next_seed(folder):
    recipe = recipes.read(write(changed(seeds=[0, 1])))
    assert [cell.name for cell in recipe.cells] == ["plain-seed0", "recurrent-4-seed0", "plain-seed1", "recurrent-4-seed1"]  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"table": "overlaps"}, "about, train, score, cells missing"),
        (changed(title="x"), "title unknown"),
        (changed(table="pie"), "table 'pie' is not one of overlaps, windows, variants"),
        (changed(cells={"plain": {"train": {"windwo": 3}, "overlaps": [0]}}), "cell plain: windwo unknown"),
        (changed(cells={"plain": {"train": {"recurrence": "no"}, "overlaps": [0]}}), "'no' is neither true nor false"),
        (changed(cells={"plain": {"train": {"batch_size": 0}, "overlaps": [0]}}), "--batch-size 0"),
        (changed(cells={"plain": {"overlaps": [0], "texts": ["tset"]}}), "texts tset are not under `score`"),
        (changed(score={"test": {"split": "test", "overlap": 3}}), "score test: overlap unknown"),
        (changed(cells={"plain": {"overlaps": [0], "rates_of": "plain"}}), "plain must be EXPERIMENT/CELL"),
        (changed(cells={"plain": {"overlaps": [0], "same_as": "table3/plain"}}), "table3/recipes/tiny.yaml: no such"),
        ([1, 2], "`name: value` lines are expected"),
    ],
)
def test_an_invalid_recipe_is_refused(content, message, folder):
    with pytest.raises(ValueError, match=message):
        recipes.read(write(content))


def test_a_missing_recipe(folder):
    result = CliRunner().invoke(app, ["reproduce", "table2", "--setting", "gpt3"])
    assert result.exit_code == 2
    assert "no such recipe. Settings there: tiny." in result.stderr
    result = CliRunner().invoke(app, ["reproduce", "table9", "--setting", "tiny"])
    assert "no such recipe. Give the folder of the recipes with --experiments." in result.stderr


# --- running ---------------------------------------------------------------------------------------------------------


def test_a_recipe_from_beginning_to_end(folder, monkeypatch):
    result = reproduce()
    assert result.exit_code == 0, result.stderr
    results = folder / "table2/results/tiny"
    files = {path.relative_to(results).as_posix() for path in results.rglob("*.json")}
    assert files == {f"{cell}/{file}.json" for cell in ("plain-seed0", "recurrent-4-seed0") for file in ("run", "validation")}  # fmt: skip  # noqa: E501
    record = json.loads((results / "recurrent-4-seed0/run.json").read_text())
    assert record["settings"]["learning_rate"] == [1e-4], "the rates of the plain cell"
    rows = tables.load(recipes.read(recipes.path_of(folder, "table2", "tiny"))).rows
    shown = {(row.label, row.overlap, row.use_state) for row in rows}
    assert shown == {("plain", 0, False), ("plain", 4, False), ("recurrent-4", 4, True), ("recurrent-4", 4, False)}
    page = (folder / "table2/README.md").read_text()
    recurrent = next(row for row in rows if row.use_state)
    assert f"{recurrent.perplexity:,.2f}" in page
    assert (folder / "table2/tiny.png").exists()
    assert "by overlap, 4:" in (folder / "CLAIMS.md").read_text()

    # finished cells are not run again, even if the text was moved
    monkeypatch.setattr(run, "train", lambda *args, **kwargs: pytest.fail("trained again"))
    with monkeypatch.context() as patch:
        patch.setattr(run, "evaluate", lambda *args, **kwargs: pytest.fail("scored again"))
        assert reproduce().exit_code == 0

    # the test split only when asked for, with the models that are there
    Path("text").rename("moved")
    before = (results / "plain-seed0/validation.json").stat().st_mtime_ns
    result = reproduce("--data", "moved", "--test", "--cell", "plain", "--no-keep-models")
    assert result.exit_code == 0, result.stderr
    assert (results / "plain-seed0/test.json").exists()
    assert not (results / "recurrent-4-seed0/test.json").exists()
    assert (results / "plain-seed0/validation.json").stat().st_mtime_ns == before
    assert not Path("runs/table2/tiny/plain-seed0").exists()
    assert Path("runs/table2/tiny/recurrent-4-seed0/model.safetensors").exists()


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory):
    """A folder in which the experiment is finished."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as monkeypatch:
        prepare(folder, monkeypatch)
        assert reproduce().exit_code == 0
    return folder


@pytest.fixture
def finished(finished_once, tmp_path, monkeypatch):
    """The results of a finished experiment, in a copy of its folder."""
    shutil.copytree(finished_once, tmp_path, dirs_exist_ok=True)
    work_in(tmp_path, monkeypatch)
    return tmp_path / "experiments/paper/table2/results/tiny"


def test_a_deleted_model_is_not_silently_retrained(finished):
    Path("runs").rename("thrown-away")
    result = reproduce("--test")
    assert result.exit_code == 2
    assert "no longer has its model" in result.stderr
    assert not (finished / "plain-seed0/test.json").exists()


def test_results_of_another_recipe_are_refused(finished):
    write(changed(train={**CONTENT["train"], "train_tokens": 400}))
    refused = reproduce()
    assert refused.exit_code == 2
    assert "train_tokens: 300 there, 400 in the recipe" in refused.stderr
    assert reproduce("--tables-only").exit_code == 0
    assert "Nothing is measured yet" in Path("experiments/paper/CLAIMS.md").read_text()


def test_a_text_scored_in_another_way_is_scored_again(finished):
    file = finished / "plain-seed0/validation.json"
    before = json.loads(file.read_text())["data"]["tokens"]
    write(changed(score={"validation": {"split": "validation", "max_document_tokens": 30}}))
    assert reproduce().exit_code == 0
    assert json.loads(file.read_text())["data"]["tokens"] < before


def test_results_of_another_training_run_are_ignored(finished):
    record = json.loads((finished / "plain-seed0/run.json").read_text())
    (finished / "plain-seed0/run.json").write_text(json.dumps({**record, "date": "another day"}))
    results = tables.load(recipes.read(recipes.path_of(Path("experiments/paper"), "table2", "tiny")))
    assert results.unfinished == ["plain-seed0"]
    assert {row.label for row in results.rows} == {"recurrent-4"}


@pytest.mark.parametrize("what", ["base models", "training texts"])
def test_models_of_different_origin_are_not_compared(what, finished):
    file = finished / "plain-seed0/run.json"
    record = json.loads(file.read_text())
    name = {"base models": "base", "training texts": "data"}[what]
    record["circumstances"][name] = "another"
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"the results have different {what}"):
        tables.load(recipes.read(recipes.path_of(Path("experiments/paper"), "table2", "tiny")))
    assert reproduce("--tables-only").exit_code == 0, "the other pages are still written"


def test_a_cell_that_another_experiment_runs(finished):
    path = recipes.path_of(Path("experiments/paper"), "windows", "tiny")
    path.parent.mkdir(parents=True)
    cells = {"plain-16": {"same_as": "table2/plain", "overlaps": [0]}}
    score = {"validation": CONTENT["score"]["validation"]}
    path.write_text(yaml.safe_dump({**CONTENT, "table": "windows", "score": score, "cells": cells}))
    results = tables.load(recipes.read(path))
    assert [(row.label, row.overlap, row.window) for row in results.rows] == [("plain-16", 0, 16)]
    assert not results.unfinished


def test_cells_in_parallel(folder):
    """Each cell runs in its own process; a failure is reported with its log."""
    own = {"train": {"recurrence": False, "learning_rate": "1e-4"}, "overlaps": [0]}
    write(changed(cells={"plain": own, "later": {**own, "rates_of": "rates/nothing"}}, seeds=[0, 1]))
    result = reproduce("--jobs", "2", "--cell", "plain", "--cell", "later-seed1")
    assert result.exit_code == 1
    assert "1 of 3 cells failed" in result.output
    assert "run that experiment first" in Path("runs/table2/tiny/later-seed1.log").read_text()
    alone = [
        json.loads(path.read_text()) for path in sorted(folder.glob("table2/results/tiny/plain-*/validation.json"))
    ]
    assert len(alone) == 2
    assert not (folder / "table2" / "README.md").exists()
    assert reproduce("--jobs", "2", "--cell", "plain").exit_code == 0, "everything is finished"
    assert (folder / "table2" / "README.md").exists()


def test_recipes_run_without_the_command_line(folder, tmp_path):
    """On a machine without typer: the script, and the process that it starts."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked/sitecustomize.py").write_text(
        "import sys\nfor name in ('typer', 'click', 'pydantic'):\n    sys.modules[name] = None\n"
    )
    paths = [str(tmp_path / "blocked"), str(Path(cf.__file__).parents[1])]
    options = ["table2", "--setting", "tiny", "--device", "cpu", "--jobs", "2", "--cell", "plain"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments/paper/run.py"), *options], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    command = json.loads((folder / "table2/results/tiny/plain-seed0/validation.json").read_text())["command"]
    assert command.startswith("run.py table2 --setting=tiny")
    assert command.endswith("--cell plain-seed0")
    assert "1 of 1 cells are finished" in reproduce("--cell", "plain").stderr, "the command line finds the results"


def test_an_unreadable_recipe_ends_the_script_with_a_message(folder, monkeypatch):
    monkeypatch.setattr("sys.argv", ["run.py", "table3"])
    with pytest.raises(SystemExit, match=r"error: experiments/paper/table3/recipes/bundled.yaml: no such recipe"):
        runpy.run_path(str(ROOT / "experiments/paper/run.py"), run_name="__main__")


def test_parallel_cells_stop_gracefully(folder):
    write(changed(train={**CONTENT["train"], "train_tokens": 10**8, "eval_tokens": 10**8}, seeds=[0, 1]))
    command = [sys.executable, "-m", "carryforward", "reproduce", "table2", "--setting", "tiny", "--device", "cpu",
               "--jobs", "2", "--cell", "plain"]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    logs = [Path(f"runs/table2/tiny/plain-seed{seed}.log") for seed in (0, 1)]
    end = time.monotonic() + 120
    while not all(log.exists() and "training:" in log.read_text() for log in logs):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert "To resume, run the same command again" in process.stderr.read()
    for log in logs:
        assert "stopped at step" in (text := log.read_text()) or "interrupted" in text  # before the first step


def test_cells_stop_after_a_given_time(folder):
    result = reproduce("--cell", "plain", "--seconds", "0")
    assert result.exit_code == 130
    assert "To resume, run the same command again" in result.stderr
    assert not [*folder.glob("table2/results/tiny/*/*.json")]


def test_a_stopped_run_resumes(folder, monkeypatch):
    real, calls = run.evaluate, []

    def fails_once(name, *args, **kwargs):
        calls.append(name)
        if len(calls) == 1:
            raise OSError("disk full")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(run, "evaluate", fails_once)
    assert reproduce("--cell", "plain").exit_code == 1
    weights = Path("runs/table2/tiny/plain-seed0/model.safetensors")
    trained = weights.stat().st_mtime_ns
    assert reproduce("--cell", "plain").exit_code == 0
    assert weights.stat().st_mtime_ns == trained
    assert len(calls) == 2


def test_a_cell_that_waits_for_another(folder):
    result = reproduce("--cell", "recurrent-4")
    assert result.exit_code == 2
    assert "run that experiment first" in result.stderr
    unknown = reproduce("--cell", "recurrent-5")
    assert "this recipe has plain, recurrent-4" in unknown.stderr


# --- tables, figures, claims ------------------------------------------------------------------------------------------

PAPER = {  # table 2, test
    "plain": {0: 147.71, 5: 142.30, 10: 139.49, 30: 134.30, 50: 131.25, 75: 128.46,
              100: 126.51, 150: 123.53, 200: 121.40},
    "recurrent": {0: 133.02, 5: 128.78, 10: 127.05, 30: 122.22, 50: 119.93},
}  # fmt: skip


def row(label, overlap, perplexity, *, trained=None, window=300, use_state=None, seed=0, text="test"):
    state = trained is not None if use_state is None else use_state
    cost = 1.75e8 * window / (window - overlap)
    return Row(label, seed, text, "books", window, trained, overlap, state, perplexity, cost)


def paper_rows():
    rows = [row("plain", overlap, value) for overlap, value in PAPER["plain"].items()]
    return rows + [row(f"recurrent-{o}", o, value, trained=o) for o, value in PAPER["recurrent"].items()]


def with_controls(rows, factor=1.1):
    """Add a control, with the state removed, for each recurrent row."""
    removed = [replace(r, use_state=False, perplexity=r.perplexity * factor) for r in rows if r.recurrent]
    return [*rows, *removed]


def judged(judge, **parts):
    return judge(claims.SettingResults(**{name: claims.ExperimentRows(rows, True) for name, rows in parts.items()}))


TABLE2 = (claims.c1, claims.c2, claims.c3, claims.c4)


def test_the_papers_own_numbers_support_its_claims():
    for judge in TABLE2:
        assert judged(judge, overlaps=paper_rows()).holds is True
    assert "0: -9.9 %" in judged(claims.c1, overlaps=paper_rows()).reason
    reason = judged(claims.c4, overlaps=paper_rows()).reason
    assert "119.93; plain at 200: 121.40 (-1.2 %), for 2.10e8 against 5.25e8" in reason


def test_claims_that_do_not_hold():
    rows = [replace(r, perplexity=r.perplexity * 1.2) if r.recurrent else r for r in paper_rows()]
    assert [judged(judge, overlaps=rows).holds for judge in TABLE2] == [False] * 4
    dear = [replace(r, flops=4e8) if r.recurrent else r for r in paper_rows()]
    assert judged(claims.c4, overlaps=dear).holds is False, "not for under half the FLOPs"


def test_training_on_all_books_decides_the_claims_of_table_2():
    """Its recipe scores all that these claims compare, so that each is decided if differences are clear."""
    recipe = recipes.read(recipes.path_of(ROOT / "experiments/paper", "table2", "bundled-all-of-train"))
    rows = [row for cell in recipe.cells for row in clear_rows(cell)]
    assert {row.seed for row in rows} == {0, 1}
    books, wikitext = ([r for r in rows if r.text == text] for text in ("test", "wikitext-test"))
    for judge in (*TABLE2, claims.c8, claims.c9):
        verdict = judged(judge, overlaps=books, wikitext=wikitext)
        assert verdict.holds is not None, (judge.__name__, verdict.reason)


def clear_rows(cell):
    """What a cell is scored on, with perplexities that a state lowers by a tenth on books and by half of that on
    WikiText."""
    trained = cell.settings.overlap if cell.settings.recurrence else None
    for text in cell.texts:
        for overlap in cell.overlaps:
            plain = 300 - overlap / 10 + cell.settings.seed
            gain = (0.05 if text.startswith("wikitext") else 0.1) * (trained is not None)
            yield row(cell.label, overlap, plain * (1 - gain), trained=trained, seed=cell.settings.seed, text=text)
            if trained is not None:
                yield row(cell.label, overlap, plain, trained=trained, use_state=False, seed=cell.settings.seed,
                          text=text)  # fmt: skip


def test_differences_within_noise_are_undecided():
    assert judged(claims.c1, overlaps=[row("r", 0, 99.9, trained=0), row("plain", 0, 100.0)]).holds is None
    plain = [row("plain", 0, 100.0), row("plain", 0, 100.0, seed=1)]
    assert claims.is_lower([row("r", 0, 95.0), row("r", 0, 104.0, seed=1)], plain) is None
    assert claims.is_lower([row("r", 0, 95.0), row("r", 0, 96.0, seed=1)], plain) is True


def test_seeds_are_compared_pairwise():
    rows = [row("plain", 0, 100.0), row("r", 0, 99.0, trained=0), row("r", 0, 104.0, trained=0, seed=1)]
    assert judged(claims.c1, overlaps=rows).holds is True
    assert "0: -1.0 %" in judged(claims.c1, overlaps=rows).reason


def test_claims_about_windows():
    plain = [row("plain", 0, p, window=w) for w, p in ((200, 160.0), (300, 147.0), (400, 140.0))]
    recurrent = [row("r", 0, p, window=w, trained=0) for w, p in ((200, 140.0), (300, 132.0), (400, 129.0))]
    # attention makes a longer window cost more
    rows = [replace(r, flops=1e8 * (1 + r.window / 1000)) for r in [*plain, *recurrent]]
    verdict = judged(claims.c5, windows=rows)
    assert verdict.holds is True
    assert "200: 12.5 %" in verdict.reason
    assert "3 of 3 recurrent points" in verdict.reason
    cheap = replace(rows[0], overlap=50, perplexity=120.0, flops=1e8)  # plain, better than all for less
    assert judged(claims.c5, windows=[*rows, cheap]).holds is False
    narrower = [replace(r, perplexity=159.0) if r.recurrent and r.window == 200 else r for r in rows]
    assert judged(claims.c5, windows=narrower).holds is False


def test_claims_about_texts_and_overlaps():
    books = with_controls(paper_rows())
    articles = with_controls([row("plain", 0, 30.47), row("r", 0, 29.01, trained=0)])
    assert judged(claims.c8, overlaps=books, wikitext=articles).holds is True
    assert judged(claims.c8, overlaps=articles, wikitext=books).holds is False
    for perplexity, holds in ((121.0, True), (100.0, True), (130.0, False)):
        other = row("recurrent-0", 50, perplexity, trained=0)
        assert judged(claims.c9, overlaps=[*books, other]).holds is holds
    seeds = [replace(r, seed=1, perplexity=r.perplexity * 1.1) for r in books]  # another seed, worse in everything
    both = [row("recurrent-0", 50, 121.0, trained=0), row("recurrent-0", 50, 133.0, trained=0, seed=1)]
    assert judged(claims.c9, overlaps=[*books, *seeds, *both]).holds is True


def test_claims_about_alternatives():
    rows = [row("paper", 0, 100.0, trained=0), row("late-layer", 0, 102.0, trained=0)]
    rows = [row("plain", 0, 105.0), *with_controls([*rows, row("max-pooling", 0, 99.5, trained=0)])]
    assert judged(claims.c10, variants=rows).holds is True
    assert judged(claims.c11, variants=rows).holds is True
    better = [*rows, row("four-slots", 0, 94.0, trained=0)]
    assert judged(claims.c11, variants=better).holds is False
    assert "four-slots -6.0 %" in judged(claims.c11, variants=better).reason
    elsewhere = [*rows, row("layer-6", 0, 94.0, trained=0)]  # none of the paper's alternatives
    assert judged(claims.c11, variants=elsewhere) == judged(claims.c11, variants=rows)


@pytest.mark.parametrize("judge", [claims.c8, claims.c9, claims.c10, claims.c11])
def test_claims_about_an_unused_state_are_undecided(judge):
    rows = [row("plain", 0, 100.0), row("plain", 50, 90.0), row("paper", 0, 100.1, trained=0)]
    rows += [row("late", 0, 100.2, trained=0), row("max", 0, 100.1, trained=0), row("r-50", 50, 90.1, trained=50)]
    rows = with_controls([*rows, row("paper", 50, 90.1, trained=0)], 1.0)
    verdict = judged(judge, overlaps=rows, wikitext=rows, variants=[r for r in rows if r.overlap == 0])
    assert verdict.holds is None
    assert "the state does not help yet" in verdict.reason


def test_missing_and_incomplete_results_are_reported():
    page = claims.page({"bundled": claims.SettingResults()})
    assert page.count("not measured yet") == len(claims.CLAIMS)
    half = claims.SettingResults(overlaps=claims.ExperimentRows(paper_rows(), complete=False))
    assert "incomplete; so far, by overlap" in claims.page({"bundled": half})
    assert "holds" not in claims.page({"bundled": half})


def test_test_rows_are_used_only_if_complete():
    rows = [row("plain", 0, 100.0), row("plain", 0, 120.0, text="validation")]
    rows[1] = replace(rows[1], split="validation")
    whole = tables.RecipeResults(rows, {}, [], [])
    assert [r.perplexity for r in pages._select(whole, wikitext=False).rows] == [100.0]
    part = tables.RecipeResults(rows, {}, [], ["recurrent-seed0"])
    assert [r.perplexity for r in pages._select(part, wikitext=False).rows] == [120.0]


def test_tables_of_several_seeds():
    rows = [row("plain", 0, 100.0), row("plain", 0, 102.0, seed=1), row("r", 0, 90.0, trained=0)]
    rows += [row("r", 0, 92.0, trained=0, seed=1), row("r", 0, 101.0, trained=0, use_state=False)]
    table = tables.overlaps(rows)
    assert "| 0 | 101.00 ± 1.00 | 1.75e8 | 91.00 ± 1.00 | 1.75e8 | -9.9 % | 101.00 |" in table
    assert "-9.9 %" in tables.variants(rows)
    assert "against plain at" not in tables.variants(rows)
    table = tables.variants([*rows, row("plain", 200, 88.0), row("plain-at-200", 200, 87.0)])
    assert "| r | 0 | 1.75e8 | 91.00 ± 1.00 | -9.9 % | +2.3 % | 101.00 |" in table
    assert "| plain-at-200 | 200 | 5.25e8 | 87.00 | -1.1 % | -1.1 % | – |" in table
    assert "101.00 ± 1.00 (1.75e8)" in tables.windows(rows)
    assert "not finite" in tables.overlaps([replace(rows[0], perplexity=math.inf)])


def test_untrained_overlaps_have_their_own_table():
    table = tables.overlaps([*paper_rows(), row("recurrent-0", 50, 121.13, trained=0)])
    assert "| 50 | 131.25 | 2.10e8 | 119.93 | 2.10e8 | -8.6 % | – |" in table
    assert "| 0 | 50 | 121.13 | +1.0 % |" in table


def test_table_of_learning_rates():
    search = [{"rates": [1e-4, 1e-3], "word_perplexity": 12.5}, {"rates": [3e-4, 1e-3], "word_perplexity": None}]
    record = {"settings": {"recurrence": True}, "search": search}
    assert tables.searches({"a-seed0": {**record, "search": []}}) == ""
    chosen = {"learning_rate": 1e-4, "recurrence_learning_rate": 1e-3}
    table = tables.searches({"a-seed0": {**record, "chosen": chosen}})
    assert "| a-seed0 | 0.0001 | 0.001 | 12.50 | chosen |" in table
    assert "| a-seed0 | 0.0003 | 0.001 | not finite |  |" in table


def test_the_pareto_frontier():
    points = [(1.0, 10.0), (2.0, 8.0), (2.5, 9.0), (3.0, 8.0), (4.0, 7.0), (1.0, 11.0)]
    assert figures.pareto_frontier(points) == [(1.0, 10.0), (2.0, 8.0), (4.0, 7.0)]


def test_variants_are_drawn_as_separate_lines(tmp_path):
    rows = [row("plain", 0, 100.0), row("plain", 50, 90.0), row("a", 0, 95.0, trained=0), row("b", 0, 91.0, trained=0)]
    rows.append(row("b", 0, 101.0, trained=0, use_state=False))
    lines = figures._lines(rows, by_label=True)
    assert [(line.name, len(line.points), len(line.control)) for line in lines] == [
        ("plain", 2, 0), ("a", 1, 0), ("b", 1, 1)]  # fmt: skip
    assert figures.write("variants", rows, tmp_path / "x") == [tmp_path / "x.png"]
    assert figures.write("variants", [r for r in rows if r.overlap == 0], tmp_path / "y") == []
