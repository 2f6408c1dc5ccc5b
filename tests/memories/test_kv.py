# SPDX-License-Identifier: Apache-2.0
"""Which keys and values are carried from window to window."""

import pytest
import torch
from helpers import tiny
from helpers.tiny import untrained
from torch.testing import assert_close


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_sinks_are_the_first_positions_of_the_document(name):
    model = untrained(name, recent=2, sinks=2)
    first, second, rest = tiny.documents(1, 8, 0), tiny.documents(1, 8, 2), tiny.documents(1, 16, 1)

    def sinks(*pieces):
        return model.advance_state(torch.cat(pieces, dim=1)).memory["kv"][..., :2, :]

    assert not sinks(first, rest).equal(sinks(second, rest))
    assert sinks(first, rest).equal(sinks(first, second, rest))


def test_a_short_document_carries_its_own_positions_in_a_batch():
    model, ids = tiny.recurrent("gpt2", slots=0, recent=3, sinks=3), tiny.documents(2, 6)
    mask = torch.tensor([[1] * 6, [1] * 2 + [0] * 4])
    together = model.advance_state(ids, attention_mask=mask, final=True)
    alone = model.advance_state(ids[1:, :2], final=True)
    assert_close(together[[1]].memory["kv"], alone.memory["kv"])
