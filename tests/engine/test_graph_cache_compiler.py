# SPDX-License-Identifier: Apache-2.0
"""What the compiler made is used only if it computes the same as the model itself."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from helpers.fast_path import assert_same_answers, model_pair, qa_pair, qa_step, step
from torch.testing import assert_close

from carryforward.engine import graph_cache


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that makes memories return their state times a factor. The list of how often it was used."""
    used, factor = [], [1.0]

    @contextlib.contextmanager
    def compiled_layers(model):
        used.append(model)
        forward = model.memory.forward
        model.memory.forward = lambda *args, **kwargs: forward(*args, **kwargs) * factor[0]
        yield
        del model.memory.forward

    monkeypatch.setattr(graph_cache, "compiled_layers", compiled_layers)
    return used, factor


def test_a_wrong_compilation_is_found_and_not_used(captures, compiler, caplog):
    used, factor = compiler
    factor[0] = 1.5
    for pair, run in ((model_pair, step), (qa_pair, qa_step)):
        fields = {"slots": 0, "recent": 3, "window": 14, "block_windows": 1}
        plain, fast = pair("bert" if pair is qa_pair else "llama", training=True, **fields)
        fast.fast_path = "compiled"
        used.clear()
        for seed in range(3):
            expected, out = (run(model, seed=seed)[0] for model in (plain, fast))
            if pair is qa_pair:
                assert_same_answers(out, expected)
            else:
                assert_close(out.loss, expected.loss)
        assert fast.graph_cache._compiler_failed
        graphs = [graph for graphs in fast.graph_cache._graphs.values() for graph in graphs]
        compiled = [graph for graph in graphs if graph.compiled]
        assert len(used) == len(compiled) + 1, "after it has failed once, it is not tried again"
        assert len(compiled) < len(graphs), "windows are captured without it"
        assert not any(graph.states for graph in compiled), "what it gets right, windows that pass nothing on, is used"


@pytest.mark.parametrize(
    ("harm", "close"),
    [
        (lambda x: x * 1.001, True),
        (lambda x: x.index_fill(1, torch.tensor([3]), torch.nan), False),
        (lambda x: x.index_fill(0, torch.tensor([1]), 0.0), False),
    ],
    ids=["rounding", "one position is NaN", "one row is zero"],
)
@pytest.mark.parametrize("extreme", [False, True])
def test_what_counts_as_the_same(harm, close, extreme):
    expected = torch.randn(4, 64, 32)
    expected[2, 5, 7] = torch.finfo(torch.float32).min if extreme else 1.0
    window = SimpleNamespace(mask=None, start=0)
    assert graph_cache._is_close(harm(expected), expected, window) is close


def test_a_right_compilation_is_used(captures, compiler):
    _, factor = compiler
    factor[0] = 1 + 1e-6
    _, fast = model_pair("llama", training=True, slots=0, recent=3, sinks=1)
    fast.fast_path = "compiled"
    for seed in range(3):
        step(fast, seed=seed)
    assert any(graph.compiled for graphs in fast.graph_cache._graphs.values() for graph in graphs)
