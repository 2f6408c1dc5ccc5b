# SPDX-License-Identifier: Apache-2.0
"""Generation by a captured step writes what generation without one does."""

import copy

import pytest
import torch
from helpers import tiny
from helpers.fast_path import IDS, RAGGED, both
from torch.testing import assert_close

from carryforward.models import window_cache


@pytest.mark.parametrize("overlap", [0, 2, 5])
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_recorded_steps_write_what_others_do(name, overlap, recordings, monkeypatch):
    monkeypatch.setattr(window_cache, "RECORD_AFTER", 2)
    plain, fast = both(name, slots=2, insert_at="all")
    prompt, mask = IDS[:, :11], RAGGED[:, :11].flip(1)
    settings = {"attention_mask": mask, "max_new_tokens": 40, "overlap": overlap, "do_sample": False}
    settings |= {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0, "eos_token_id": None}
    expected, found = plain.generate(prompt, **settings), fast.generate(prompt, **settings)
    assert len(recordings) == 1
    assert_close(torch.stack(found.logits), torch.stack(expected.logits))
    assert found.sequences.equal(expected.sequences)
    assert_close(found.past_key_values.state.carried, expected.past_key_values.state.carried)


def test_rows_that_end_before_others(recordings, monkeypatch):
    monkeypatch.setattr(window_cache, "RECORD_AFTER", 2)
    plain, fast = both("gpt2")
    free = plain.generate(IDS[:, :11], max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=None)
    end = int(free[0, 20])  # the first row ends here at the latest
    settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    settings |= {"return_dict_in_generate": True}
    expected, found = plain.generate(IDS[:, :11], **settings), fast.generate(IDS[:, :11], **settings)
    assert found.sequences.equal(expected.sequences)
    for name in ("carried", "read", "pending"):
        assert_close(getattr(found.past_key_values.state, name), getattr(expected.past_key_values.state, name))
    assert recordings


def test_beams_are_not_recorded(recordings, monkeypatch):
    monkeypatch.setattr(window_cache, "RECORD_AFTER", 2)
    plain, fast = both("gpt2")
    settings = {"max_new_tokens": 30, "num_beams": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert fast.generate(IDS[:, :11], **settings).equal(plain.generate(IDS[:, :11], **settings))
    assert not recordings


def test_a_copy_of_a_cache_goes_on_by_itself(recordings, monkeypatch):
    monkeypatch.setattr(window_cache, "RECORD_AFTER", 2)
    plain, fast = both("gpt2")
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = []
    for model in (plain, fast):
        cache = model.generate(IDS[:, :11], return_dict_in_generate=True, **settings).past_key_values
        other = copy.deepcopy(cache)
        for column in (5, 6, 7, 8):
            logits = model(torch.full((3, 1), column), past_key_values=cache).logits
            found.append((logits, model(torch.full((3, 1), column), past_key_values=other).logits))
    for (a, b), (c, d) in zip(found[:4], found[4:], strict=True):
        assert_close(a, b)
        assert_close(a, c)
        assert_close(a, d)
    assert recordings


def test_a_step_under_autocast(recordings, monkeypatch):
    """Weights that were cast outside a recording would stay as they were."""
    monkeypatch.setattr(window_cache, "RECORD_AFTER", 2)
    results = []
    for model in both("gpt2"):
        settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.autocast("cpu", torch.bfloat16):
            cache = model.generate(IDS[:, :9], return_dict_in_generate=True, **settings).past_key_values
            with torch.no_grad():
                model.base.transformer.h[0].mlp.c_fc.weight.mul_(1.5)
            torch.clear_autocast_cache()
            results.append(model(IDS[:, :1], past_key_values=cache).logits)
    assert_close(*results)
    assert recordings
