# SPDX-License-Identifier: Apache-2.0
"""`carryforward horizon`: its result, table and figure."""

import json
import sys

import pytest
from helpers import prose

import carryforward as cf
from carryforward.cli.main import main
from carryforward.evaluation import horizon
from carryforward.models.loading import load_causal
from carryforward.utils.plotting import COLOURS


def test_the_horizon_command(tmp_path, capsys, monkeypatch):
    bars = []
    begin = horizon.ProgressBar.__enter__
    monkeypatch.setattr(horizon.ProgressBar, "__enter__", lambda bar: bars.append(bar) or begin(bar))
    prose.save_model(tmp_path / "plain")
    prose.save_topics(tmp_path / "texts", 6)
    model = cf.add_recurrence(
        load_causal(str(tmp_path / "plain")).model, window=16, memory=cf.VectorMemoryConfig(hidden_sizes=(8,))
    )
    model.save_pretrained(tmp_path / "model")
    prose.tokenizer().save_pretrained(tmp_path / "model")
    captured = {}
    for name, code in (("model", 0), ("plain", 2)):
        with pytest.raises(SystemExit) as end:
            main(["horizon", str(tmp_path / name), "--data", str(tmp_path / "texts"), "--split", "train",
                  "--depth", "1", "3", "--max-document-tokens", "120", "--out", str(tmp_path / "out")])  # fmt: skip
        assert end.value.code == code
        captured[name] = capsys.readouterr()
    assert "it has no state. Make it recurrent" in captured["plain"].err
    assert [bar.done for bar in bars] == [bar.total for bar in bars]
    assert bars[-1].unit == "tokens"
    (result,) = json.loads((tmp_path / "out" / "horizon.json").read_text())
    assert [depth["windows"] for depth in result["depths"]] == [0, 1, 3]
    assert result["depths"][0]["gain"] == 0
    assert f"| 3 | {result['depths'][2]['nats']:.4f} |" in captured["model"].out
    assert (tmp_path / "out" / "horizon.png").stat().st_size > 10_000
    for where in ("positions", "windows"):  # every token of a window that has a state, once
        assert (
            sum(point["tokens"] for point in result[where])
            == result["data"]["tokens"] - 17 * result["data"]["documents"]
        )


def test_a_memory_that_reaches_far_is_measured_up_to_32_windows_back(tmp_path, capsys):
    """If a document has so many windows; a memory that does not reach so far is measured up to 8."""
    prose.save_model(tmp_path / "plain")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "long.txt").write_text(" ".join(prose.TOPICS)[:1500])
    memories = {"far": cf.KVMemoryConfig(recent=6, sinks=1, far=4), "near": cf.KVMemoryConfig(recent=3, sinks=1)}
    for name, memory in memories.items():
        loaded = load_causal(str(tmp_path / "plain"))
        model = cf.add_recurrence(loaded.model, window=4, memory=memory, tokenizer=loaded.tokenizer)
        model.save_pretrained(tmp_path / name)
    found = {}
    for name, tokens in (("far", 140), ("far", 132), ("near", 140)):
        with pytest.raises(SystemExit) as end:
            main(["horizon", str(tmp_path / name), "--data", str(tmp_path / "texts"), "--split", "train",
                  "--max-document-tokens", str(tokens), "--out", str(tmp_path / f"out-{name}-{tokens}")])  # fmt: skip
        assert end.value.code == 0, capsys.readouterr().err
        (result,) = json.loads((tmp_path / f"out-{name}-{tokens}" / "horizon.json").read_text())
        found[name, tokens] = [depth["windows"] for depth in result["depths"]]
        assert len({depth["nats"] for depth in result["depths"]}) == len(result["depths"]), "each changes the loss"
    assert found == {
        ("far", 140): [0, 1, 2, 4, 8, 16, 32], ("far", 132): [0, 1, 2, 4, 8, 16], ("near", 140): [0, 1, 2, 4, 8],
    }  # fmt: skip


def test_more_models_than_colours(tmp_path, monkeypatch):
    """Every model is drawn. Without matplotlib the results are written, but no figure."""
    from matplotlib.axes import Axes

    points = [{"from": 1, "to": 2, "gain": 0.1, "tokens": 9}]
    shared = {"depths": [{"windows": 0, "nats": 3.0, "gain": 0.0}], "positions": points, "windows": points}
    results = [{**shared, "model": f"run {i}"} for i in range(len(COLOURS) + 2)]
    labels = []
    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda *args, **style: labels.append(style["label"]) or plot(*args, **style))
    horizon.write(results, tmp_path)
    assert sorted(labels) == sorted(3 * [result["model"] for result in results])
    assert (tmp_path / "horizon.png").stat().st_size > 10_000
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "bare").mkdir()
    horizon.write(results, tmp_path / "bare")
    assert [path.name for path in (tmp_path / "bare").iterdir()] == ["horizon.json"]
