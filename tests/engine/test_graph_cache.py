# SPDX-License-Identifier: Apache-2.0
"""The fast path: windows that are captured once and replayed equal windows that run eagerly.

CUDA graphs are emulated on the CPU by repeating the captured tensor operations on the same tensors; as in a CUDA graph,
Python code does not run again. `test_graph_cache_gpu` tests real CUDA graphs.
"""

import pytest
import torch
from helpers import tiny
from helpers.fast_path import IDS, RAGGED, graphs_of, model_pair, step
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from carryforward.engine import cuda_graphs, graph_cache


@pytest.mark.parametrize("keep", [0, 2, 100, "auto"])
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_replayed_windows_train_like_eager_ones(name, keep, captures):
    plain, fast = model_pair(name, training=True, keep_windows=keep)  # with dropout, where the model has some
    for seed in range(3):
        ids = tiny.documents(3, 45, seed)
        expected, eager = step(plain, ids, seed)
        out, captured = step(fast, ids, seed)
        assert_close(out.loss, expected.loss)
        assert_close(out.state.memory["vector"], expected.state.memory["vector"])
        tiny.assert_same_gradients(eager, captured)
    assert captures, "nothing was captured"


@pytest.mark.parametrize("keep", [0, "auto"])
@pytest.mark.parametrize("length", [41, 45, 46])  # the last windows are shorter, and attend to all of themselves
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_encoders_train_like_eager_ones(name, length, keep, captures):
    plain, fast = model_pair(name, keep_windows=keep)
    ids = tiny.documents(3, length)
    for _ in range(3):
        expected, eager = step(plain, ids)
        out, captured = step(fast, ids)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(eager, captured)
        with torch.no_grad():
            assert_close(fast(ids, labels=ids).loss, plain(ids, labels=ids).loss)
    assert captures


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"slots": 3, "insert_at": "all", "state_per_layer": True}),
        ("llama", {"pooled_layers": "below", "residual": True, "insert_at": (2, 3)}),
        ("llama", {"bptt_windows": 2}),
        ("llama", {"pooling": "attention", "slots": 2}),
        ("llama", {"slots": 0, "recent": 4, "sinks": 2}),
        ("llama", {"recent": 3}),
        ("gpt2", tiny.TOKENS),
        ("gemma3_text", {"bptt_windows": 2, **tiny.TOKENS}),
        ("bert", tiny.TOKENS),
        ("llama", tiny.ASSOCIATIVE),
        ("roberta", tiny.ASSOCIATIVE),
        ("gpt2", tiny.ASSOCIATIVE_AND_KV),
    ],
    ids=str,
)
def test_every_memory_trains_like_an_eager_one(name, fields, captures):
    plain, fast = (model.double() if "memory" in fields else model for model in model_pair(name, **fields))
    for _ in range(3):
        expected, eager = step(plain, attention_mask=RAGGED)
        out, captured = step(fast, attention_mask=RAGGED)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(eager, captured)
    assert captures


def test_with_dropout_rows_draw_the_same_random_numbers(captures):
    plain, fast = model_pair("gpt2", training=True, keep_windows=0)
    for _ in range(4):
        step(fast)
    before = len(captures)
    for _ in range(3):
        expected, _ = step(plain, IDS[:2])
        assert_close(step(fast, IDS[:2])[0].loss, expected.loss)
    assert len(captures) > before, "two rows ran as three"


def test_gradients_flow_through_the_state_between_calls(captures):
    results = []
    for model in model_pair("gpt2"):
        for _ in range(3):
            first = model(IDS[:, :21], labels=IDS[:, :21])
            second = model(IDS[:, 21:], labels=IDS[:, 21:], state=first.state)
            (first.nll_sum + second.nll_sum).backward()
            gradients = tiny.gradients(model)
        results.append(gradients)
    tiny.assert_same_gradients(*results)
    assert captures


@pytest.mark.parametrize("fields", [{}, tiny.TOKENS, tiny.ASSOCIATIVE], ids=str)
def test_windows_without_gradients_are_replayed(fields, captures):
    plain, fast = model_pair("gpt2", **fields)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for overlap in (0, 2, 5):
                for _ in range(3):
                    out = fast(IDS, labels=IDS, overlap=overlap)
                expected = plain(IDS, labels=IDS, overlap=overlap)
                assert_close(out.nll_sum, expected.nll_sum)
                for kind, state in expected.state.memory.items():
                    assert_close(out.state.memory[kind], state)
    step(fast)  # graphs captured in inference mode do not prevent training
    assert captures


def test_a_second_backward_through_a_retained_graph(captures):
    results = []
    for model in model_pair("gpt2"):
        step(model), step(model)
        out = model(IDS, labels=IDS)
        out.loss.backward(retain_graph=True)
        out.loss.backward()
        results.append(tiny.gradients(model))
    tiny.assert_same_gradients(*results)


@pytest.mark.parametrize("frozen", ["base", "memory"])
@pytest.mark.parametrize("keep", [0, 100])
def test_weights_may_be_frozen(frozen, keep, captures):
    plain, fast = model_pair("gpt2", keep_windows=keep)
    for model in (plain, fast):
        getattr(model, frozen).requires_grad_(False)
    for _ in range(3):
        (expected, eager), (out, captured) = step(plain), step(fast)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(eager, captured)
    assert fast.fast_path == "auto", "a capture failed"
    assert captures


def test_all_weights_may_be_frozen(captures):
    plain, fast = model_pair("gpt2")
    for model in (plain, fast):
        model.requires_grad_(False)
    for _ in range(3):
        assert_close(fast(IDS, labels=IDS).loss, plain(IDS, labels=IDS).loss)
    assert 0 < len(captures) <= 3, "one for each shape of window"


def test_unused_rows_of_a_buffer_do_not_affect_gradients(captures):
    """An earlier batch may have left infinities there, and 0 times infinity is NaN."""
    plain, fast = model_pair("llama", training=True, keep_windows=0)
    for _ in range(4):
        step(fast)
    buffers = [graph.buffers.state for graph in graphs_of(fast) if graph.buffers.state is not None]
    assert buffers
    for buffer in buffers:
        buffer.data.fill_(torch.inf)
    _, eager = step(plain, IDS[:2])
    tiny.assert_same_gradients(eager, step(fast, IDS[:2])[1])


def test_an_interrupted_call_leaves_no_gradients_behind(captures, monkeypatch):
    plain, fast = model_pair("gpt2", keep_windows=0)
    for _ in range(3):
        _, expected = step(plain)
        step(fast)
    windows, run = [], graph_cache.GraphCache.run

    def interrupted(self, *args):
        windows.append(1)
        if len(windows) == 12:  # in the second pass, when some gradients are accumulated already
            raise KeyboardInterrupt
        return run(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(graph_cache.GraphCache, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(fast)
    assert fast.graph_cache._accumulator.touched, "the interruption came too early"
    fast.zero_grad()
    tiny.assert_same_gradients(step(fast)[1], expected)


def test_a_failed_capture_is_logged_once_and_windows_run_eagerly(captures, monkeypatch):
    def broken(function, pool):
        raise RuntimeError("no kernel image\nand a long trace")

    monkeypatch.setattr(cuda_graphs, "capture", broken)
    plain, fast = model_pair("gpt2")
    warnings = []
    monkeypatch.setattr(graph_cache.logger, "warning_once", warnings.append)
    for _ in range(3):
        (expected, eager), (out, captured) = step(plain), step(fast)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(eager, captured)
    assert warnings == ["Windows run without the fast path: RuntimeError: no kernel image."]


@pytest.mark.parametrize("reason", ["hook", "checkpointing"])
def test_a_model_that_cannot_be_captured_runs_eagerly(reason, captures, monkeypatch):
    warnings = []
    monkeypatch.setattr(graph_cache.logger, "warning_once", warnings.append)
    model, called = tiny.recurrent("gpt2").train(), []
    if reason == "hook":
        model.base.transformer.h[0].register_forward_hook(lambda *args: called.append(1))
    else:
        model.gradient_checkpointing_enable()
    for _ in range(3):
        step(model)
    assert not captures
    assert any(reason in message for message in warnings), warnings
    assert bool(called) == (reason == "hook")


@pytest.mark.parametrize("keep", [0, 2, "auto"])
def test_the_whole_model_can_be_checkpointed(keep, captures):
    """saved_tensors_hooks cannot see inside a captured graph: nothing is captured while one is active."""
    results = []
    for model in model_pair("gpt2", keep_windows=keep):
        for _ in range(3):
            states = checkpoint(lambda m=model: m(IDS).logits, use_reentrant=False)
            states.square().sum().backward()
            gradients = tiny.gradients(model)
        results.append(gradients)
        assert model.fast_path in ("auto", "off")
    tiny.assert_same_gradients(*results)
