# SPDX-License-Identifier: Apache-2.0
"""Captured blocks of windows: the same numbers as eagerly, and few graphs for blocks of many sizes."""

import pytest
import torch
from helpers import tiny
from helpers.fast_path import GPU, IDS, graphs_of, model_pair, qa_pair, qa_step, step
from torch.testing import assert_close

import carryforward as cf
from carryforward.engine import block_size, cuda_graphs, graph_cache
from carryforward.engine.window_buffers import Sizes, shared_room

KV = {"slots": 0, "recent": 3, "sinks": 1}
RAGGED = [(45, 45, 45), (45, 30, 9), (45, 38, 20), (45, 45, 2), (9, 8, 3)]


def masks():
    return [(torch.arange(45) < torch.tensor(lengths)[:, None]).long() for lengths in RAGGED]


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize("block", [2, 100])
@pytest.mark.parametrize("name", ["gpt2", "mistral", "modernbert"])
def test_training_on_blocks_is_captured(name, block, keep, captures):
    plain, fast = model_pair(name, block_windows=block, keep_windows=keep, **KV)
    for mask in (*masks(), *masks()[:2]):
        (expected, eager), (out, captured) = (step(model, attention_mask=mask) for model in (plain, fast))
        assert_close(out.loss, expected.loss)
        assert_close(out.state.memory["kv"], expected.state.memory["kv"], rtol=1e-4, atol=1e-5)
        tiny.assert_same_gradients(eager, captured)
    assert fast.graph_cache._replays


@pytest.mark.parametrize("fields", [{"bptt_windows": 2}, {"overlap": 3, "sinks": 0}], ids=str)
def test_blocks_with_truncated_bptt_or_dropout_are_captured(fields, captures):
    plain, fast = model_pair("gpt2", training=True, block_windows=2, **KV | fields)
    for seed in range(4):
        (expected, eager), (out, captured) = (step(model, seed=seed) for model in (plain, fast))
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(eager, captured)
    assert fast.graph_cache._replays


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize(
    "memory", [{"recent": 20, "sinks": 1}, {"recent": 4, "far": 3, "selection": "merged"}], ids=str
)
@pytest.mark.parametrize("name", ["gpt2", "mistral", "modernbert"])
def test_blocks_that_see_further_than_one_window_are_captured(name, memory, keep, captures):
    fields = {"memory": cf.KVMemoryConfig(**memory), "block_windows": 2, "keep_windows": keep}
    plain, fast = model_pair(name, **fields)
    for mask in (*masks(), *masks()):
        (expected, eager), (out, captured) = (step(model, attention_mask=mask) for model in (plain, fast))
        assert_close(out.loss, expected.loss)
        assert_close(out.state.memory["kv"], expected.state.memory["kv"], rtol=1e-4, atol=1e-5)
        tiny.assert_same_gradients(eager, captured)
    assert fast.graph_cache._replays


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_blocks_whose_windows_see_both_neighbours_are_captured(name, keep, captures):
    memory = cf.KVMemoryConfig(recent=3, sinks=1, right=4, group_windows=3)
    fields = {"memory": memory, "overlap": 0, "block_windows": 6, "keep_windows": keep, "bptt_windows": 3}
    plain, fast = model_pair(name, **fields)
    for mask in (*masks(), *masks()):
        (expected, eager), (out, captured) = (step(model, attention_mask=mask) for model in (plain, fast))
        assert_close(out.loss, expected.loss)
        assert_close(out.state.memory["kv"], expected.state.memory["kv"], rtol=1e-4, atol=1e-5)
        tiny.assert_same_gradients(eager, captured)
    assert fast.graph_cache._replays
    fast.graph_cache._replays = 0
    for _ in range(3):  # without gradients
        with torch.no_grad():
            assert_close(fast(IDS, labels=IDS).loss, plain(IDS, labels=IDS).loss)
    assert fast.graph_cache._replays
    fast.graph_cache._replays, state = 0, plain.advance_state(IDS[:, :25])
    for rows in (3, 2, 1, 3, 2):  # a state enters
        with torch.no_grad():
            losses = [model(IDS[:rows, 25:30], labels=IDS[:rows, 25:30], state=state[:rows]).loss
                      for model in (fast, plain)]  # fmt: skip
        assert_close(*losses)
    assert fast.graph_cache._replays


def test_blocks_that_select_by_contents_are_not_captured(captures):
    memory = cf.KVMemoryConfig(recent=4, far=3, selection="attention")
    plain, fast = model_pair("llama", memory=memory, block_windows=2)
    for _ in range(4):
        (expected, eager), (out, captured) = (step(model) for model in (plain, fast))
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(eager, captured)
    assert not captures


@pytest.mark.parametrize("right", [{}, {"right": 2, "group_windows": 3}], ids=str)
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_blocks_with_questions_in_front_are_captured(name, right, captures):
    fields = {"slots": 0, "recent": 2, "sinks": 1, "window": 16, "block_windows": 3, **right}
    plain, fast = qa_pair(name, **fields)
    for questions in (tiny.QUESTIONS, [[5], [6, 7, 8, 9], [10, 11]], tiny.QUESTIONS, tiny.QUESTIONS):
        (expected, eager), (out, captured) = (qa_step(model, questions=questions) for model in (plain, fast))
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(eager, captured)
    assert fast.graph_cache._replays


@pytest.mark.parametrize(("name", "path"), [("gpt2", "auto"), ("llama", "compiled")])
def test_documents_of_many_lengths_are_scored_with_few_graphs(name, path, captures, monkeypatch):
    monkeypatch.setitem(block_size.BLOCK_TOKENS, "cpu", 12 * 8)  # twelve windows
    monkeypatch.setattr(graph_cache, "compiled_layers", lambda model: torch.no_grad())
    lengths = [250, 97, 61, 60, 44, 31, 30, 28, 17, 16, 9, 8, 7, 2]
    documents = [tiny.documents(1, length, seed)[0].tolist() for seed, length in enumerate(lengths)]
    plain, fast = model_pair(name, **KV)
    fast.fast_path = path
    for _ in range(2):
        for use_state in (True, False):
            expected, out = (cf.perplexity(model, documents, batch_size=6, use_state=use_state).nats
                             for model in (plain, fast))  # fmt: skip
            assert out == pytest.approx(expected, rel=1e-5)
    assert fast.graph_cache._replays
    assert len(graphs_of(fast, cuda_graphs.CapturedForward)) <= 12


@pytest.mark.parametrize("use_state", [True, False])
def test_the_end_of_a_document_is_soon_captured_too(use_state, captures, monkeypatch):
    """With and without a state: what counts is how many windows of it have run, not how many calls."""
    monkeypatch.setitem(block_size.BLOCK_TOKENS, "cpu", 12 * 8)
    monkeypatch.setattr(graph_cache, "CAPTURE_AFTER", 16)
    model = tiny.recurrent("gpt2", **KV)
    document = tiny.documents(1, 233)[0].tolist()  # two blocks, and three windows
    eager, run_window = [], type(model).run_window
    monkeypatch.setattr(
        type(model), "run_window", lambda self, window: eager.append(len(window.ids)) or run_window(self, window)
    )
    for _ in range(6):
        cf.perplexity(model, [document], use_state=use_state)
    assert 3 in eager
    eager.clear()
    cf.perplexity(model, [document], use_state=use_state)
    assert not eager


def test_room_is_shared_by_blocks_of_similar_sizes():
    room = shared_room(Sizes(3, 20, 0, 3), rows=32)
    assert room == Sizes(4, 28, 0, 4)
    assert Sizes(1, 28, 0, 2).fit(room)
    assert not Sizes(5, 20, 0, 3).fit(room)
    assert not Sizes(0, 20, 0, 3).fit(room), "without first windows nothing is computed for them"
    assert not Sizes(3, 20, 1, 3).fit(room)
    assert list(Sizes(3, 20, 0, 3).places(room)) == [(slice(0, 3), slice(0, 3)), (slice(4, 24), slice(3, 23))]


@GPU
@pytest.mark.parametrize("path", ["off", "auto", "compiled"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "bert", "modernbert"])
def test_blocks_in_bfloat16_are_as_exact_as_single_eager_windows(name, path, monkeypatch):
    """Against float32: gradients of captured blocks are no further off than those of eager single windows."""
    monkeypatch.setattr(graph_cache, "CAPTURE_AFTER", 1)

    def gradients(block, path, dtype):
        model = tiny.recurrent(name, block_windows=block, **KV).cuda()
        model.fast_path = path
        for _ in range(3):
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = model(IDS.cuda(), attention_mask=masks()[1].cuda(), labels=IDS.cuda()).loss
            loss.backward()
            found = tiny.gradients(model)
        assert path == "off" or model.graph_cache._replays
        return torch.cat([gradient.flatten() for gradient in found.values()])

    exact = gradients(1, "off", torch.float32)
    errors = [(gradients(block, how, torch.bfloat16) - exact).norm() for block, how in ((1, "off"), (3, path))]
    assert errors[1] <= 1.25 * errors[0] + 1e-3 * exact.norm()
    assert_close(gradients(3, path, torch.float32), exact, rtol=1e-3, atol=1e-4)


@GPU
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_compiled_blocks_of_many_sizes_score_like_eager_ones(name, monkeypatch):
    monkeypatch.setitem(block_size.BLOCK_TOKENS, "cuda", 12 * 8)
    documents = [tiny.documents(1, length, length)[0].tolist() for length in (250, 97, 61, 60, 44, 31, 29, 17, 9, 3)]
    plain, fast = (model.cuda() for model in model_pair(name, **KV))
    fast.fast_path = "compiled"
    for _ in range(2):
        for use_state in (True, False):
            expected, out = (cf.perplexity(model, documents, batch_size=4, use_state=use_state).nats
                             for model in (plain, fast))  # fmt: skip
            assert out == pytest.approx(expected, rel=1e-4)
    assert fast.graph_cache._replays
