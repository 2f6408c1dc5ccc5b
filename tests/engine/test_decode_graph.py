# SPDX-License-Identifier: Apache-2.0
"""A captured decoding step generates what an eager one does."""

import copy

import pytest
import torch
from helpers import tiny
from helpers.fast_path import IDS, RAGGED, model_pair
from torch.testing import assert_close

from carryforward.models.generation import window_cache

VECTORS = {"slots": 2, "insert_at": "all"}
CASES = [(name, overlap, VECTORS) for name in tiny.CAUSAL for overlap in (0, 2, 5)]
CASES += [("gpt2", 2, tiny.TOKENS), ("gemma3_text", 0, tiny.TOKENS), ("llama", 2, tiny.ASSOCIATIVE)]


@pytest.mark.parametrize(("name", "overlap", "fields"), CASES, ids=str)
def test_captured_steps_equal_eager_ones(name, overlap, fields, captures, monkeypatch):
    monkeypatch.setattr(window_cache, "CAPTURE_AFTER", 2)
    plain, fast = model_pair(name, **fields)
    prompt, mask = IDS[:, :11], RAGGED[:, :11].flip(1)
    settings = {"attention_mask": mask, "max_new_tokens": 40, "overlap": overlap, "do_sample": False}
    settings |= {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0, "eos_token_id": None}
    expected, out = plain.generate(prompt, **settings), fast.generate(prompt, **settings)
    assert len(captures) == (3 if "memory" in fields else 1), "a step; and windows that are read again, if they must be"
    assert_close(torch.stack(out.logits), torch.stack(expected.logits))
    assert out.sequences.equal(expected.sequences)
    for kind, state in expected.past_key_values.state.memory.items():
        assert_close(out.past_key_values.state.memory[kind], state)


def test_rows_may_end_before_others(captures, monkeypatch):
    monkeypatch.setattr(window_cache, "CAPTURE_AFTER", 2)
    plain, fast = model_pair("gpt2")
    free = plain.generate(IDS[:, :11], max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=None)
    end = int(free[0, 20])  # the first row ends here at the latest
    settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    settings |= {"return_dict_in_generate": True}
    expected, out = plain.generate(IDS[:, :11], **settings), fast.generate(IDS[:, :11], **settings)
    assert out.sequences.equal(expected.sequences)
    state, expected_state = out.past_key_values.state, expected.past_key_values.state
    for name in ("memory", "read", "pending"):
        assert_close(getattr(state, name), getattr(expected_state, name))
    assert captures


def test_beam_search_is_not_captured(captures, monkeypatch):
    monkeypatch.setattr(window_cache, "CAPTURE_AFTER", 2)
    plain, fast = model_pair("gpt2")
    settings = {"max_new_tokens": 30, "num_beams": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert fast.generate(IDS[:, :11], **settings).equal(plain.generate(IDS[:, :11], **settings))
    assert not captures


def test_a_copy_of_a_cache_is_independent(captures, monkeypatch):
    monkeypatch.setattr(window_cache, "CAPTURE_AFTER", 2)
    plain, fast = model_pair("gpt2")
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    results = []
    for model in (plain, fast):
        cache = model.generate(IDS[:, :11], return_dict_in_generate=True, **settings).past_key_values
        copied = copy.deepcopy(cache)
        for column in (5, 6, 7, 8):
            logits = model(torch.full((3, 1), column), past_key_values=cache).logits
            results.append((logits, model(torch.full((3, 1), column), past_key_values=copied).logits))
    for (a, b), (c, d) in zip(results[:4], results[4:], strict=True):
        assert_close(a, b)
        assert_close(a, c)
        assert_close(a, d)
    assert captures


def test_a_step_captured_under_autocast_uses_changed_weights(captures, monkeypatch):
    """Weights that were cast before the capture would not be cast again."""
    monkeypatch.setattr(window_cache, "CAPTURE_AFTER", 2)
    results = []
    for model in model_pair("gpt2"):
        settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.autocast("cpu", torch.bfloat16):
            cache = model.generate(IDS[:, :9], return_dict_in_generate=True, **settings).past_key_values
            with torch.no_grad():
                model.base.transformer.h[0].mlp.c_fc.weight.mul_(1.5)
            torch.clear_autocast_cache()
            results.append(model(IDS[:, :1], past_key_values=cache).logits)
    assert_close(*results)
    assert captures
