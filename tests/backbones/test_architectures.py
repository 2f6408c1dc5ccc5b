# SPDX-License-Identifier: Apache-2.0
"""How many positions the base models have."""

import logging

import pytest
from helpers import tiny

import carryforward as cf


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "camembert"])
def test_positions_start_after_the_padding_id(name):
    assert cf.add_recurrence(tiny.base(name), window=38, prefix=(), memory="vector").config.recurrence.window == 38
    with pytest.raises(ValueError, match="window=39 exceeds the 38 learned positions that"):
        cf.add_recurrence(tiny.base(name), window=39, prefix=(), memory="vector")


def test_a_window_longer_than_rotary_positions_only_warns(caplog):
    with caplog.at_level(logging.WARNING):
        model = cf.add_recurrence(tiny.base("llama"), window=50, memory="vector")
    assert "window=50 exceeds the 40 positions that llama was trained on" in caplog.text
    ids = tiny.documents(1, 120)
    assert model(ids, labels=ids).loss.isfinite()
