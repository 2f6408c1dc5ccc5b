# SPDX-License-Identifier: Apache-2.0
"""Reports on encoders' results, written by hand."""

import copy
import json

import pytest

from carryforward.evaluation import report

FLOPS = {"base": 2.5e5, "recurrence": 2e4, "vocabulary": 0.0}


def group(least, most, targets, nats):
    return {"from": least, "to": most, "targets": targets, "nats": nats, "correct": 0}


def row(overlap, loss, groups, use_state=True, untrained=False):
    return {
        "overlap": overlap, "use_state": use_state, "untrained_overlap": untrained, "targets": 10, "nats": 10 * loss,
        "correct": 4, "loss": loss, "accuracy": 0.4, "documents": 3, "by_distance": groups, "flops": FLOPS,
    }  # fmt: skip


NEAR, FAR, NONE = group(0, 0, 4, 20.0), group(2, 3, 5, 15.0), group(None, None, 1, 0.5)
DATA = {"name": "texts", "split": "test", "documents": 3, "words": 2546, "max_tokens": None,
        "masking": {"probability": 0.15, "seed": 0}}  # fmt: skip


def result(name, rows, recurrent=True, task="masked-lm", data=DATA):
    model = {"name": name, "recurrent": recurrent, "window": 64}
    return {
        "kind": "evaluation",
        "task": task,
        "date": "2025-01-01",
        "seed": 0,
        "model": model,
        "data": data,
        "rows": rows,
    }


PLAIN = result("bert", [row(0, 3.55, [NEAR, FAR, NONE], use_state=False)], recurrent=False)
RECURRENT = result(
    "runs/a",
    [row(0, 2.0, [NEAR, FAR]), row(16, 1.5, [FAR], untrained=True), row(0, 2.5, [FAR], use_state=False)],
)


def test_masked_tokens():
    assert report.markdown([RECURRENT, PLAIN]).splitlines() == [
        "### texts, test (3 documents, 2,546 words; 15% of tokens to predict, seed 0)",
        "",
        "| model | overlap | FLOPs/token | loss | state removed | accuracy | state removed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| bert | 0 | 2.70e5 | 3.550 | – | 0.4000 | – |",
        "| runs/a | 0 | 2.70e5 | 2.000 | 2.500 | 0.4000 | 0.4000 |",
        "| runs/a | 16\\* | 2.70e5 | 1.500 | – | 0.4000 | – |",
        "",
        "FLOPs/token: layers and recurrence, without the vocabulary projection.",
        "",
        "\\* not the overlap the model was trained at.",
        "",
        "| model | overlap | state | 0 | 2–3 | none |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| bert | 0 | – | 5.000 | 3.000 | 0.500 |",
        "| runs/a | 0 | yes | 5.000 | 3.000 | – |",
        "| runs/a | 0 | removed | – | 3.000 | – |",
        "| runs/a | 16\\* | yes | – | 3.000 | – |",
        "",
        "Loss in nats per masked token, by its distance to the nearest end of the window that scores it at which the "
        "document goes on; “none”: the window holds the whole document.",
    ]


def test_classes():
    shared = {"overlap": 0, "untrained_overlap": False, "nats": 1.0, "scored": 8, "flops": FLOPS}
    rows = [
        {**shared, "use_state": use_state, "accuracy": accuracy, "macro_f1": accuracy / 2}
        for use_state, accuracy in ((True, 0.75), (False, 0.5))
    ]
    data = {key: value for key, value in DATA.items() if key != "masking"}
    text = report.markdown([result("runs/b", rows, task="classification", data=data)])
    assert "| model | overlap | FLOPs/token | accuracy | state removed | macro-F1 | state removed |" in text
    assert "| runs/b | 0 | 2.70e5 | 0.7500 | 0.5000 | 0.3750 | 0.2500 |" in text


def test_other_masks_are_kept_apart():
    other = copy.deepcopy(PLAIN)
    other["data"]["masking"]["seed"] = 1
    titles = [line for line in report.markdown([PLAIN, other]).splitlines() if line.startswith("#")]
    assert [title[-8:] for title in titles] == [" seed 0)", " seed 1)"]


def test_files(tmp_path):
    pytest.importorskip("matplotlib")
    report.save([PLAIN, RECURRENT], tmp_path)
    names = {path.name for path in tmp_path.iterdir() if path.suffix != ".json"}
    assert names == {"table.md", "results.csv", "borders.png"}
    assert report.report(tmp_path) == (tmp_path / "table.md").read_text()
    figure = report.border_figure([RECURRENT, PLAIN], tmp_path / "again.png")
    (axes,) = figure.axes
    lines = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}
    assert lines == {
        "bert, overlap 0": [5.0, 3.0],
        "runs/a, overlap 0": [5.0, 3.0],
        "runs/a, overlap 0, state removed": [3.0],
        "runs/a, overlap 16*": [3.0],
    }
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "2–3"]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda r: r.update(task="frobnicate"), "task 'frobnicate' is none"),
        (lambda r: r["data"].pop("masking"), "masking lacks probability, seed"),
        (lambda r: r["rows"][0].pop("by_distance"), "masked-lm lacks by_distance"),
        (lambda r: r["rows"][0]["by_distance"].append(3), "distance lacks from, to, targets, nats, correct"),
        (lambda r: r["rows"][0]["by_distance"][0].update(nats="x"), "distance has a wrong nats"),
    ],
)
def test_damaged_results(tmp_path, harm, message):
    damaged = copy.deepcopy(PLAIN)
    harm(damaged)
    (tmp_path / "result.json").write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match=message):
        report.load(tmp_path / "result.json")
