# SPDX-License-Identifier: Apache-2.0
"""Attention with extra keys and values: implementations agree, and the base model stays as it was."""

import pytest
from helpers import tiny
from torch.testing import assert_close

import carryforward as cf

IDS = tiny.documents(2, 37)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", list(tiny.CONFIGS))
def test_attention_implementations_agree(name, implementation, tmp_path):
    model = tiny.recurrent(name)
    expected = model(IDS).logits
    model.set_attn_implementation(implementation)
    assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation=implementation)
    assert again.base.config._attn_implementation == implementation
    assert_close(again(IDS).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_the_base_model_is_still_the_base_model(name):
    model, plain = tiny.recurrent(name, slots=0, kept=3, sinks=1), tiny.base(name)
    ids = tiny.documents(2, 16)
    model(ids)
    assert_close(model.base(ids).logits, plain(ids).logits)
    again = cf.add_recurrence(model.base, window=8)  # whose attention has a door now
    assert_close(again(ids, use_state=False).logits[:, :8], plain(ids[:, :8]).logits, rtol=1e-4, atol=1e-5)


def test_an_attention_that_would_be_another_one():
    model = tiny.recurrent("gpt2", kept=4, settings={"reorder_and_upcast_attn": True})
    with pytest.raises(ValueError, match="reorder_and_upcast_attn"):
        model(tiny.documents(1, 20))
