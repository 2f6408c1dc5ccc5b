# SPDX-License-Identifier: Apache-2.0
"""Attention with extra keys and values: implementations agree, and the base model's own attention is unchanged."""

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
    loaded = type(model).from_pretrained(tmp_path, attn_implementation=implementation)
    assert loaded.base.config._attn_implementation == implementation
    assert_close(loaded(IDS).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory", [{"recent": 11}, {"recent": 3, "right": 4, "group_windows": 3}], ids=str)
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_they_agree_where_some_positions_are_hidden_and_no_window_is_padded(name, memory):
    model = tiny.recurrent(name, overlap=0, memory=cf.KVMemoryConfig(**memory, sinks=1))
    ids = tiny.documents(2, 32)
    expected = model(ids).logits
    model.base.set_attn_implementation("eager")
    assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_the_base_model_called_alone_is_unchanged(name):
    model, plain = tiny.recurrent(name, slots=0, recent=3, sinks=1), tiny.base(name)
    ids = tiny.documents(2, 16)
    model(ids)
    assert_close(model.base(ids).logits, plain(ids).logits)
    second = cf.add_recurrence(model.base, window=8, memory="vector")  # its attention is wrapped already
    assert_close(second(ids, use_state=False).logits[:, :8], plain(ids[:, :8]).logits, rtol=1e-4, atol=1e-5)


def test_attention_that_is_computed_differently_is_refused():
    """GPT-2's variant runs only under the name "eager", which a wrapper does not have."""
    base = tiny.base("gpt2", reorder_and_upcast_attn=True)
    with pytest.raises(ValueError, match="reorder_and_upcast_attn=True: use False"):
        cf.add_recurrence(base, window=8, documents=tiny.TEXT)
    model = cf.add_recurrence(tiny.base("gpt2"), window=8, documents=tiny.TEXT)
    model.base.config.reorder_and_upcast_attn = True
    with pytest.raises(ValueError, match="reorder_and_upcast_attn=True: use False"):
        model(tiny.documents(1, 20))
