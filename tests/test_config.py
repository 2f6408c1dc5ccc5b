# SPDX-License-Identifier: Apache-2.0
"""Presets of a recurrence."""

import pytest

import carryforward as cf


def test_presets():
    assert cf.RecurrenceConfig.preset("paper", window=64) == cf.RecurrenceConfig(window=64)
    kept = cf.RecurrenceConfig.preset("kept")
    assert (kept.window, kept.slots, kept.kept, kept.sinks) == (300, 0, 146, 4)
    assert cf.RecurrenceConfig.preset("kept", window=64, overlap=48).kept == 12
    other = cf.RecurrenceConfig.preset("kept", window=64, sinks=0, slots=2)
    assert (other.kept, other.sinks, other.slots) == (32, 0, 2)
    small = cf.RecurrenceConfig.preset("kept", window=4)
    assert (small.kept, small.sinks) == (1, 1)
    framed = cf.RecurrenceConfig.preset("kept", window=300, overlap=200, prefix=(1,), suffix=(2,))
    assert (framed.kept, framed.sinks) == (94, 4)
    with pytest.raises(ValueError, match="sinks='x' must be an integer"):
        cf.RecurrenceConfig.preset("kept", sinks="x")
    with pytest.raises(ValueError, match="kept=0 would carry nothing. Leave kept out, or use 'paper'"):
        cf.RecurrenceConfig.preset("kept", kept=0)
    with pytest.raises(ValueError, match=r"sinks=150 leaves nothing of the half window \(150\) to keep"):
        cf.RecurrenceConfig.preset("kept", sinks=150)
    with pytest.raises(ValueError, match="insert_at, pooling is about what is pooled.*: give slots as well"):
        cf.RecurrenceConfig.preset("kept", insert_at=6, pooling="max")
    assert cf.RecurrenceConfig.preset("kept", insert_at=6, slots=1).insert_at == 6
    with pytest.raises(ValueError, match="no preset 'best'. There are: 'paper', 'kept'"):
        cf.RecurrenceConfig.preset("best")
    with pytest.raises(ValueError, match="Did you mean 'window'"):
        cf.RecurrenceConfig.preset("kept", windw=4)
