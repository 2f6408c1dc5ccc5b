# SPDX-License-Identifier: Apache-2.0
"""The cache of generation: its buffers, and the operations it refuses."""

import pytest
import torch
from helpers import tiny
from helpers.generation import WINDOW, decode
from torch.testing import assert_close

from carryforward import KVMemoryConfig
from carryforward.models.generation.window_cache import WindowCache


def test_buffers_stay_in_place():
    model = tiny.recurrent("gpt2")
    _, cache = decode(model, tiny.documents(2, 12), [3, 5])

    def buffers():
        return [*cache.kv.values(), cache._features["vector"], cache._tokens]

    def addresses():
        return [(tensor.data_ptr(), tensor.shape) for tensor in buffers()]

    before = addresses()
    for column in tiny.documents(2, 10 * WINDOW).split(1, dim=1):
        model(column, past_key_values=cache)
    assert addresses() == before
    assert not any(tensor.requires_grad for tensor in buffers()), "no graph grows"


def test_transformers_does_not_read_ahead():
    """On some devices it checks one step late whether all rows have ended, and would crop the cache."""
    cache = WindowCache(tiny.recurrent("gpt2").fresh_state(1), 2)
    assert not cache.is_croppable
    assert not cache.is_compileable


@pytest.mark.parametrize(
    "change", [("reset",), ("crop", 2), ("batch_repeat_interleave", 2), ("batch_select_indices", torch.tensor([0]))]
)
def test_operations_that_a_cache_cannot_do_are_refused(change):
    cache = WindowCache(tiny.recurrent("gpt2").fresh_state(1), 2)
    with pytest.raises(
        NotImplementedError, match="cannot be reset, cropped, repeated or indexed: start another generation"
    ):
        getattr(cache, change[0])(*change[1:])


@pytest.mark.parametrize("memory", [None, KVMemoryConfig(recent=3, sinks=1)], ids=["vector", "kv"])
@pytest.mark.parametrize("lengths", [[3, 3], [3, 5], [9, 3]], ids=["together", "apart", "one with a state"])
def test_attention_sees_only_what_is_filled(lengths, memory):
    """Places that were not filled in this window hold no information: other values there change nothing."""
    model = tiny.recurrent("gpt2", **({"memory": memory} if memory else {}))
    ids = tiny.documents(2, 30)
    expected, cache = decode(model, ids[:, :12], lengths)[1], decode(model, ids[:, :12], lengths)[1]
    for column in ids[:, 12:].split(1, dim=1):
        _spoil_unfilled(cache)
        logits = model(column, past_key_values=cache).logits
        assert_close(logits, model(column, past_key_values=expected).logits)


def _spoil_unfilled(cache):
    for layer, buffer in cache.kv.items():
        first = cache._state_columns[layer + 1]
        for row, position in enumerate(cache.positions):
            buffer[row, :, :, first + position :] = 1e3
            if not cache._sees_state(row):
                buffer[row, :, :, :first] = 1e3


def test_rows_at_one_position_need_no_mask(monkeypatch):
    """A mask is made only where a query must not see a place that another one sees."""
    made = []
    model = tiny.recurrent("gpt2")
    architecture = type(model.config.architecture)
    cache_masks = architecture.cache_masks
    monkeypatch.setattr(architecture, "cache_masks", lambda *args: made.append(cache_masks(*args)) or made[-1])
    for lengths, masked in (([3, 3], False), ([3, 5], True)):
        _, cache = decode(model, tiny.documents(2, 5), lengths)
        made.clear()
        model(tiny.documents(2, 1), past_key_values=cache)
        assert [mask is not None for mask in made[0]] == [masked] * len(made[0])
