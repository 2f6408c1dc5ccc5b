# SPDX-License-Identifier: Apache-2.0
"""Which windows are captured, which graphs serve several shapes, and how much memory graphs hold."""

import contextlib

import pytest
import torch
from helpers import tiny
from helpers.fast_path import (
    IDS,
    RAGGED_ROWS,
    CharacterTokenizer,
    assert_same_answers,
    graphs_of,
    model_pair,
    qa_forward,
    qa_pair,
    qa_step,
    step,
)
from torch.testing import assert_close

import carryforward as cf
from carryforward.engine import activation_budget, bptt, cuda_graphs, graph_cache


@pytest.mark.parametrize(("name", "training"), [("gpt2", False), ("llama", True)])
def test_rows_of_different_lengths_use_the_graphs_of_full_windows(name, training, captures):
    plain, fast = model_pair(name, training, keep_windows=0)
    for _ in range(4):
        step(fast)
    before = len(captures)
    lengths = torch.tensor([45, 41, 30])
    short = (torch.arange(45) < lengths[:, None]).long()
    for mask in (short, short.flip(1)):
        expected, eager = step(plain, attention_mask=mask)
        out, captured = step(fast, attention_mask=mask)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(eager, captured)
    assert len(captures) == before, "short windows or fewer rows were captured again"


def test_questions_of_other_lengths_use_the_same_graphs(captures):
    model = tiny.answering("bert", keep_windows=0)
    for seed, questions in enumerate([tiny.QUESTIONS, [[5], [6, 7, 8, 9], [10, 11]], [[5, 6]] * 3]):
        qa_step(model, seed, mask=torch.ones_like(RAGGED_ROWS), questions=questions)
    buffers = [graph.buffers for graph in graphs_of(model)]
    full = [window for window in buffers if window.ids.shape == (3, 14) and window.mask is None and window.spans]
    assert len(full) == 4, "with and without gradients, with and without a state"


def test_full_windows_do_not_use_a_graph_with_a_mask(captures):
    model = tiny.answering("bert")
    mask = (torch.arange(45) < torch.tensor([[45], [4], [45]])).long()
    with torch.no_grad():
        for _ in range(4):
            model(IDS, attention_mask=mask, question_ids=tiny.QUESTIONS)
        for _ in range(4):
            model(IDS[:, :21], question_ids=[[5, 6, 7]] * 3)
    shapes = {(graph.buffers.ids.shape, graph.buffers.mask is None) for graph in graphs_of(model)}
    assert any(maskless for _, maskless in shapes)


def test_encoding_again_captures_nothing_new(captures):
    model, texts = tiny.recurrent("bert"), ["a" * 45, "b" * 45, "c" * 45]
    for _ in range(3):
        cf.encode(model, texts, CharacterTokenizer(), batch_size=3)
    before = len(captures)
    assert before
    cf.encode(model, texts, CharacterTokenizer(), batch_size=3)
    assert len(captures) == before


def test_documents_of_many_lengths_share_few_graphs(captures, monkeypatch):
    """Documents end one after the other, so that windows have fewer and fewer rows."""
    monkeypatch.setattr(graph_cache, "CAPTURE_AFTER", 2)
    documents = [tiny.documents(1, length, length)[0].tolist() for length in range(20, 260, 6)]
    plain, fast = model_pair("llama")
    eager = []
    fast.run_window = lambda window: eager.append(window) or type(fast).run_window(fast, window)
    expected, result = (cf.perplexity(model, documents, batch_size=100) for model in (plain, fast))
    assert result.nats == pytest.approx(expected.nats, rel=1e-6)
    graphs = graphs_of(fast)
    assert len(graphs) <= 6
    assert min(len(graph.buffers.ids) for graph in graphs) <= 6, "the last rows are captured too"
    assert fast.graph_cache._replays > 2 * len(eager)


def test_of_ragged_documents_only_the_largest_windows_are_compiled_at_once(captures, monkeypatch):
    compiled = []
    monkeypatch.setattr(graph_cache, "CAPTURE_AFTER", 100)
    monkeypatch.setattr(graph_cache, "compiled_layers", lambda model: compiled.append(1) or contextlib.nullcontext())
    plain, fast = qa_pair("bert", training=True, keep_windows=0)
    fast.fast_path = "compiled"
    for seed, length in enumerate((31, 33, 35, 36)):
        mask = (torch.arange(45) < torch.tensor([45, 38, length])[:, None]).long()
        (expected, eager), (out, captured) = qa_step(plain, seed, mask), qa_step(fast, seed, mask)
        assert_same_answers(out, expected)
        tiny.assert_same_gradients(eager, captured)
    graphs = graphs_of(fast)
    assert len(compiled) == len(graphs)
    assert {graph.buffers.ids.shape for graph in graphs} == {(3, 14)}
    assert fast.graph_cache._replays > 16


def test_windows_captured_after_others_were_compiled_are_compiled_too(captures, monkeypatch):
    compiled = []
    monkeypatch.setattr(graph_cache, "compiled_layers", lambda model: compiled.append(1) or contextlib.nullcontext())
    monkeypatch.setattr(graph_cache, "COMPILE_AFTER", 60)
    monkeypatch.setattr(graph_cache, "MIN_COUNT_TO_COMPILE", 3)
    plain, model = model_pair("gpt2", keep_windows=0)
    for _ in range(15):
        step(model)
    in_training = len(compiled)
    assert in_training > 0
    with torch.no_grad():
        for _ in range(30):
            nll_sum = model(IDS, labels=IDS).nll_sum
        assert_close(nll_sum, plain(IDS, labels=IDS).nll_sum)
    assert len(compiled) > in_training
    assert all(graph.compiled for graph in graphs_of(model))


@pytest.mark.parametrize("keep", [0, 2])
def test_ragged_batches_do_not_fill_the_memory_with_graphs(keep, captures):
    model = tiny.recurrent("gpt2", keep_windows=keep).train()  # with dropout no graph serves another shape
    generator = torch.Generator().manual_seed(0)
    for seed in range(60):
        lengths = torch.randint(2, 46, (3, 1), generator=generator)
        step(model, seed=seed, attention_mask=(torch.arange(45) < lengths).long())
    positions = [graph.buffers.ids.numel() for graph in graphs_of(model, cuda_graphs.CapturedForwardBackward)]
    assert positions
    assert sum(positions) <= (keep + activation_budget.SPARE_BUFFERS) * 3 * 8


def test_replayed_windows_use_buffers_and_are_not_measured_as_empty(captures, monkeypatch):
    monkeypatch.setattr(activation_budget, "available_memory", lambda device: 0)
    model = tiny.recurrent("llama", keep_windows="auto").train()
    for _ in range(4):
        step(model)
    assert captures
    before = len(captures)
    for _ in range(4):
        step(model, IDS[:2])  # graphs of three rows serve them
    assert len(captures) == before
    assert all(model.activation_budget._sizes.values())
    model.fast_path = "off"
    step(model)
    assert not any(model.activation_budget._free_buffers.values()), "the buffers are gone"


def test_the_size_of_a_replayed_window_is_not_that_of_its_outputs(captures, monkeypatch):
    monkeypatch.setattr(activation_budget, "available_memory", lambda device: 0)
    model, plain = (tiny.answering("modernbert", keep_windows="auto").train() for _ in range(2))
    plain.fast_path = "off"
    for trained in (model, plain):
        for questions in (tiny.QUESTIONS, tiny.QUESTIONS[:2]):
            for seed in range(4):
                qa_step(trained, seed, questions=questions)
    assert captures
    for shape, size in model.activation_budget._sizes.items():
        assert size == plain.activation_budget._sizes[shape], shape


def test_activations_without_a_backward_pass_are_released(captures):
    model = tiny.answering("bert", keep_windows=100)
    for seed in range(3):
        qa_forward(model, seed)
    before = len(captures)
    out = qa_forward(model)
    assert any(graph.busy for graph in graphs_of(model))
    del out
    assert not any(graph.busy for graph in graphs_of(model))
    qa_forward(model)
    assert len(captures) == before


def test_buffers_of_activations_that_are_still_needed_are_not_free(captures, monkeypatch):
    """Several calls before one backward pass keep no more than one call would, if there is no more memory."""
    model, kept = tiny.answering("bert", keep_windows="auto"), []
    keep = bptt._TwoPassRecompute._run_and_keep
    monkeypatch.setattr(
        bptt._TwoPassRecompute, "_run_and_keep", lambda self, i, state: kept.append(i) or keep(self, i, state)
    )
    for seed in range(4):
        qa_step(model, seed)
    monkeypatch.setattr(activation_budget, "available_memory", lambda device: 0)
    outs, counts, first = [], [], torch.zeros(3, dtype=torch.long)
    for _ in range(3):
        kept.clear()
        outs.append(model(IDS, question_ids=tiny.QUESTIONS, start_positions=first, end_positions=first))
        counts.append(len(kept))
    assert counts[0] > 0
    assert counts[1:] == [0, 0]
    sum(out.loss for out in outs).backward()
