# SPDX-License-Identifier: Apache-2.0
"""The cache of generation: its buffers, and what it cannot do."""

import pytest
import torch
from helpers import tiny
from helpers.generation import WINDOW, written

from carryforward.models.window_cache import WindowCache


def test_buffers_stay_where_they_are():
    model = tiny.recurrent("gpt2")
    _, cache = written(model, tiny.documents(2, 12), [3, 5])

    def places():
        tensors = [*cache.keys.values(), *cache.values.values(), cache._mixed, cache._tokens]
        return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]

    before = places()
    for column in tiny.documents(2, 10 * WINDOW).split(1, dim=1):
        model(column, past_key_values=cache)
    assert places() == before
    assert not any(tensor.requires_grad for tensor in (*cache.keys.values(), cache._mixed)), "no graph grows"


def test_transformers_may_not_read_ahead():
    """On some devices it looks whether all rows have ended one step late, and would crop the cache."""
    cache = WindowCache(tiny.recurrent("gpt2").fresh_state(1), 2)
    assert not cache.is_croppable
    assert not cache.is_compileable


@pytest.mark.parametrize(
    "change", [("reset",), ("crop", 2), ("batch_repeat_interleave", 2), ("batch_select_indices", torch.tensor([0]))]
)
def test_a_cache_says_what_it_cannot_do(change):
    cache = WindowCache(tiny.recurrent("gpt2").fresh_state(1), 2)
    with pytest.raises(NotImplementedError, match="begin another generation"):
        getattr(cache, change[0])(*change[1:])
