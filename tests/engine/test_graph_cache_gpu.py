# SPDX-License-Identifier: Apache-2.0
"""The fast path on a GPU, with real CUDA graphs."""

import pytest
import torch
from helpers import tiny
from helpers.fast_path import GPU, IDS, Letters, answers, asked, assert_same_answers, both, learn, step
from torch.testing import assert_close

import carryforward as cf
from carryforward.embeddings import encode
from carryforward.engine import graph_cache


@GPU
def test_states_that_wait_in_the_hosts_memory():
    results = []
    for offload in (False, True):
        model = tiny.recurrent("gpt2", keep_windows=0, offload_states=offload).cuda()
        results.append(step(model, IDS.cuda())[1])
    tiny.assert_same_gradients(*results)


@GPU
@pytest.mark.parametrize("path", ["auto", "compiled"])
@pytest.mark.parametrize(
    "fields", [{"keep_windows": 0}, {"keep_windows": 3}, {"slots": 0, "kept": 4, "sinks": 1}], ids=str
)
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_on_a_gpu(name, fields, path, monkeypatch):
    monkeypatch.setattr(graph_cache, "RECORD_AFTER", 1)
    plain, fast = (model.cuda() for model in both(name, training=True, **fields))
    fast.fast_path = path
    for seed in range(3):
        ids = tiny.documents(3, 45, seed).cuda()
        expected, slow = step(plain, ids, seed)
        out, quick = step(fast, ids, seed)
        assert_close(out.loss, expected.loss, rtol=1e-4, atol=1e-5)
        tiny.assert_same_gradients(slow, quick, 1e-4)
    assert fast.graph_cache._replayed, "nothing was replayed"


@GPU
@pytest.mark.parametrize("fields", [{"slots": 2, "insert_at": "all"}, {"slots": 0, "kept": 4, "sinks": 1}], ids=str)
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_generation_on_a_gpu(name, fields):
    results = []
    for path in ("off", "auto"):
        model = tiny.recurrent(name, **fields).cuda()
        model.fast_path = path
        settings = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        results.append(model.generate(IDS[:, :11].cuda(), output_logits=True, return_dict_in_generate=True, **settings))
    slow, fast = results
    assert fast.past_key_values._recorded is not None, "no step was recorded"
    assert slow.past_key_values._recorded is None
    assert_close(torch.stack(fast.logits), torch.stack(slow.logits), rtol=1e-4, atol=1e-4)
    assert fast.sequences.equal(slow.sequences)


@GPU
@pytest.mark.parametrize("path", ["auto", "compiled"])
@pytest.mark.parametrize("fields", [{"keep_windows": 0}, {"keep_windows": 2}, {"keep_windows": "auto"},
                                    {"slots": 0, "kept": 3, "sinks": 1, "window": 16}], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
def test_answering_on_a_gpu(name, fields, path, monkeypatch):
    """Windows are recorded in the forward call and, where they are run again, in the backward one."""
    monkeypatch.setattr(graph_cache, "RECORD_AFTER", 1)
    plain, fast = (model.cuda() for model in answers(name, training=True, **fields))
    fast.fast_path = path
    for seed in range(4):
        (expected, slow), (out, quick) = (learn(model, seed, device="cuda") for model in (plain, fast))
        assert_same_answers(out, expected, 1e-4)
        tiny.assert_same_gradients(slow, quick, 1e-4)
    first, second = asked(fast, 1, device="cuda"), asked(fast, 2, device="cuda")
    (first.loss + second.loss).backward()
    quick = tiny.gradients(fast)
    (asked(plain, 1, device="cuda").loss + asked(plain, 2, device="cuda").loss).backward()
    tiny.assert_same_gradients(tiny.gradients(plain), quick, 1e-4)
    assert fast.fast_path == path, "a recording failed"
    assert fast.graph_cache._replayed > 8


@GPU
def test_answering_under_autocast_on_a_gpu(monkeypatch):
    monkeypatch.setattr(graph_cache, "RECORD_AFTER", 1)
    plain, fast = (model.cuda() for model in answers("bert", keep_windows=2))
    for seed in range(4):
        found = []
        for model in (plain, fast):
            with torch.autocast("cuda", torch.bfloat16):
                out = asked(model, seed, device="cuda")
            out.loss.backward()
            found.append((out.loss, tiny.gradients(model)))
        assert_close(found[0][0], found[1][0], rtol=2e-2, atol=2e-2)
        tiny.assert_same_gradients(found[0][1], found[1][1], 2e-2)
    assert fast.fast_path == "auto", "a recording failed"
    assert fast.graph_cache._replayed


@GPU
@pytest.mark.parametrize("path", ["auto", "compiled"])
@pytest.mark.parametrize("settings", [{}, {"pooling": "state"}, {"output": "tokens", "overlap": 4}], ids=str)
@pytest.mark.parametrize("name", ["bert", "modernbert", "gpt2"])
def test_encoding_on_a_gpu(name, settings, path, monkeypatch):
    monkeypatch.setattr(graph_cache, "RECORD_AFTER", 1)
    texts = ["recurrence " * n for n in (9, 3, 8, 9, 1, 6, 9, 9)]
    plain, fast = (encode.headless(model.cuda()) for model in both(name))
    fast.fast_path = path
    found = [cf.encode(model, texts, Letters(), batch_size=3, **settings) for model in (plain, fast)]
    for expected, out in zip(*found, strict=True):
        if "output" in settings:
            expected, out = expected.vectors, out.vectors
        assert_close(torch.from_numpy(out), torch.from_numpy(expected), rtol=1e-3, atol=1e-4)
    assert fast.fast_path == path, "a recording failed"
    assert fast.graph_cache._replayed > 10
