# SPDX-License-Identifier: Apache-2.0
"""Keys and values that are carried from window to window."""

import pytest
import torch
from helpers import tiny
from helpers.tiny import untrained
from torch.testing import assert_close


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_sinks_are_those_of_the_document(name):
    model = untrained(name, kept=2, sinks=2)
    first, later, other = tiny.documents(1, 8, 0), tiny.documents(1, 16, 1), tiny.documents(1, 8, 2)
    one, two = (model.advance_state(torch.cat([begin, later], 1)) for begin in (first, other))
    assert not one.kept[..., :2, :].equal(two.kept[..., :2, :])
    assert one.kept[..., :2, :].equal(model.advance_state(torch.cat([first, other, later], 1)).kept[..., :2, :])


def test_a_short_document_beside_a_longer_one_keeps_its_own():
    model, ids = tiny.recurrent("gpt2", slots=0, kept=3, sinks=3), tiny.documents(2, 6)
    mask = torch.tensor([[1] * 6, [1] * 2 + [0] * 4])
    together = model.advance_state(ids, attention_mask=mask, final=True)
    alone = model.advance_state(ids[1:, :2], final=True)
    assert_close(together[[1]].kept, alone.kept)
