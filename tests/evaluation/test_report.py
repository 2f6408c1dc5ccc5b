# SPDX-License-Identifier: Apache-2.0
"""Reports on hand-written results, whose numbers are all in this file."""

import copy
import csv
import io
import json
import math
import os
import subprocess
import sys

import pytest

from carryforward.evaluation import report
from carryforward.utils import files, provenance

MEMORY = [{"kind": "vector", "slots": 1, "hidden_sizes": [200, 200]}]


def row(overlap, perplexity, use_state=True, recurrence=0.0, untrained=False):
    return {
        "overlap": overlap, "use_state": use_state, "untrained_overlap": untrained,
        "nats": 800 * math.log(perplexity), "tokens": 1000, "words": 800, "bytes": 4000, "line_ends": 100,
        "word_perplexity": perplexity, "token_perplexity": perplexity / 2, "bits_per_byte": perplexity / 100,
        "flops": {"base": 1.754e8 * 300 / (300 - overlap), "recurrence": recurrence, "vocabulary": 7.7e7},
        "seconds": 1 / 3,
    }  # fmt: skip


def result(name, rows, recurrent=False, data="pg19", **fields):
    return {
        "kind": "evaluation", "carryforward": "0.1.0", "date": "2025-01-01", "seed": 0,
        "versions": {"python": "3.11", "torch": "2.7"},
        "model": {"name": name, "base": "gpt2", "recurrent": recurrent, "window": 300,
                  "recurrence": {"window": 300, "prefix": [1, 2], "memory": MEMORY} if recurrent else None},
        "data": {"name": data, "split": "test", "documents": 100, "words": 7000, "max_tokens": None},
        "rows": rows, **fields,
    }  # fmt: skip


PLAIN = result("gpt2", [row(0, 147.71), row(50, 131.25)])
RECURRENT = result(
    "runs/pg19",
    [
        row(50, 119.93, recurrence=5e4, untrained=True),
        row(0, 133.02, recurrence=4e4),
        row(0, 150.0, use_state=False),
    ],
    recurrent=True,
)


# --- the table -----------------------------------------------------------------------------------------------------


def test_markdown():
    assert report.markdown([RECURRENT, PLAIN]).splitlines() == [
        "### pg19, test (100 documents, 7,000 words)",
        "",
        "| model | overlap | FLOPs/token | word perplexity | state removed | token perplexity | bits/byte |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| gpt2 | 0 | 1.75e8 | 147.71 | – | 73.86 | 1.4771 |",
        "| gpt2 | 50 | 2.10e8 | 131.25 | – | 65.62 | 1.3125 |",
        "| runs/pg19 | 0 | 1.75e8 | 133.02 | 150.00 | 66.51 | 1.3302 |",
        "| runs/pg19 | 50\\* | 2.11e8 | 119.93 | – | 59.97 | 1.1993 |",
        "",
        "FLOPs/token: layers and recurrence, without the vocabulary projection.",
        "",
        "\\* not the overlap the model was trained at.",
    ]


def test_line_ends_are_counted_for_wikitext():
    text = report.markdown([result("gpt2", [row(0, 30.47)], data="wikitext-103")])
    counted = math.exp(800 * math.log(30.47) / 900)
    assert "| state removed | word perplexity, line ends counted | token perplexity |" in text
    assert f"| 30.47 | – | {counted:.2f} | 15.23 |" in text
    assert "\\*" not in text


def test_data_sets_are_kept_apart():
    others = [result("gpt2", [row(0, 30.0)], data=name) for name in ("wikitext-103", "pg19")]
    others[1]["data"]["max_tokens"] = 15000
    text = report.markdown([PLAIN, *others])
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "### pg19, test (100 documents, 7,000 words)",
        "### wikitext-103, test (100 documents, 7,000 words)",
        "### pg19, test (100 documents, 7,000 words, max_tokens 15,000)",
    ]


def test_models_of_like_names_have_files_of_their_own(tmp_path):
    names = ["m/a", "m-a", "../m-a", "x" * 300]
    report.save([result(name, [row(0, 100.0)]) for name in names], tmp_path)
    assert {loaded["model"]["name"] for loaded in report.load(tmp_path)} == set(names)


def test_windows_and_seeds_are_named_where_they_differ_and_the_newest_counts():
    small = copy.deepcopy(PLAIN)
    small["model"]["window"] = 200
    again = result("runs/pg19", [row(0, 132.0)], recurrent=True, date="2025-02-01")
    reseeded = result("runs/pg19", [row(0, 131.0)], recurrent=True, seed=1)
    text = report.markdown([again, PLAIN, small, RECURRENT, reseeded])
    assert "| gpt2, window 200 | 0 |" in text
    assert "| runs/pg19, window 300, seed 0 | 0 | 1.75e8 | 132.00 | 150.00 |" in text
    assert "| runs/pg19, window 300, seed 1 | 0 | 1.75e8 | 131.00 | – |" in text
    assert "133.02" not in text
    assert "| runs/pg19, seed 1 | 0 |" in report.markdown(
        [again, reseeded, PLAIN]
    )  # all windows are equal, so they are not named


def test_settings_that_change_the_numbers_are_named():
    reset = {**RECURRENT, "settings": {"reset_every": 20, "batch_size": 4}}
    text = report.markdown([RECURRENT, reset])
    assert "| runs/pg19, reset_every 20 | 0 |" in text
    assert "| runs/pg19, reset_every None | 0 |" in text


def test_numbers_that_are_missing_or_huge():
    rows = [row(0, 2.5e9), {**row(10, 30.0), "word_perplexity": None}, row(30, 40.0, use_state=False)]
    rows.append({**row(50, 30.0), "word_perplexity": math.inf, "nats": 1e9})
    text = report.markdown([result("a|b", rows, recurrent=True, data="wikitext-2")])
    assert "| a\\|b | 0 | 1.75e8 | 2.5e+09 | – |" in text
    assert "| a\\|b | 10 | 1.81e8 | – | – |" in text
    assert "| a\\|b | 30 | 1.95e8 | – | 40.00 | – | – | – |" in text
    assert "| a\\|b | 50 | 2.10e8 | inf | – | inf |" in text


# --- the CSV file --------------------------------------------------------------------------------------------------


def test_csv_has_everything_in_full_precision():
    lines = list(csv.DictReader(io.StringIO(report.csv_text([PLAIN, RECURRENT]))))
    assert len(lines) == 5
    for line, original in zip(lines, [*PLAIN["rows"], *RECURRENT["rows"]], strict=True):
        assert float(line["nats"]) == original["nats"]
        assert float(line["seconds"]) == 1 / 3
        assert float(line["flops.base"]) == original["flops"]["base"]
        assert json.loads(line["use_state"]) == original["use_state"]
        assert line["data.max_tokens"] == ""
        assert line["versions.torch"] == "2.7"
    assert lines[0]["model.name"] == "gpt2"
    assert lines[0]["model.recurrence.window"] == ""
    assert lines[4]["model.recurrence.prefix"] == "[1, 2]"
    assert json.loads(lines[4]["model.recurrence.memory"]) == MEMORY
    assert "model.memory" not in lines[0]


# --- the figure ----------------------------------------------------------------------------------------------------


def test_figure(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.png"
    figure = report.figure([PLAIN, RECURRENT], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["figure.png"]
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert axes.get_title(loc="left") == "pg19, test (100 documents, 7,000 words)"
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["gpt2"].get_ydata()) == [147.71, 131.25]
    assert lines["gpt2"].get_linestyle() == "--"
    assert list(lines["runs/pg19"].get_ydata()) == [133.02, 119.93]
    assert list(lines["runs/pg19"].get_xdata()) == [1.754e8 + 4e4, 1.754e8 * 300 / 250 + 5e4]
    (removed,) = [line for line in axes.lines if list(line.get_ydata()) == [150.0]]
    assert removed.get_color() == lines["runs/pg19"].get_color() != lines["gpt2"].get_color()
    assert sorted(text.get_text() for text in axes.texts) == ["0", "0", "50", "50*"]
    assert "state removed" in [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_figure_of_another_measure(tmp_path):
    pytest.importorskip("matplotlib")
    (axes,) = report.figure([PLAIN, RECURRENT], tmp_path / "figure.png", "bits_per_byte").axes
    assert axes.get_ylabel() == "bits per byte"
    (plain,) = [line for line in axes.lines if line.get_label() == "gpt2"]
    assert list(plain.get_ydata()) == [row["bits_per_byte"] for row in PLAIN["rows"]]


def test_labels_do_not_cover_each_other(tmp_path):
    """In a figure of the paper's table 2, whose first points are close together."""
    pytest.importorskip("matplotlib")
    base = {0: 147.71, 5: 142.30, 10: 139.49, 30: 134.30, 50: 131.25, 75: 128.46, 100: 126.51, 150: 123.53, 200: 121.40}
    ours = {0: 133.02, 5: 128.78, 10: 127.05, 30: 122.22, 50: 119.93}
    rows = [row(o, p) for o, p in ours.items()] + [row(o, base[o] + 2, use_state=False) for o in ours]
    plain, recurrent = result("gpt2", [row(o, p) for o, p in base.items()]), result("recurrent", rows, recurrent=True)
    figure = report.figure([plain, recurrent], tmp_path / "figure.png")
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts] + [axes.get_legend().get_window_extent()]
    assert len(boxes) == 9 + 5 + 1
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
    points = [point for line in axes.lines for point in axes.transData.transform(line.get_xydata())]
    assert not [(box, point) for box in boxes for point in points if box.contains(*point)]


def test_a_panel_for_each_data_set(tmp_path):
    pytest.importorskip("matplotlib")
    wikitext = result("gpt2", [row(0, 30.47), {**row(10, 1.0), "word_perplexity": None}], data="wikitext-103")
    figure = report.figure([PLAIN, wikitext], tmp_path / "figure.png")
    assert [axes.get_title(loc="left").split(",")[0] for axes in figure.axes] == ["pg19", "wikitext-103"]
    low, high = figure.axes[1].get_xlim()
    assert low < 1.754e8 < high
    assert high > 1.5 * low


def test_without_matplotlib(monkeypatch, tmp_path, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match='pip install "matplotlib'):
        report.figure([PLAIN], tmp_path / "figure.png")
    report.write([PLAIN], tmp_path / "report")
    assert "figure.png is not drawn: figures need matplotlib" in caplog.text
    assert sorted(file.name for file in (tmp_path / "report").iterdir()) == ["results.csv", "table.md"]


# --- files ---------------------------------------------------------------------------------------------------------


def test_write_and_load(tmp_path):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "results" / "deep"
    folder.mkdir(parents=True)
    (folder / "b.json").write_text(json.dumps(RECURRENT))
    (folder / "a.json").write_text(json.dumps(PLAIN))
    (folder / "memory.json").write_text('{"kind": "memory"}')
    loaded = report.load([tmp_path / "results", folder / "a.json"])  # the same file twice is one result
    assert loaded == [PLAIN, RECURRENT]
    assert report.load(str(folder / "a.json")) == [PLAIN]
    report.write(loaded, tmp_path / "out" / "report")
    written = tmp_path / "out" / "report"
    assert sorted(file.name for file in written.iterdir()) == ["figure.png", "results.csv", "table.md"]
    assert (written / "table.md").read_text(encoding="utf-8") == report.markdown(loaded)
    assert (written / "results.csv").read_text(encoding="utf-8") == report.csv_text(loaded)
    report.write(loaded[:1], written)
    assert (written / "table.md").read_text(encoding="utf-8") == report.markdown(loaded[:1])


def without(key, part=None):
    broken = copy.deepcopy(PLAIN)
    del (broken if part is None else broken["rows"][1] if part == "row" else broken[part])[key]
    return json.dumps(broken)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind": "evalu', "is not valid JSON"),
        ("[1, 2]", "is not a result of `carryforward evaluate`"),
        ('{"kind": "memory"}', "is not a result of `carryforward evaluate`"),
        (without("rows"), "row lacks overlap, use_state"),
        (without("split", "data"), "data lacks split"),
        (without("nats", "row"), "row lacks nats"),
        (without("model"), "model lacks name"),
    ],
)
def test_a_bad_file_is_an_error_and_is_skipped_in_a_folder(tmp_path, text, message):
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    with pytest.raises(ValueError, match=f"bad.json.*{message}"):
        report.load([bad])
    with pytest.raises(ValueError, match="no result of `carryforward evaluate` in"):
        report.load([tmp_path])
    (tmp_path / "good.json").write_text(json.dumps(PLAIN))
    assert report.load(tmp_path) == [PLAIN]


def test_a_damaged_result_in_a_folder_gives_a_warning(tmp_path, caplog):
    (tmp_path / "good.json").write_text(json.dumps(PLAIN))
    (tmp_path / "cut.json").write_text(json.dumps(PLAIN)[:100])
    report.load(tmp_path)
    assert "cut.json" in caplog.text


def test_files_that_are_being_written_are_not_read(tmp_path):
    report.save([result("model", [row(0, 10.0)])], tmp_path)
    name = next(tmp_path.glob("*.json")).name
    hidden = tmp_path / f".{name}.0123abcd.tmp"
    hidden.mkdir()
    (hidden / "other.json").write_text((tmp_path / name).read_text())
    assert len(report.load(tmp_path)) == 1
    report.save([result("model", [row(0, 10.0)])], tmp_path)
    assert not hidden.exists(), "what a killed process left is removed"


def test_nothing_to_report(tmp_path):
    with pytest.raises(ValueError, match="missing.json does not exist"):
        report.load([tmp_path / "missing.json"])
    for make in (report.markdown, report.csv_text, lambda results: report.figure(results, tmp_path / "figure.png")):
        with pytest.raises(ValueError, match="results is empty"):
            make([])


def test_reports_need_no_torch():
    heavy = {"torch", "transformers", "matplotlib"}
    code = f"import sys, carryforward.evaluation.report; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("arguments", "recorded"),
    [
        (["/venv/bin/carryforward", "evaluate", "/home/me/runs/a", "--out", "results/b"], "evaluate a --out results/b"),
        (["x/__main__.py", "train", "--data", "b=/data/my books", "--out=/tmp/r"], "train --data 'b=my books' --out=r"),
    ],
)  # fmt: skip
def test_a_recorded_command_has_no_absolute_paths(arguments, recorded):
    assert provenance._command(arguments) == f"carryforward {recorded}"
    assert provenance._command(["/a/benchmarks/speed.py", *arguments[1:]]) == f"speed.py {recorded}"


def test_json_files_are_ascii(tmp_path):
    """So that every locale reads the same text, and file names that are not Unicode can be written."""
    content = {"data": "café", "name": os.fsdecode(b"caf\xe9")}
    files.write_json(tmp_path / "a.json", content)
    assert (tmp_path / "a.json").read_bytes().isascii()
    assert json.loads((tmp_path / "a.json").read_text(encoding="latin-1")) == content
