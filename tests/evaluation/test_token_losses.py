# SPDX-License-Identifier: Apache-2.0
"""Single tokens' losses, and how far back the state helps."""

import json
import sys

import numpy as np
import pytest
import torch
from helpers import prose, tiny
from torch.testing import assert_close

import carryforward as cf
from carryforward.cli.main import main
from carryforward.evaluation.token_losses import horizon, token_losses
from carryforward.models.loading import load_causal
from carryforward.utils import console

DOCUMENTS = [tiny.documents(1, length, seed)[0].numpy() for seed, length in enumerate([40, 1, 9, 2, 17, 8, 41])]
KINDS = [{}, {"slots": 0, "kept": 4, "sinks": 1}]


@pytest.mark.parametrize("use_state", [True, False])
@pytest.mark.parametrize("overlap", [0, 2, 3])
@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_every_token_once_as_perplexity_has_it(fields, overlap, use_state):
    model = tiny.recurrent("llama", **fields)
    found = token_losses(model, DOCUMENTS, overlap=overlap, use_state=use_state, batch_size=3)
    assert [len(one) for one in found] == [len(document) for document in DOCUMENTS]
    assert all(np.isnan(one[0]) and np.isfinite(one[1:]).all() for one in found)
    whole = cf.perplexity(model, DOCUMENTS, overlap=overlap, use_state=use_state)
    assert sum(np.nansum(one) for one in found) == pytest.approx(whole.nats, rel=1e-5)


def test_a_tokens_loss_is_that_of_its_logits():
    model = tiny.recurrent("gpt2")
    ids = torch.from_numpy(DOCUMENTS[0])[None]
    expected = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    (found,) = token_losses(model, DOCUMENTS[:1])
    assert_close(torch.from_numpy(found[1:]).float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_the_horizon_ends_with_no_state_and_with_all_of_it(fields):
    model = tiny.recurrent("llama", **fields)  # windows of 8 tokens, an overlap of 2
    documents = [DOCUMENTS[0], DOCUMENTS[-1]]
    found, tokens = horizon(model, documents, [0, 1, 4], batch_size=2)
    with_state, without = (token_losses(model, documents, use_state=use) for use in (True, False))
    # full windows with four before them, and what they add: targets 27 to 33, then as far as the text goes
    ends = [(i, end) for i, document in enumerate(documents) for end in range(32, len(document), 6)]
    assert tokens == 6 * len(ends)
    for depth, losses in ((0, without), (4, with_state)):
        expected = np.mean([losses[i][end - 5 : end + 1] for i, end in ends])
        if depth == 4:  # only the first of them has no more than four windows before it
            first = [(i, end) for i, end in ends if end == 32]
            alone, _ = horizon(model, [document[:33] for document in documents], [4])
            assert alone[4] == pytest.approx(np.mean([losses[i][end - 5 : end + 1] for i, end in first]), rel=1e-5)
        else:
            assert found[depth] == pytest.approx(expected, rel=1e-5)
    assert len(set(found.values())) == 3, "each window further back tells"


def test_what_cannot_be_measured():
    model = tiny.recurrent("llama")
    with pytest.raises(ValueError, match="no document has 10 full windows of 8 tokens"):
        horizon(model, DOCUMENTS, [9])
    with pytest.raises(ValueError, match="give numbers of windows"):
        horizon(model, DOCUMENTS, [])
    for batch_size in (0, -1):
        with pytest.raises(ValueError, match=f"batch_size={batch_size} must be at least 1"):
            token_losses(model, DOCUMENTS, batch_size=batch_size)
    with pytest.raises(ValueError, match="a recurrent causal language model is needed"):
        token_losses(tiny.recurrent("bert"), DOCUMENTS)


def test_the_command(tmp_path, capsys, monkeypatch):
    bars = []
    begin = console.Bar.__enter__
    monkeypatch.setattr(console.Bar, "__enter__", lambda bar: bars.append(bar) or begin(bar))
    prose.save_model(tmp_path / "plain")
    prose.save_topics(tmp_path / "texts", 6)
    model = cf.add_recurrence(load_causal(str(tmp_path / "plain")).model, window=16, hidden_sizes=(8,))
    model.save_pretrained(tmp_path / "model")
    prose.tokenizer().save_pretrained(tmp_path / "model")
    told = {}
    for name, code in (("model", 0), ("plain", 2)):
        with pytest.raises(SystemExit) as end:
            main(["horizon", str(tmp_path / name), "--data", str(tmp_path / "texts"), "--split", "train",
                  "--depth", "1", "3", "--max-document-tokens", "120", "--out", str(tmp_path / "out")])  # fmt: skip
        assert end.value.code == code
        told[name] = capsys.readouterr()
    assert "it has no state. Make it recurrent" in told["plain"].err
    assert [bar.done for bar in bars] == [bar.total for bar in bars]
    assert bars[-1].unit == "tokens"
    (result,) = json.loads((tmp_path / "out" / "horizon.json").read_text())
    assert [one["windows"] for one in result["depths"]] == [0, 1, 3]
    assert result["depths"][0]["gain"] == 0
    assert f"| 3 | {result['depths'][2]['nats']:.4f} |" in told["model"].out
    assert (tmp_path / "out" / "horizon.png").stat().st_size > 10_000
    for where in ("positions", "windows"):  # every token of a window that has a state, once
        assert (
            sum(one["tokens"] for one in result[where]) == result["data"]["tokens"] - 17 * result["data"]["documents"]
        )


def test_more_models_than_colours(tmp_path, monkeypatch):
    """Every one is drawn, and without matplotlib the figures are left out, not the results."""
    from matplotlib.axes import Axes

    from carryforward.evaluation import horizon as job
    from carryforward.utils.plotting import COLOURS

    points = [{"from": 1, "to": 2, "gain": 0.1, "tokens": 9}]
    one = {"depths": [{"windows": 0, "nats": 3.0, "gain": 0.0}], "positions": points, "windows": points}
    results = [{**one, "model": f"run {i}"} for i in range(len(COLOURS) + 2)]
    drawn = []
    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda *args, **style: drawn.append(style["label"]) or plot(*args, **style))
    job.write(results, tmp_path)
    assert sorted(drawn) == sorted(3 * [result["model"] for result in results])
    assert (tmp_path / "horizon.png").stat().st_size > 10_000
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "bare").mkdir()
    job.write(results, tmp_path / "bare")
    assert [path.name for path in (tmp_path / "bare").iterdir()] == ["horizon.json"]
