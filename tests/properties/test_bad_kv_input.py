# SPDX-License-Identifier: Apache-2.0
"""Settings, states and documents that a memory of keys and values cannot use are refused in a message."""

import pytest
from helpers import tiny
from helpers.tiny import untrained

import carryforward as cf


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kept": -1}, "kept=-1 must be an integer of at least 0"),
        ({"sinks": 2}, "sinks=2 must be 0 without `kept`"),
        ({"slots": 0}, "slots=0 must be an integer of at least 1 without `kept`"),
        ({"kept": 7, "overlap": 2}, "kept=7 must be at most 6: by so many is a window ahead"),
        ({"kept": 7, "sinks": 2}, "kept=7 must be at most 6: by so many is a window ahead, less `sinks`"),
    ],
)
def test_settings_that_make_no_sense(fields, message):
    with pytest.raises(ValueError, match=message):
        cf.RecurrenceConfig(window=8, **fields)


def test_learned_positions_are_limited():
    with pytest.raises(ValueError, match="window=30 with 12 positions kept in front of it is larger than the 40"):
        cf.add_recurrence(tiny.base("gpt2"), window=30, kept=12)


def test_too_much_overlap_for_what_is_kept():
    with pytest.raises(ValueError, match="the next window is only 3 tokens ahead, and the model keeps the keys and"):
        tiny.recurrent("gpt2", kept=4)(tiny.documents(1, 30), overlap=5)


@pytest.mark.parametrize("other", [{"kept": 3}, {"kept": 4, "settings": {"num_key_value_heads": 2}}], ids=str)
def test_states_of_others_are_refused(other):
    state = tiny.recurrent("llama", kept=4).advance_state(tiny.documents(1, 20))
    with pytest.raises(ValueError, match=r"kept 0\+4 of 1x8"):
        tiny.recurrent("llama", **other)(tiny.documents(1, 20), state=state)


def test_nothing_pooled_is_nothing_to_give_out(tmp_path):
    model = tiny.recurrent("gpt2", slots=0, kept=4)
    with pytest.raises(ValueError, match="pools nothing"):
        cf.encode(model, ["a"], None, pooling="state")


@pytest.mark.parametrize(
    ("documents", "more", "message"),
    [
        (["text"], {}, "documents must be a list of token ids for each text"),
        ((n for n in []), {}, "documents must be a list of token ids for each text"),
        ([[99] * 20], {}, "holds the token id 99"),
        ([[5] * 20], {"rows": 0}, "rows=0 must be at least 1"),
    ],
)
def test_documents_that_are_none(documents, more, message):
    with pytest.raises(ValueError, match=message):
        cf.measure_position_offsets(untrained("gpt2", kept=4), documents, **more)


def test_a_plain_model_has_no_places():
    with pytest.raises(ValueError, match="model is a GPT2LMHeadModel: add recurrence first"):
        cf.measure_position_offsets(tiny.base("gpt2"), [[5] * 20])
