# SPDX-License-Identifier: Apache-2.0
"""Captured windows that return logits, answers or hidden states: their gradients come in the backward pass."""

import pytest
import torch
from helpers import tiny
from helpers.fast_path import (
    IDS,
    RAGGED_ROWS,
    CharacterTokenizer,
    assert_same_answers,
    model_pair,
    qa_forward,
    qa_pair,
    qa_step,
)
from torch.testing import assert_close

import carryforward as cf
from carryforward.engine import cuda_graphs, graph_cache


@pytest.mark.parametrize("keep", [0, 2, 100, "auto"])
@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_question_answering_trains_like_an_eager_model(name, keep, captures):
    plain, fast = qa_pair(name, training=True, keep_windows=keep)  # with dropout
    others = [[5], [6, 7, 8, 9], [10, 11]]
    for seed, questions in enumerate([tiny.QUESTIONS, others, others, tiny.QUESTIONS]):
        (expected, eager), (out, captured) = (qa_step(model, seed, questions=questions) for model in (plain, fast))
        assert_same_answers(out, expected)
        tiny.assert_same_gradients(eager, captured)
    assert fast.graph_cache._replays > 8


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize(
    "fields",
    [
        {"slots": 0, "recent": 3, "sinks": 1, "window": 16},
        {"overlap": 2, "slots": 2, "insert_at": (1, 3), "pooled_layers": "all"},
        {"slots": 3, "pooling": "max"},
        {"slots": 2, "pooling": "attention", "insert_at": "all", "state_per_layer": True},
        {"bptt_windows": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_question_answering_trains_with_every_memory(name, fields, keep, captures):
    plain, fast = qa_pair(name, keep_windows=keep, **fields)
    for seed in range(3):
        (expected, eager), (out, captured) = qa_step(plain, seed), qa_step(fast, seed)
        assert_same_answers(out, expected)
        tiny.assert_same_gradients(eager, captured)
    assert fast.graph_cache._replays


@pytest.mark.parametrize("how", ["frozen base", "frozen memory", "frozen all but a head", "no state", "in parallel"])
def test_question_answering_trains_in_part_or_without_a_state(how, captures):
    plain, fast = qa_pair("bert", keep_windows=2 if how == "in parallel" else 0)
    settings = {"use_state": False} if how in ("no state", "in parallel") else {}
    for model in (plain, fast):
        if how == "frozen base":
            model.base.requires_grad_(False)
        if how == "frozen memory":
            model.memory.requires_grad_(False)
        if how == "frozen all but a head":
            model.requires_grad_(False)
            model.kinds.requires_grad_(True)
    for seed in range(3):
        (expected, eager), (out, captured) = qa_step(plain, seed, **settings), qa_step(fast, seed, **settings)
        assert_same_answers(out, expected)
        tiny.assert_same_gradients(eager, captured)
    assert fast.graph_cache._replays


def test_answers_without_gradients_are_replayed(captures):
    """Shorter windows and fewer rows are padded if the graph has a mask."""
    plain, fast = qa_pair("bert")
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for _ in range(3):
                assert_same_answers(qa_forward(fast), qa_forward(plain))
            count = len(captures)
            for length in (43, 42, 41):
                mask = (torch.arange(45) < torch.tensor([45, 38, length])[:, None]).long()
                expected, out = (qa_forward(model, mask=mask) for model in (plain, fast))
                assert_same_answers(out, expected)
            assert_same_answers(
                qa_forward(fast, questions=tiny.QUESTIONS[:2]), qa_forward(plain, questions=tiny.QUESTIONS[:2])
            )
    assert count
    qa_step(fast)  # graphs captured in inference mode do not prevent training


@pytest.mark.parametrize("keep", [0, 2, 100])
def test_several_calls_may_precede_one_backward_pass(keep, captures):
    """Activations that are still needed are not overwritten by the next call."""
    results = []
    for model in qa_pair("bert", training=True, keep_windows=keep):
        qa_step(model), qa_step(model)
        first, second = qa_forward(model, 1), qa_forward(model, 2)
        with torch.no_grad():
            qa_forward(model, 3)
        (first.loss + 2 * second.loss).backward()
        results.append(tiny.gradients(model))
    tiny.assert_same_gradients(*results)
    assert model.graph_cache._replays


def test_an_interrupted_backward_pass_leaves_no_gradients_behind(captures, monkeypatch):
    plain, fast = qa_pair("bert", keep_windows=0)
    for _ in range(3):
        _, expected = qa_step(plain)
        qa_step(fast)
    run = graph_cache.GraphCache.run

    def interrupted(self, *args):
        if self._accumulator.touched:
            raise KeyboardInterrupt
        return run(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(graph_cache.GraphCache, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            qa_step(fast)
    assert fast.graph_cache._accumulator.touched
    fast.zero_grad()
    tiny.assert_same_gradients(qa_step(fast)[1], expected)


@pytest.mark.parametrize("keep", [0, 100, "auto"])
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
def test_sequence_classifiers_train_like_eager_ones(name, keep, captures):
    plain, fast = (tiny.recurrent(name, "sequence", keep_windows=keep).train() for _ in range(2))
    plain.fast_path = "off"
    for seed in range(4):
        results = []
        for model in (plain, fast):
            torch.manual_seed(seed)
            out = model(tiny.documents(3, 45, seed), attention_mask=RAGGED_ROWS, labels=torch.tensor([0, 1, 2]))
            out.loss.backward()
            results.append((out, tiny.gradients(model)))
        (expected, eager), (out, captured) = results
        assert_close(out.logits, expected.logits)
        tiny.assert_same_gradients(eager, captured)
    assert fast.graph_cache._replays


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_token_classifiers_return_logits_and_loss(mode, captures):
    plain, fast = (tiny.recurrent("bert", "token") for _ in range(2))
    plain.fast_path = "off"
    labels = (IDS % 4 - 1).masked_fill(IDS % 4 == 0, -100)
    for _ in range(3):
        with mode():
            outs = [
                model(IDS, attention_mask=RAGGED_ROWS, labels=labels, return_logits=True) for model in (plain, fast)
            ]
        expected, out = outs
        assert_close(out.logits, expected.logits)
        assert_close(out.loss, expected.loss)
        if out.loss.requires_grad:
            for out in outs:
                out.loss.backward()
            tiny.assert_same_gradients(*map(tiny.gradients, (plain, fast)))
    assert fast.graph_cache._replays


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "roberta", "modernbert"])
def test_hidden_states_and_states_are_differentiated_across_calls(name, keep, captures):
    results = []
    for path in ("off", "auto"):
        model = tiny.recurrent(name, "none", keep_windows=keep)
        model.fast_path = path
        for _ in range(3):
            first = model(IDS[:, :21], attention_mask=RAGGED_ROWS[:, :21], final=False)
            second = model(IDS[:2, 21:], attention_mask=RAGGED_ROWS[:2, 21:], state=first.state[[0, 1]])
            loss = first.last_hidden_state.square().sum() + second.last_hidden_state.sin().sum()
            (loss + second.state.memory["vector"].sum()).backward()
            gradients = tiny.gradients(model)
        results.append((first.last_hidden_state, second.last_hidden_state, second.state.memory["vector"], gradients))
    for a, b in zip(results[0][:3], results[1][:3], strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)
    tiny.assert_same_gradients(results[0][3], results[1][3], 1e-4)
    assert model.graph_cache._replays


@pytest.mark.parametrize(
    "settings", [{}, {"output": "tokens", "overlap": 4}, {"pooling": "state"}, {"use_state": False}], ids=str
)
@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "llama"])
def test_documents_are_encoded_like_eagerly(name, settings, captures, monkeypatch):
    texts = ["recurrence " * n for n in (9, 3, 8, 9, 1, 6, 9, 9)]
    plain, fast = model_pair(name)
    replayed, run = [], cuda_graphs.CapturedForward.__call__
    monkeypatch.setattr(cuda_graphs.CapturedForward, "__call__", lambda *args: replayed.append(1) or run(*args))
    results = [cf.encode(model, texts, CharacterTokenizer(), batch_size=3, **settings) for model in (plain, fast)]
    for expected, out in zip(*results, strict=True):
        if "output" in settings:
            expected, out = expected.vectors, out.vectors
        assert_close(torch.from_numpy(out), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
    assert captures
    assert len(replayed) > (0 if settings == {"use_state": False} else 10), "windows run side by side without a state"
