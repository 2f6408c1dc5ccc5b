# SPDX-License-Identifier: Apache-2.0
"""Captured windows that give out logits, answers or hidden states, whose gradients come with the backward pass."""

import pytest
import torch
from helpers import tiny
from helpers.fast_path import IDS, RAGGED_ROWS, Letters, answers, asked, assert_same_answers, both, learn
from torch.testing import assert_close

import carryforward as cf
from carryforward.engine import cuda_graphs, graph_cache


@pytest.mark.parametrize("keep", [0, 2, 100, "auto"])
@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_answering_is_learnt_as_without_recordings(name, keep, recordings):
    plain, fast = answers(name, training=True, keep_windows=keep)  # with dropout
    other = [[5], [6, 7, 8, 9], [10, 11]]
    for seed, questions in enumerate([tiny.QUESTIONS, other, other, tiny.QUESTIONS]):
        (expected, slow), (out, quick) = (learn(model, seed, questions=questions) for model in (plain, fast))
        assert_same_answers(out, expected)
        tiny.assert_same_gradients(slow, quick)
    assert fast.graph_cache._replayed > 8


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize(
    "fields",
    [
        {"slots": 0, "kept": 3, "sinks": 1, "window": 16},
        {"overlap": 2, "slots": 2, "insert_at": (1, 3), "pooled_layers": "all"},
        {"slots": 3, "pooling": "max"},
        {"slots": 2, "pooling": "attention", "insert_at": "all", "state_per_layer": True},
        {"bptt_windows": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_answering_with_recurrences_of_every_kind(name, fields, keep, recordings):
    plain, fast = answers(name, keep_windows=keep, **fields)
    for seed in range(3):
        (expected, slow), (out, quick) = learn(plain, seed), learn(fast, seed)
        assert_same_answers(out, expected)
        tiny.assert_same_gradients(slow, quick)
    assert fast.graph_cache._replayed


@pytest.mark.parametrize("how", ["frozen base", "frozen recurrence", "frozen all but a head", "no state", "abreast"])
def test_answering_in_parts(how, recordings):
    plain, fast = answers("bert", keep_windows=2 if how == "abreast" else 0)
    settings = {"use_state": False} if how in ("no state", "abreast") else {}
    for model in (plain, fast):
        if how == "frozen base":
            model.base.requires_grad_(False)
        if how == "frozen recurrence":
            model.recurrence.requires_grad_(False)
        if how == "frozen all but a head":
            model.requires_grad_(False)
            model.kinds.requires_grad_(True)
    for seed in range(3):
        (expected, slow), (out, quick) = learn(plain, seed, **settings), learn(fast, seed, **settings)
        assert_same_answers(out, expected)
        tiny.assert_same_gradients(slow, quick)
    assert fast.graph_cache._replayed


def test_answers_without_gradients(recordings):
    """A window that is shorter, or has fewer rows, is filled up where a mask hides the rest."""
    plain, fast = answers("bert")
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for _ in range(3):
                assert_same_answers(asked(fast), asked(plain))
            made = len(recordings)
            for length in (43, 42, 41):
                mask = (torch.arange(45) < torch.tensor([45, 38, length])[:, None]).long()
                expected, out = (asked(model, mask=mask) for model in (plain, fast))
                assert_same_answers(out, expected)
            assert_same_answers(asked(fast, questions=tiny.QUESTIONS[:2]), asked(plain, questions=tiny.QUESTIONS[:2]))
    assert made
    learn(fast)  # what was recorded in inference mode does not stand in the way


@pytest.mark.parametrize("keep", [0, 2, 100])
def test_several_calls_before_one_backward(keep, recordings):
    """What a window left behind is not written over by the next call."""
    results = []
    for model in answers("bert", training=True, keep_windows=keep):
        learn(model), learn(model)
        first, second = asked(model, 1), asked(model, 2)
        with torch.no_grad():
            asked(model, 3)
        (first.loss + 2 * second.loss).backward()
        results.append(tiny.gradients(model))
    tiny.assert_same_gradients(*results)
    assert model.graph_cache._replayed


def test_answering_broken_off_in_its_backward(recordings, monkeypatch):
    plain, fast = answers("bert", keep_windows=0)
    for _ in range(3):
        _, expected = learn(plain)
        learn(fast)
    run = graph_cache.GraphCache.run

    def interrupted(self, *args):
        if self._gathering.summed:
            raise KeyboardInterrupt
        return run(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(graph_cache.GraphCache, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            learn(fast)
    assert fast.graph_cache._gathering.summed
    fast.zero_grad()
    tiny.assert_same_gradients(learn(fast)[1], expected)


@pytest.mark.parametrize("keep", [0, 100, "auto"])
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
def test_classifiers_of_documents(name, keep, recordings):
    plain, fast = (tiny.recurrent(name, "sequence", keep_windows=keep).train() for _ in range(2))
    plain.fast_path = "off"
    for seed in range(4):
        found = []
        for model in (plain, fast):
            torch.manual_seed(seed)
            out = model(tiny.documents(3, 45, seed), attention_mask=RAGGED_ROWS, labels=torch.tensor([0, 1, 2]))
            out.loss.backward()
            found.append((out, tiny.gradients(model)))
        (expected, slow), (out, quick) = found
        assert_close(out.logits, expected.logits)
        tiny.assert_same_gradients(slow, quick)
    assert fast.graph_cache._replayed


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_classifiers_of_tokens_give_logits_and_loss(mode, recordings):
    plain, fast = (tiny.recurrent("bert", "token") for _ in range(2))
    plain.fast_path = "off"
    labels = (IDS % 4 - 1).masked_fill(IDS % 4 == 0, -100)
    for _ in range(3):
        with mode():
            found = [
                model(IDS, attention_mask=RAGGED_ROWS, labels=labels, return_logits=True) for model in (plain, fast)
            ]
        expected, out = found
        assert_close(out.logits, expected.logits)
        assert_close(out.loss, expected.loss)
        if out.loss.requires_grad:
            for one in found:
                one.loss.backward()
            tiny.assert_same_gradients(*map(tiny.gradients, (plain, fast)))
    assert fast.graph_cache._replayed


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "roberta", "modernbert"])
def test_hidden_states_in_pieces_with_gradients_through_the_state(name, keep, recordings):
    results = []
    for path in ("off", "auto"):
        model = tiny.recurrent(name, "none", keep_windows=keep)
        model.fast_path = path
        for _ in range(3):
            first = model(IDS[:, :21], attention_mask=RAGGED_ROWS[:, :21], final=False)
            rest = {"attention_mask": RAGGED_ROWS[:, 21:], "state": first.state}
            second = model(
                IDS[:2, 21:], **{**rest, "attention_mask": RAGGED_ROWS[:2, 21:], "state": first.state[[0, 1]]}
            )
            loss = first.last_hidden_state.square().sum() + second.last_hidden_state.sin().sum()
            (loss + second.state.carried.sum()).backward()
            found = tiny.gradients(model)
        results.append((first.last_hidden_state, second.last_hidden_state, second.state.carried, found))
    for a, b in zip(results[0][:3], results[1][:3], strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)
    tiny.assert_same_gradients(results[0][3], results[1][3], 1e-4)
    assert model.graph_cache._replayed


@pytest.mark.parametrize(
    "settings", [{}, {"output": "tokens", "overlap": 4}, {"pooling": "state"}, {"use_state": False}], ids=str
)
@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "llama"])
def test_documents_are_encoded_as_without_recordings(name, settings, recordings, monkeypatch):
    texts = ["recurrence " * n for n in (9, 3, 8, 9, 1, 6, 9, 9)]
    plain, fast = both(name)
    replayed, run = [], cuda_graphs.CapturedForward.__call__
    monkeypatch.setattr(cuda_graphs.CapturedForward, "__call__", lambda *args: replayed.append(1) or run(*args))
    found = [cf.encode(model, texts, Letters(), batch_size=3, **settings) for model in (plain, fast)]
    for expected, out in zip(*found, strict=True):
        if "output" in settings:
            expected, out = expected.vectors, out.vectors
        assert_close(torch.from_numpy(out), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
    assert recordings
    assert len(replayed) > 10
