# SPDX-License-Identifier: Apache-2.0
"""The fast path: windows that are recorded once and replayed give what windows give that are run as they are.

Where there is no GPU a recording is a tape of operations on tensors, which are done again in the same places; whatever
Python decided then stays decided, as in a CUDA graph. `test_graph_cache_gpu` tests the real thing.
"""

import pytest
import torch
from helpers import tiny
from helpers.fast_path import IDS, RAGGED, both, step
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from carryforward.engine import cuda_graphs, graph_cache


@pytest.mark.parametrize("keep", [0, 2, 100, "auto"])
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_replayed_windows_train_as_others_do(name, keep, recordings):
    plain, fast = both(name, training=True, keep_windows=keep)  # with dropout, where the model has some
    for seed in range(3):
        ids = tiny.documents(3, 45, seed)
        expected, slow = step(plain, ids, seed)
        out, quick = step(fast, ids, seed)
        assert_close(out.loss, expected.loss)
        assert_close(out.state.carried, expected.state.carried)
        tiny.assert_same_gradients(slow, quick)
    assert recordings, "nothing was replayed"


@pytest.mark.parametrize("keep", [0, "auto"])
@pytest.mark.parametrize(
    "length", [41, 45, 46]
)  # their last windows are shorter than others, and see all of themselves
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_encoders(name, length, keep, recordings):
    plain, fast = both(name, keep_windows=keep)
    ids = tiny.documents(3, length)
    for _ in range(3):
        expected, slow = step(plain, ids)
        out, quick = step(fast, ids)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(slow, quick)
        with torch.no_grad():
            assert_close(fast(ids, labels=ids).loss, plain(ids, labels=ids).loss)
    assert recordings


@pytest.mark.parametrize(
    "fields",
    [
        {"slots": 3, "insert_at": "all", "state_per_layer": True},
        {"pooled_layers": "below", "residual": True, "insert_at": (2, 3)},
        {"bptt_windows": 2},
        {"pooling": "attention", "slots": 2},
        {"slots": 0, "kept": 4, "sinks": 2},
        {"kept": 3},
    ],
    ids=str,
)
def test_recurrences_of_every_kind(fields, recordings):
    plain, fast = both("llama", **fields)
    for _ in range(3):
        expected, slow = step(plain, attention_mask=RAGGED)
        out, quick = step(fast, attention_mask=RAGGED)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(slow, quick)
    assert recordings


def test_with_dropout_rows_draw_the_numbers_they_would_without_recordings(recordings):
    plain, fast = both("gpt2", training=True, keep_windows=0)
    for _ in range(4):
        step(fast)
    made = len(recordings)
    for _ in range(3):
        expected, _ = step(plain, IDS[:2])
        assert_close(step(fast, IDS[:2])[0].loss, expected.loss)
    assert len(recordings) > made, "two rows were run as three"


def test_in_pieces_with_gradients_through_the_state(recordings):
    results = []
    for model in both("gpt2"):
        for _ in range(3):
            first = model(IDS[:, :21], labels=IDS[:, :21])
            second = model(IDS[:, 21:], labels=IDS[:, 21:], state=first.state)
            (first.nll_sum + second.nll_sum).backward()
            found = tiny.gradients(model)
        results.append(found)
    tiny.assert_same_gradients(*results)
    assert recordings


def test_without_gradients(recordings):
    plain, fast = both("gpt2")
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for overlap in (0, 2, 5):
                for _ in range(3):
                    out = fast(IDS, labels=IDS, overlap=overlap)
                expected = plain(IDS, labels=IDS, overlap=overlap)
                assert_close(out.nll_sum, expected.nll_sum)
                assert_close(out.state.carried, expected.state.carried)
    step(fast)  # what was recorded in inference mode does not stand in the way
    assert recordings


def test_a_second_backward_through_a_retained_graph(recordings):
    results = []
    for model in both("gpt2"):
        step(model), step(model)
        out = model(IDS, labels=IDS)
        out.loss.backward(retain_graph=True)
        out.loss.backward()
        results.append(tiny.gradients(model))
    tiny.assert_same_gradients(*results)


@pytest.mark.parametrize("frozen", ["base", "recurrence"])
@pytest.mark.parametrize("keep", [0, 100])
def test_frozen_weights(frozen, keep, recordings):
    plain, fast = both("gpt2", keep_windows=keep)
    for model in (plain, fast):
        getattr(model, frozen).requires_grad_(False)
    for _ in range(3):
        (expected, slow), (out, quick) = step(plain), step(fast)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(slow, quick)
    assert fast.fast_path == "auto", "a recording failed"
    assert recordings


def test_a_model_of_which_nothing_is_trained(recordings):
    plain, fast = both("gpt2")
    for model in (plain, fast):
        model.requires_grad_(False)
    for _ in range(3):
        assert_close(fast(IDS, labels=IDS).loss, plain(IDS, labels=IDS).loss)
    assert 0 < len(recordings) <= 3, "one for each kind of window"


def test_rows_that_are_not_filled_spoil_no_gradient(recordings):
    """What an earlier batch left in them may be anything, and zero times infinity is no number."""
    plain, fast = both("llama", training=True, keep_windows=0)
    for _ in range(4):
        step(fast)
    for made in fast.graph_cache._recordings.values():
        for one in made:
            if one.work.carried is not None:
                one.work.carried.data.fill_(torch.inf)
    _, slow = step(plain, IDS[:2])
    tiny.assert_same_gradients(slow, step(fast, IDS[:2])[1])


def test_a_call_that_is_broken_off_leaves_nothing_behind(recordings, monkeypatch):
    plain, fast = both("gpt2", keep_windows=0)
    for _ in range(3):
        _, expected = step(plain)
        step(fast)
    windows, run = [], graph_cache.GraphCache.run

    def interrupted(self, *args):
        windows.append(1)
        if len(windows) == 12:  # in the second pass, when some gradients are summed up already
            raise KeyboardInterrupt
        return run(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(graph_cache.GraphCache, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(fast)
    assert fast.graph_cache._gathering.summed, "the test interrupts too early"
    fast.zero_grad()
    tiny.assert_same_gradients(step(fast)[1], expected)


def test_what_fails_is_said_once_and_run_as_it_is(recordings, monkeypatch):
    def broken(function, pool):
        raise RuntimeError("no kernel image\nand a long trace")

    monkeypatch.setattr(cuda_graphs, "record", broken)
    plain, fast = both("gpt2")
    said = []
    monkeypatch.setattr(graph_cache.logger, "warning_once", said.append)
    for _ in range(3):
        (expected, slow), (out, quick) = step(plain), step(fast)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(slow, quick)
    assert said == ["Windows are run without the fast path: RuntimeError: no kernel image."]


@pytest.mark.parametrize("reason", ["hook", "checkpointing"])
def test_a_model_that_cannot_be_recorded_is_not(reason, recordings, monkeypatch):
    said = []
    monkeypatch.setattr(graph_cache.logger, "warning_once", said.append)
    model, called = tiny.recurrent("gpt2").train(), []
    if reason == "hook":
        model.base.transformer.h[0].register_forward_hook(lambda *args: called.append(1))
    else:
        model.gradient_checkpointing_enable()
    for _ in range(3):
        step(model)
    assert not recordings
    assert any(reason in message for message in said), said
    assert bool(called) == (reason == "hook")


@pytest.mark.parametrize("keep", [0, 2, "auto"])
def test_under_checkpointing_of_the_whole_model(keep, recordings):
    """Whoever computes graphs again, or keeps them elsewhere, gets them: nothing is recorded."""
    results = []
    for model in both("gpt2", keep_windows=keep):
        for _ in range(3):
            states = checkpoint(lambda m=model: m(IDS).logits, use_reentrant=False)
            states.square().sum().backward()
            found = tiny.gradients(model)
        results.append(found)
        assert model.fast_path in ("auto", "off")
    tiny.assert_same_gradients(*results)
