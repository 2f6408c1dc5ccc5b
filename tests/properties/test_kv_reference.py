# SPDX-License-Identifier: Apache-2.0
"""Carried keys and values against two references, on tiny models of every supported architecture.

The references are the base model on the whole text, and transformers' own cache, truncated here.
"""

import pytest
import torch
from helpers import tiny
from helpers.tiny import LEARNED, unmeasured, untrained
from torch.testing import assert_close
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import carryforward as cf


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("overlap", "recent", "sinks"), [(0, 8, 0), (0, 7, 1), (3, 5, 0), (3, 3, 2)])
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_two_windows_that_carry_everything_equal_one_text(name, overlap, recent, sinks, attention):
    model = untrained(name, overlap=overlap, recent=recent, sinks=sinks)
    model.base.set_attn_implementation(attention)
    ids = tiny.documents(2, 16 - overlap)
    expected = model.base(ids).logits
    assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert (model(ids, use_state=False).logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize("rope", ["longrope", "dynamic", "yarn"])
def test_rotations_may_depend_on_the_length(rope):
    extra = {"longrope": {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}}.get(rope, {})
    settings = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 6, **extra}
    base = LlamaForCausalLM(LlamaConfig(**{**tiny._grouped, "max_position_embeddings": 24}, rope_parameters=settings))
    model = cf.add_recurrence(base.eval(), window=8, memory=cf.KVMemoryConfig(recent=8, sinks=0))
    ids = tiny.documents(1, 16)
    expected = model.base(ids).logits
    for _ in range(2):  # an earlier call must have no effect
        assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "overlap", "recent", "sinks"),
    [
        (name, *fields)
        for name in tiny.CAUSAL
        for fields in ((0, 3, 0), (0, 8, 0), (0, 3, 2), (2, 4, 1))
        if name in LEARNED or not fields[2]  # rotary sinks are re-rotated: see the test with one text
    ],
)
def test_carried_keys_and_values_equal_a_truncated_cache(name, overlap, recent, sinks):
    model, carried = untrained(name, overlap=overlap, recent=recent, sinks=sinks), recent + sinks
    ids, offsets, learned = tiny.documents(2, 8 + 4 * (8 - overlap)), None, name in LEARNED
    if learned:
        offsets = torch.nn.init.normal_(model.memory.kv.position_offsets, generator=torch.Generator().manual_seed(0))
    cache, expected, stride = DynamicCache(), [], 8 - overlap
    for window in range(5):
        # Rotations depend on differences of positions only; learned positions start after what is carried.
        begin = min(stride * window, carried) if learned else stride * window
        part = ids[:, stride * window : stride * window + 8]
        position = torch.arange(begin, begin + 8)[None]
        out = model.base(part, past_key_values=cache, position_ids=position, attention_mask=_visible(cache, 8))
        expected.append(out.logits[:, overlap if window else 0 :])
        cache = DynamicCache()
        for layer, old in enumerate(out.past_key_values.layers):
            both = []
            for side, every in enumerate((old.keys, old.values)):
                newest = every[:, :, -8:][:, :, stride - recent : stride]
                if learned:
                    moves = [offsets[layer, side, :, at : at + recent] for at in (sinks, begin + stride - recent)]
                    newest = newest + moves[0] - moves[1]
                first = every[:, :, :sinks]  # of the document: in the first window, then of what was carried
                both.append(torch.cat([first, newest], dim=2))
            cache.update(*both, layer)
    assert_close(model(ids).logits, torch.cat(expected, dim=1), rtol=1e-4, atol=1e-4)


def _visible(cache, queries):
    """A mask that shows everything in the cache, and the window causally."""
    before = cache.get_seq_length()
    return torch.ones(queries, before + queries).tril(before).bool()[None, None].expand(2, 1, -1, -1)


@pytest.mark.parametrize("name", [name for name in LEARNED if name in tiny.ENCODERS])
def test_an_encoder_of_one_layer_that_carries_everything_equals_one_text(name):
    """Its keys and values depend on their own tokens alone, so the second window sees the same as in one text."""
    base = tiny.base(name, "none", num_hidden_layers=1, n_layers=1)
    fields = {"window": 9, "prefix": (2,), "suffix": (), "memory": cf.KVMemoryConfig(recent=7, sinks=1)}
    model = unmeasured(cf.add_recurrence(base, documents=tiny.TEXT, **fields))
    ids = tiny.documents(2, 16)
    whole = base(torch.cat([torch.full((2, 1), 2), ids], dim=1)).last_hidden_state[:, 1:]
    assert_close(model(ids, final=True).last_hidden_state[:, 8:], whole[:, 8:], rtol=1e-4, atol=1e-5)
