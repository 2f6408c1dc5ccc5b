# SPDX-License-Identifier: Apache-2.0
"""The experiment `memory`: arms are complete, measured once and in pieces, and the page says what is met."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.experiments import experiment

import carryforward as cf
from carryforward.config import RecurrenceConfig
from carryforward.tasks.train import TaskTraining

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "other" / "memory"
if not FOLDER.exists():
    pytest.skip("experiments are not part of a source distribution", allow_module_level=True)

COMMIT = "0" * 40
MODULES = ("arms", "estimates", "measuring", "memory_figures", "pages", "peer", "run", "targets", "harness")
SMALL = "retrieval-rewrite-associative-0"


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """The modules of the experiment, with results and pages in a temporary folder."""
    monkeypatch.setenv("CARRYFORWARD_COMMIT", COMMIT)
    with experiment(monkeypatch, FOLDER, MODULES, tmp_path) as modules:
        yield modules


def options(folder, **others):
    fields = {"jobs": 1, "fast_path": "auto", "base": None, "data": "python-docs", "device": "cpu", "tiny": True}
    return Namespace(**fields | {"out": folder, "only": ["*"], "minutes": float("inf")} | others)


def arm_named(memory, name, tiny=True):
    return next(
        arm for group in memory.arms.GROUPS for arm in memory.arms.arms_of(group, tiny=tiny) if arm.name == name
    )


def test_arms_are_complete(memory):
    arms = [arm for group in memory.arms.GROUPS for arm in memory.arms.arms_of(group)]
    names = {arm.name for arm in arms}
    assert len(names) == len(arms)
    for kind in ("vector", "kv", "tokens", "associative"):
        for seed in range(3):
            assert {f"retrieval-{mode}-{kind}-{seed}" for mode in ("rewrite", "remember")} <= names
            assert {f"copy-{size}-{kind}-{seed}" for size in ("24-3", "120-9", "360-9")} <= names
            assert f"reverse-24-3-{kind}-{seed}" in names
    assert {f"copy-24-9-depth-{depth}-0" for depth in (1, 2, 4, 8, "all")} <= names
    assert {f"facts-people-{base}-{kind}-0" for base in ("bundled", "given")
            for kind in ("kv", "tokens", "associative")} <= names  # fmt: skip
    assert {"copy-24-3-lucidrains-0", "copy-120-9-lucidrains-0"} <= names
    for arm in arms:
        TaskTraining(seed=arm.seed, **arm.training)
        RecurrenceConfig(**{"window": memory.estimates.window_of(arm)} | arm.recurrence)
        assert "base" in arm.model or arm.model["layers"] <= 4
        assert {"memory reset"} <= {*arm.tests.get("controls", ["memory reset"])}


def test_the_package_gets_the_same_as_memory_tokens(memory):
    for name in ("copy-24-3", "copy-120-9"):
        ours, theirs = (arm_named(memory, f"{name}-{label}-0", tiny=False) for label in ("tokens", "lucidrains"))
        assert (ours.about, ours.model, ours.recurrence, ours.training, ours.seed) == (
            theirs.about, theirs.model, theirs.recurrence, theirs.training, theirs.seed
        )  # fmt: skip


def test_targets_ask_for_what_is_measured(memory):
    for target in memory.targets.TARGETS:
        arms = [arm for group in memory.arms.GROUPS.values() for arm in group()
                if arm.setting == target.setting and target.labels(arm.label)]  # fmt: skip
        assert arms, target.text
        assert all(target.size in memory.estimates.test_sizes(arm) for arm in arms)
        if "times the training length" in target.text:
            times = 10 if "ten times" in target.text else 32
            assert {max(arm.training["sizes"]) * times for arm in arms} == {target.size}


def test_an_arm_is_measured_in_pieces_as_in_one(memory, monkeypatch, tmp_path):
    monkeypatch.setattr(memory.measuring, "DISTANCE_ROWS", (1, 64))
    arm = arm_named(memory, SMALL)
    whole = memory.measuring.measure(arm, options(tmp_path / "whole"))
    folder, written = options(tmp_path / "pieces"), []
    for stop_after in (1, 3, 2, 1000):  # two steps; the others and a size; sizes, but not distances; the rest
        calls = iter(range(10_000))
        done = memory.measuring.measure(arm, folder, lambda: next(calls) >= stop_after)  # noqa: B023
        written.append((done["training"]["steps"], len(done["scores"]), done["finished"]))
        assert json.loads((folder.out / f"{SMALL}.json").read_text()) == json.loads(json.dumps(done))
        assert memory.measuring.checkpoint_of(arm, folder.out).exists() != done["finished"]
    assert written == [(2, 0, False), (4, 1, False), (4, 2, False), (4, 2, True)]
    for key in ("scores", "distances", "arm", "about", "model"):
        assert done[key] == whole[key]
    assert {**done["training"], "seconds": 0} == {**whole["training"], "seconds": 0}
    few = [one["samples"] for one in whole["distances"]["3"].values()]
    assert sum(few) == 8 * 4
    assert len(few) > 1
    assert (whole["commit"], whole["seed"], whole["settings"]["jobs"]) == (COMMIT, 0, 1)


def test_only_what_is_missing_is_measured(memory, monkeypatch, tmp_path):
    started = []

    def run_parallel(commands, work, jobs, *, seconds, watch):
        started.extend(commands)
        for name, command in commands.items():
            assert "--tiny" in command
            memory.measuring.measure(arm_named(memory, name), options(tmp_path))

    monkeypatch.setattr(memory.run, "run_parallel", run_parallel)
    command = ["run.py", "copy", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--no-pages", "--only"]
    for patterns in (["*-kv-0"], ["copy-*-vector-1", "*-kv-0", "reverse-24-*-vector-0"]):
        monkeypatch.setattr("sys.argv", [*command, *patterns])
        memory.run.main()
    assert len(started) == len({*started}) == 5 + 4
    assert [name[-1] for name in started] == ["0"] * 6 + ["1"] * 3, "one seed after the other"
    arm = arm_named(memory, "copy-24-3-kv-0")
    assert memory.run.is_measured(arm, options(tmp_path))
    monkeypatch.setenv("CARRYFORWARD_COMMIT", "1" * 40)
    assert not memory.run.is_measured(arm, options(tmp_path)), "another commit"


def test_arms_run_in_processes_without_what_only_the_command_line_needs(tmp_path):
    """The machine that measures may lack it."""
    block = "import sys; sys.modules['typer'] = sys.modules['pydantic'] = sys.modules['matplotlib'] = None"
    (tmp_path / "sitecustomize.py").write_text(block)
    path = os.pathsep.join([str(tmp_path), str(Path(cf.__file__).parents[1])])
    source = {**os.environ, "PYTHONPATH": path, "CARRYFORWARD_COMMIT": COMMIT}
    out = tmp_path / "results"
    command = [sys.executable, "run.py", "retrieval", "--tiny", "--only", SMALL, "--out", str(out), "--no-pages"]
    done = subprocess.run(command, cwd=FOLDER, env=source, capture_output=True, text=True, timeout=500)
    log = out / "runs" / f"{SMALL}.log"
    assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
    result = json.loads((out / f"{SMALL}.json").read_text())
    assert result["finished"]
    assert "1 of 1 arms to measure" in done.stderr


def made_up(memory, folder, group, right, finished=True):
    """Results of a group's arms; `right` says the share of right answers of an arm at a size."""
    folder.mkdir(exist_ok=True)
    for arm in memory.arms.arms_of(group):
        sizes = memory.estimates.test_sizes(arm)
        share = {size: right(arm, size) for size in sizes}
        score = lambda value: {"samples": 100, "right": 100 * value, "whole": value, "by_token": value}  # noqa: E731
        controls = {name: score(0.06) for name in arm.tests.get("controls", ("memory reset", "no memory"))}
        validations = [{"step": step, "size": sizes[-1], "accuracy": 0.5, "loss": 1.0} for step in (100, 200)]
        result = {
            "arm": arm.fields(), "seed": arm.seed, "commit": COMMIT, "hardware": {"cpu": "a processor"},
            "settings": {"base": "model"}, "finished": finished, "unit": "pairs", "chance": 1 / 16,
            "whole_answers": arm.task not in ("copy", "reverse"),
            "model": {"parameters": 1, "carries": "something", "state_numbers": 2},
            "training": {"steps": 200, "stages": [{"size": 7, "learnt": True}], "validations": validations},
            "scores": [{"size": size, "controls": controls, **score(value)} for size, value in share.items()],
            "distances": {f"{size}": {"1": score(0.9), "3": score(0.4)} for size in arm.distances},
        }  # fmt: skip
        (folder / f"{arm.name}.json").write_text(json.dumps(result))


def verdicts(page):
    return [line.split(" | ")[1:3] for line in page.splitlines() if ": " in line and line.startswith("| ")
            and "---" not in line][:5]  # fmt: skip


def test_the_page_says_what_is_met_and_what_is_missed(memory, tmp_path):
    def right(arm, size):
        far = {"associative": 0.995, "bundled-kv": 0.3, "bundled-tokens": 0.951}
        short_of_it = arm.task == "copy" and arm.seed == 2
        return 0.96 if short_of_it else far.get(arm.label, 0.5)

    for group in memory.arms.GROUPS:
        made_up(memory, tmp_path / "results", group, right)
    memory.pages.write_pages()
    page = (tmp_path / "README.md").read_text()
    assert verdicts(page) == [
        ["met", "associative: 99.5 %, 99.5 %, 99.5 % |"],
        ["missed", "tokens: 50.0 %, 50.0 %, 96.0 % |"],
        ["met", "bundled-tokens: 95.1 % |"],
        ["as it is", "vector: 50.0 %, 50.0 %, 50.0 % |"],
        ["as it is", "vector: 50.0 %, 50.0 %, 96.0 % |"],
    ]
    assert "| copy | 120 symbols, 9 windows | tokens | 32 | 65.3 (50.0 to 96.0) | 6.0 | 6.0 | 200 | 1 |" in page
    assert "| copy | 24 symbols, 3 windows | lucidrains | 16 | 50.0 | 6.0 | – | 200 | 1 |" in page
    assert "Not measured yet" not in page
    for name in ("retrieval", "distances", "depth", "facts"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert f"]({name}.png)" in page


def test_an_unfinished_arm_is_shown_and_meets_nothing(memory, tmp_path):
    made_up(memory, tmp_path / "results", "retrieval", lambda arm, size: 1.0, finished=False)
    memory.pages.write_pages()
    page = (tmp_path / "README.md").read_text()
    assert {verdict for verdict, _ in verdicts(page)} <= {"not measured"}
    assert "Stopped before their end: retrieval-rewrite-associative-0" in page
    assert "Not measured yet." in page


def test_time_is_estimated_from_windows_and_steps(memory):
    arm = arm_named(memory, "copy-24-3-tokens-0", tiny=False)
    assert memory.estimates.train_windows(arm) == 3500 * 3
    staged = replace(arm, training={**arm.training, "sizes": (8, 16, 24), "stage_steps": 1000})
    assert memory.estimates.train_windows(staged) == 1000 * (1 + (2 + 1) / 2) + (1000 + 500) * (3 + 1.5) / 2
    table = memory.estimates.plan([arm], 1)
    assert f"| {arm.name} | 3,000 | 10,500 |" in table
    assert memory.estimates.speedup(16) == 6


def test_the_package_is_read_window_by_window(memory):
    pytest.importorskip("recurrent_memory_transformer_pytorch", reason="make test-all: it installs this package")
    arm = arm_named(memory, "copy-24-3-lucidrains-0")
    model, task = memory.measuring.build(arm, options(Path()))
    ids = task.samples(24, 2, (2, 0)).input_ids
    state = model.advance_state(ids[:, :20])
    whole, rest = model(ids).logits, model(ids[:, 20:], state=state).logits
    assert whole[:, 20:].allclose(rest, atol=1e-6)
    changed = ids.clone()
    changed[:, 0] += 1
    assert not model(changed).logits[:, task.window :].allclose(whole[:, task.window :], atol=1e-6), "memory is read"
