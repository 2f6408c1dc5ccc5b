# SPDX-License-Identifier: Apache-2.0
"""The fast path on a GPU, with real CUDA graphs."""

import pytest
import torch
from helpers import tiny
from helpers.fast_path import (
    GPU,
    IDS,
    CharacterTokenizer,
    assert_same_answers,
    model_pair,
    qa_forward,
    qa_pair,
    qa_step,
    step,
)
from torch.testing import assert_close

import carryforward as cf
from carryforward.engine import graph_cache
from carryforward.models.headless import without_head


@GPU
def test_states_can_be_offloaded_to_the_host():
    results = []
    for offload in (False, True):
        model = tiny.recurrent("gpt2", keep_windows=0, offload_states=offload).cuda()
        results.append(step(model, IDS.cuda())[1])
    tiny.assert_same_gradients(*results)


@GPU
@pytest.mark.parametrize("path", ["auto", "compiled"])
@pytest.mark.parametrize(
    "fields", [{"keep_windows": 0}, {"keep_windows": 3}, {"slots": 0, "recent": 4, "sinks": 1}], ids=str
)
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_language_models_train_like_eager_ones(name, fields, path, monkeypatch):
    monkeypatch.setattr(graph_cache, "CAPTURE_AFTER", 1)
    plain, fast = (model.cuda() for model in model_pair(name, training=True, **fields))
    fast.fast_path = path
    for seed in range(3):
        ids = tiny.documents(3, 45, seed).cuda()
        expected, eager = step(plain, ids, seed)
        out, captured = step(fast, ids, seed)
        assert_close(out.loss, expected.loss, rtol=1e-4, atol=1e-5)
        tiny.assert_same_gradients(eager, captured, 1e-4)
    assert fast.graph_cache._replays, "nothing was replayed"


@GPU
@pytest.mark.parametrize("fields", [{"slots": 2, "insert_at": "all"}, {"slots": 0, "recent": 4, "sinks": 1}], ids=str)
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_captured_steps_generate_like_eager_ones(name, fields):
    results = []
    for path in ("off", "auto"):
        model = tiny.recurrent(name, **fields).cuda()
        model.fast_path = path
        settings = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        results.append(model.generate(IDS[:, :11].cuda(), output_logits=True, return_dict_in_generate=True, **settings))
    eager, captured = results
    assert captured.past_key_values._decode_graph is not None, "no step was captured"
    assert eager.past_key_values._decode_graph is None
    assert_close(torch.stack(captured.logits), torch.stack(eager.logits), rtol=1e-4, atol=1e-4)
    assert captured.sequences.equal(eager.sequences)


@GPU
@pytest.mark.parametrize("path", ["auto", "compiled"])
@pytest.mark.parametrize("fields", [{"keep_windows": 0}, {"keep_windows": 2}, {"keep_windows": "auto"},
                                    {"slots": 0, "recent": 3, "sinks": 1, "window": 16}], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
def test_question_answering_trains_like_an_eager_model(name, fields, path, monkeypatch):
    """Windows are captured in the forward call and, if they are recomputed, in the backward pass."""
    monkeypatch.setattr(graph_cache, "CAPTURE_AFTER", 1)
    plain, fast = (model.cuda() for model in qa_pair(name, training=True, **fields))
    fast.fast_path = path
    for seed in range(4):
        (expected, eager), (out, captured) = (qa_step(model, seed, device="cuda") for model in (plain, fast))
        assert_same_answers(out, expected, 1e-4)
        tiny.assert_same_gradients(eager, captured, 1e-4)
    first, second = qa_forward(fast, 1, device="cuda"), qa_forward(fast, 2, device="cuda")
    (first.loss + second.loss).backward()
    captured = tiny.gradients(fast)
    (qa_forward(plain, 1, device="cuda").loss + qa_forward(plain, 2, device="cuda").loss).backward()
    tiny.assert_same_gradients(tiny.gradients(plain), captured, 1e-4)
    assert fast.fast_path == path, "a capture failed"
    assert fast.graph_cache._replays > 8


@GPU
def test_question_answering_trains_under_autocast(monkeypatch):
    monkeypatch.setattr(graph_cache, "CAPTURE_AFTER", 1)
    plain, fast = (model.cuda() for model in qa_pair("bert", keep_windows=2))
    for seed in range(4):
        results = []
        for model in (plain, fast):
            with torch.autocast("cuda", torch.bfloat16):
                out = qa_forward(model, seed, device="cuda")
            out.loss.backward()
            results.append((out.loss, tiny.gradients(model)))
        assert_close(results[0][0], results[1][0], rtol=2e-2, atol=2e-2)
        tiny.assert_same_gradients(results[0][1], results[1][1], 2e-2)
    assert fast.fast_path == "auto", "a capture failed"
    assert fast.graph_cache._replays


@GPU
@pytest.mark.parametrize("path", ["auto", "compiled"])
@pytest.mark.parametrize("settings", [{}, {"pooling": "state"}, {"output": "tokens", "overlap": 4}], ids=str)
@pytest.mark.parametrize("name", ["bert", "modernbert", "gpt2"])
def test_documents_are_encoded_like_eagerly(name, settings, path, monkeypatch):
    monkeypatch.setattr(graph_cache, "CAPTURE_AFTER", 1)
    texts = ["recurrence " * n for n in (9, 3, 8, 9, 1, 6, 9, 9)]
    plain, fast = (without_head(model.cuda()) for model in model_pair(name))
    fast.fast_path = path
    results = [cf.encode(model, texts, CharacterTokenizer(), batch_size=3, **settings) for model in (plain, fast)]
    for expected, out in zip(*results, strict=True):
        if "output" in settings:
            expected, out = expected.vectors, out.vectors
        assert_close(torch.from_numpy(out), torch.from_numpy(expected), rtol=1e-3, atol=1e-4)
    assert fast.fast_path == path, "a capture failed"
    assert fast.graph_cache._replays > 10
