# SPDX-License-Identifier: Apache-2.0
"""The cache of generation: its buffers, and the operations it refuses."""

import pytest
import torch
from helpers import tiny
from helpers.generation import WINDOW, decode

from carryforward.models.window_cache import WindowCache


def test_buffers_stay_in_place():
    model = tiny.recurrent("gpt2")
    _, cache = decode(model, tiny.documents(2, 12), [3, 5])

    def buffers():
        return [*cache.keys.values(), *cache.values.values(), cache._features["vector"], cache._tokens]

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
