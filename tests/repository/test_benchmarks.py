# SPDX-License-Identifier: Apache-2.0
"""Results of benchmarks are replaced by a complete run only."""

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
CPU = {"quota_cores": 2.0, "throttled_seconds": 1}  # each reading of the counters gives one second more


@pytest.fixture
def script(monkeypatch):
    """Import a script as a module; scripts import each other as files of one folder."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def measurements(script, monkeypatch):
    module, counters = script("measurements"), iter(range(100))
    monkeypatch.setattr(module, "provenance", lambda device: dict(HERE))
    monkeypatch.setattr(module, "limits", lambda: {"quota_cores": 2.0})
    monkeypatch.setattr("cpu_limits.throttling", lambda: {"throttled_seconds": next(counters)})
    monkeypatch.setattr(module, "throttling", lambda: {"throttled_seconds": next(counters)})
    return module


@pytest.fixture
def out(tmp_path):
    (tmp_path / "memory-cpu.json").write_text(EARLIER)
    return tmp_path / "memory-cpu.json"


def names(out):
    return sorted(path.name for path in out.parent.iterdir())


def end_early(run, action, exception=KeyboardInterrupt):
    """Start a run, do something in it, and end it with an exception, which is returned."""
    with pytest.raises(exception) as error, run as started:  # noqa: PT012
        action(started)
        raise exception
    return error.value


@pytest.mark.parametrize("ended", [KeyboardInterrupt, ValueError])
def test_a_run_that_ends_early_leaves_the_results_and_an_unfinished_file(measurements, out, ended):
    error = end_early(measurements.collect_cases(out, {"seed": 0}), lambda add: add({"windows": 4}), ended)
    unfinished = out.with_name("memory-cpu.json.unfinished")
    assert out.read_text() == EARLIER
    assert json.loads(unfinished.read_text()) == {"seed": 0, "cases": [{"windows": 4, "cpu": CPU}]}
    assert names(out) == [out.name, unfinished.name]
    assert list(out.parent.glob("*.json")) == [out]
    assert str(unfinished) in error.__notes__[0]


def test_a_complete_run_replaces_the_results(measurements, out):
    out.with_name(f"{out.name}.unfinished").write_text("of a run before")
    with measurements.collect_cases(out, {"seed": 0}) as add:
        add({"windows": 4})
        add({"windows": 16})
        assert out.read_text() == EARLIER
    assert json.loads(out.read_text()) == {
        "seed": 0, "cases": [{"windows": 4, "cpu": CPU}, {"windows": 16, "cpu": CPU}],
    }  # fmt: skip
    assert names(out) == [out.name]


def test_an_unfinished_file_of_another_run_is_ignored(measurements, out):
    out.with_name(f"{out.name}.unfinished").write_text("of a run before")
    with pytest.raises(ValueError, match="at once") as error, measurements.collect_cases(out, {}):
        raise ValueError("at once")
    assert not hasattr(error.value, "__notes__")
    with measurements.collect_cases(out, {}):
        pass
    assert out.read_text() == EARLIER


@pytest.mark.parametrize(
    ("name", "some"),
    [("memory", ["--windows", "4"]), ("memory", ["--limit-gb", "1"]), ("generation", ["--shapes", "7M"])],
)
def test_a_partial_run_needs_its_own_file(script, monkeypatch, capsys, name, some):
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
def measured(measurements, tmp_path):
    """A report of two rows, measured on this machine."""
    with measurements.Report(tmp_path / "speed-cpu.json", "cpu", SHAPES, whole=True) as report:
        report.add(row("training"))
        report.add(row("data"))
    return tmp_path / "speed-cpu.json"


def test_a_run_of_some_parts_keeps_the_other_rows(measurements, measured, monkeypatch):
    monkeypatch.setitem(HERE, "commit", "d")
    more = {"tiny": SHAPES["tiny"], "new": {"window": 8}}  # a shape that no earlier row has
    with measurements.Report(measured, "cpu", more, whole=False) as report:
        report.add(row("training"))
    assert rows(measured) == [("data", "c"), ("training", "d")]
    assert all(row["cpu"] == CPU for row in json.loads(measured.read_text())["rows"])
    assert json.loads(measured.read_text())["shapes"] == more


@pytest.mark.parametrize(
    ("what", "other", "message"),
    [
        ("hardware", {"device": "cpu", "cpu": "another", "cores": 2}, "cpu one, now another"),
        ("versions", {"python": "3", "torch": "3"}, "torch 2, now 3"),
        ("shapes", {"tiny": {"window": 32}}, "tiny {'window': 64}, now {'window': 32}"),
    ],
)
def test_rows_of_another_machine_are_replaced_by_a_whole_run_only(
    measurements, measured, monkeypatch, what, other, message
):
    before, shapes = measured.read_text(), other if what == "shapes" else SHAPES
    monkeypatch.setitem(HERE, what, other)
    with pytest.raises(SystemExit, match="another --out") as refused:
        measurements.Report(measured, "cpu", shapes, whole=False)
    assert f"measured with {message}. " in refused.value.code
    end_early(measurements.Report(measured, "cpu", shapes, whole=True), lambda report: report.add(row("training")))
    assert measured.read_text() == before
    with measurements.Report(measured, "cpu", shapes, whole=True) as report:
        report.add(row("training"))
    assert rows(measured) == [("training", "c")]
