# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' results: replaced by a run that is at its end, and by no other."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("benchmarks are not part of a source distribution", allow_module_level=True)

HERE = {
    "commit": "c", "hardware": {"device": "cpu", "cpu": "one", "cores": 2}, "versions": {"python": "3", "torch": "2"},
}  # fmt: skip
SHAPES = {"tiny": {"window": 64}}
EARLIER = '{"cases": ["earlier"]}'


@pytest.fixture
def script(monkeypatch):
    """A script's module; they import each other as files of one folder."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def record(script, monkeypatch):
    module = script("record")
    monkeypatch.setattr(module, "provenance", lambda device: dict(HERE))
    return module


@pytest.fixture
def out(tmp_path):
    (tmp_path / "memory-cpu.json").write_text(EARLIER)
    return tmp_path / "memory-cpu.json"


def names(out):
    return sorted(path.name for path in out.parent.iterdir())


def end_early(run, then, ended=KeyboardInterrupt):
    """Begin a run, do something in it, and end it; what it ended with."""
    with pytest.raises(ended) as error, run as begun:  # noqa: PT012
        then(begun)
        raise ended
    return error.value


@pytest.mark.parametrize("ended", [KeyboardInterrupt, ValueError])
def test_ended_early_the_results_stay_and_the_cases_lie_beside(record, out, ended):
    error = end_early(record.cases(out, {"seed": 0}), lambda add: add({"windows": 4}), ended)
    beside = out.with_name("memory-cpu.json.unfinished")
    assert out.read_text() == EARLIER
    assert json.loads(beside.read_text()) == {"seed": 0, "cases": [{"windows": 4}]}
    assert names(out) == [out.name, beside.name]
    assert list(out.parent.glob("*.json")) == [out]
    assert str(beside) in error.__notes__[0]


def test_at_its_end_a_run_replaces_the_results(record, out):
    out.with_name(f"{out.name}.unfinished").write_text("of a run before")
    with record.cases(out, {"seed": 0}) as add:
        add({"windows": 4})
        add({"windows": 16})
        assert out.read_text() == EARLIER
    assert json.loads(out.read_text()) == {"seed": 0, "cases": [{"windows": 4}, {"windows": 16}]}
    assert names(out) == [out.name]


def test_what_another_run_left_is_not_taken_for_ones_own(record, out):
    out.with_name(f"{out.name}.unfinished").write_text("of a run before")
    with pytest.raises(ValueError, match="at once") as error, record.cases(out, {}):
        raise ValueError("at once")
    assert not hasattr(error.value, "__notes__")
    with record.cases(out, {}):
        pass
    assert out.read_text() == EARLIER


@pytest.mark.parametrize(
    ("name", "some"),
    [("memory", ["--windows", "4"]), ("memory", ["--limit-gb", "1"]), ("generation", ["--shapes", "7M"])],
)
def test_a_run_of_some_cases_needs_a_file_of_its_own(script, monkeypatch, capsys, name, some):
    module, runs = script(name), []
    monkeypatch.setattr(module, "run", runs.append)
    monkeypatch.setattr("sys.argv", [f"{name}.py", *some])
    with pytest.raises(SystemExit):
        module.main()
    assert f"{some[0]} needs --out" in capsys.readouterr().err
    assert not runs
    for given in ([*some, "--out", "mine.json"], []):
        monkeypatch.setattr("sys.argv", [f"{name}.py", *given])
        module.main()
    assert [str(args.out) for args in runs] == ["mine.json", "None"]


def row(name, **more):
    return {"row": name, "shape": "tiny", "batch": 1, "windows": 4, **more}


def rows(out):
    return [(row["row"], row["commit"]) for row in json.loads(out.read_text())["rows"]]


@pytest.fixture
def measured(record, tmp_path):
    """A report of two rows, from here."""
    with record.Report(tmp_path / "speed-cpu.json", "cpu", SHAPES, whole=True) as report:
        report.add(row("training"))
        report.add(row("data"))
    return tmp_path / "speed-cpu.json"


def test_a_run_of_some_parts_keeps_the_other_rows(record, measured, monkeypatch):
    monkeypatch.setitem(HERE, "commit", "d")
    more = {"tiny": SHAPES["tiny"], "new": {"window": 8}}  # a shape that no earlier row is of
    with record.Report(measured, "cpu", more, whole=False) as report:
        report.add(row("training"))
    assert rows(measured) == [("data", "c"), ("training", "d")]
    assert json.loads(measured.read_text())["shapes"] == more


@pytest.mark.parametrize(
    ("what", "other", "told"),
    [
        ("hardware", {"device": "cpu", "cpu": "another", "cores": 2}, "cpu one, now another"),
        ("versions", {"python": "3", "torch": "3"}, "torch 2, now 3"),
        ("shapes", {"tiny": {"window": 32}}, "tiny {'window': 64}, now {'window': 32}"),
    ],
)
def test_rows_of_another_machine_are_not_mixed_and_go_only_with_a_whole_run(
    record, measured, monkeypatch, what, other, told
):
    before, shapes = measured.read_text(), other if what == "shapes" else SHAPES
    monkeypatch.setitem(HERE, what, other)
    with pytest.raises(SystemExit, match="another --out") as refused:
        record.Report(measured, "cpu", shapes, whole=False)
    assert f"measured with {told}. " in refused.value.code
    end_early(record.Report(measured, "cpu", shapes, whole=True), lambda report: report.add(row("training")))
    assert measured.read_text() == before
    with record.Report(measured, "cpu", shapes, whole=True) as report:
        report.add(row("training"))
    assert rows(measured) == [("training", "c")]
