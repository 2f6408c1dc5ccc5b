# SPDX-License-Identifier: Apache-2.0
"""What the table of architectures says of positions."""

import logging

import pytest
from helpers import tiny

import carryforward as cf


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "camembert"])
def test_positions_that_start_after_the_padding_id(name):
    assert cf.add_recurrence(tiny.base(name), window=38, prefix=()).config.recurrence.window == 38
    with pytest.raises(ValueError, match="larger than the 38 learned positions"):
        cf.add_recurrence(tiny.base(name), window=39, prefix=())


def test_a_window_beyond_rotary_positions_is_only_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        model = cf.add_recurrence(tiny.base("llama"), window=50)
    assert "larger than the 40 positions llama was trained on" in caplog.text
    ids = tiny.documents(1, 120)
    assert model(ids, labels=ids).loss.isfinite()
