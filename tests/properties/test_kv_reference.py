# SPDX-License-Identifier: Apache-2.0
"""Keys and values that are carried from window to window, on tiny models of every supported architecture.

Two independent references: the plain model on the uncut text, and transformers' own cache, cut by hand.
"""

import pytest
import torch
from helpers import tiny
from helpers.tiny import LEARNED, untrained
from torch.testing import assert_close
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import carryforward as cf


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("overlap", "kept", "sinks"), [(0, 8, 0), (0, 7, 1), (3, 5, 0), (3, 3, 2)])
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_two_windows_that_keep_everything_are_one_text(name, overlap, kept, sinks, attention):
    model = untrained(name, overlap=overlap, kept=kept, sinks=sinks)
    model.base.set_attn_implementation(attention)
    ids = tiny.documents(2, 16 - overlap)
    expected = model.base(ids).logits
    assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert (model(ids, use_state=False).logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize("rope", ["longrope", "dynamic", "yarn"])
def test_rotations_that_depend_on_the_length(rope):
    more = {"longrope": {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}}.get(rope, {})
    settings = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 6, **more}
    base = LlamaForCausalLM(LlamaConfig(**{**tiny._grouped, "max_position_embeddings": 24}, rope_parameters=settings))
    model = cf.add_recurrence(base.eval(), window=8, slots=0, kept=8)
    ids = tiny.documents(1, 16)
    expected = model.base(ids).logits
    for _ in range(2):  # nothing may depend on what was run before
        assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "overlap", "kept", "sinks"),
    [
        (name, *fields)
        for name in tiny.CAUSAL
        for fields in ((0, 3, 0), (0, 8, 0), (0, 3, 2), (2, 4, 1))
        if name in LEARNED or not fields[2]  # rotary sinks are turned: two windows that are one text show how
    ],
)
def test_transformers_own_cache_cut_by_hand(name, overlap, kept, sinks):
    model, seen = untrained(name, overlap=overlap, kept=kept, sinks=sinks), kept + sinks
    ids, places, learned = tiny.documents(2, 8 + 4 * (8 - overlap)), None, name in LEARNED
    if learned:
        places = torch.nn.init.normal_(model.recurrence.keeping.places, generator=torch.Generator().manual_seed(0))
    cache, expected, ahead = DynamicCache(), [], 8 - overlap
    for window in range(5):
        # rotations see differences of positions only; learned positions begin behind what is kept
        begin = min(ahead * window, seen) if learned else ahead * window
        part = ids[:, ahead * window : ahead * window + 8]
        position = torch.arange(begin, begin + 8)[None]
        out = model.base(part, past_key_values=cache, position_ids=position, attention_mask=_seen(cache, 8))
        expected.append(out.logits[:, overlap if window else 0 :])
        cache = DynamicCache()
        for layer, old in enumerate(out.past_key_values.layers):
            both = []
            for side, every in enumerate((old.keys, old.values)):
                own = every[:, :, -8:][:, :, ahead - kept : ahead]
                if learned:
                    stood = begin + ahead - kept
                    move = [places[layer, side, :, at : at + kept] for at in (sinks, stood)]
                    own = own + move[0] - move[1]
                first = every[:, :, :sinks]  # of the document: in the first window, and then of what was kept
                both.append(torch.cat([first, own], dim=2))
            cache.update(*both, layer)
    assert_close(model(ids).logits, torch.cat(expected, dim=1), rtol=1e-4, atol=1e-4)


def _seen(cache, queries):
    """Everything in the cache, and what is not ahead."""
    before = cache.get_seq_length()
    return torch.ones(queries, before + queries).tril(before).bool()[None, None].expand(2, 1, -1, -1)


@pytest.mark.parametrize("name", [name for name in LEARNED if name in tiny.ENCODERS])
def test_an_encoder_of_one_layer_that_keeps_everything(name):
    """Its keys and values depend on their own tokens alone, so the second window sees what it would in one text."""
    body = tiny.base(name, "none", num_hidden_layers=1, n_layers=1)
    model = cf.add_recurrence(body, window=9, slots=0, kept=7, sinks=1, prefix=(2,), suffix=())
    ids = tiny.documents(2, 16)
    whole = body(torch.cat([torch.full((2, 1), 2), ids], dim=1)).last_hidden_state[:, 1:]
    assert_close(model(ids, final=True).last_hidden_state[:, 8:], whole[:, 8:], rtol=1e-4, atol=1e-5)
