# SPDX-License-Identifier: Apache-2.0
"""Settings, states and documents that a memory of keys and values cannot use are refused with a message."""

import pytest
from helpers import tiny
from helpers.tiny import untrained

import carryforward as cf


@pytest.mark.parametrize(
    ("overlap", "fields", "message"),
    [
        (0, {"recent": -1}, "recent=-1 must be an integer from 1"),
        (0, {"recent": 0}, "recent=0 must be an integer from 1"),
        (0, {"sinks": 4}, r"sinks=4 leaves nothing of half a window \(4\) for recent positions. Give recent as well"),
        (0, {"far": -1}, "far=-1 must be an integer from 0"),
        (0, {"far": True}, "far=True must be an integer from 0"),
        (2, {"selection": "other"}, "selection='other' must be one of 'attention', 'dissimilar', 'merged', 'lookup'"),
    ],
)
def test_positions_that_do_not_fit_a_window_are_refused(overlap, fields, message):
    with pytest.raises(ValueError, match=message):
        cf.RecurrenceConfig(window=8, overlap=overlap, memory=cf.KVMemoryConfig(**fields))


def test_window_and_carried_positions_must_fit_the_learned_positions():
    memory = ["vector", cf.KVMemoryConfig(recent=12, sinks=0)]
    with pytest.raises(
        ValueError, match="window=30 with 12 positions carried in front of it exceeds the 40 learned pos"
    ):
        cf.add_recurrence(tiny.base("gpt2"), window=30, memory=memory)
    with pytest.raises(ValueError, match="Use window=28 or less"):
        cf.add_recurrence(tiny.base("gpt2"), window=30, memory=memory)


def test_both_sides_must_fit_the_learned_positions():
    message = (
        "window=30 with 12 positions of its neighbours on both sides exceeds the 40 learned.*Use window=28 or less"
    )
    with pytest.raises(ValueError, match=message):
        cf.add_recurrence(tiny.base("bert"), window=30, memory=cf.KVMemoryConfig(right=6), prefix=())
    with pytest.raises(ValueError, match="reach=9 takes 9 positions, and the 40 learned .* Use reach=4 or less"):
        cf.add_recurrence(tiny.base("bert"), window=30, memory=cf.KVMemoryConfig(right=6), reach=9, prefix=())


def test_another_overlap_is_refused_where_windows_see_both_neighbours():
    model = tiny.recurrent("bert", memory=cf.KVMemoryConfig(right=3), overlap=0)
    with pytest.raises(ValueError, match="overlap=2 must be 0: windows see 3 positions of their right neighbours"):
        model(tiny.documents(1, 30), overlap=2)


def test_an_overlap_that_leaves_too_little_to_carry_is_refused():
    message = (
        r"overlap=5 \(trained at 2\): a window has 8 document tokens and needs 9 to carry keys and values of the 4"
    )
    with pytest.raises(ValueError, match=message):
        tiny.recurrent("gpt2", recent=4)(tiny.documents(1, 30), overlap=5)


@pytest.mark.parametrize(
    "other",
    [{"recent": 3}, {"recent": 3, "sinks": 1}, {"recent": 4, "settings": {"num_key_value_heads": 2}}],
    ids=str,
)
def test_states_of_other_memories_are_refused(other):
    state = tiny.recurrent("llama", recent=4).advance_state(tiny.documents(1, 20))
    with pytest.raises(
        ValueError, match=r"another model or overlap: .*kv 3x2x1x4x8 \(0 sinks \+ 4 recent\).*This call reads"
    ):
        tiny.recurrent("llama", **other)(tiny.documents(1, 20), state=state)


def test_a_state_without_vectors_cannot_be_returned():
    model = tiny.recurrent("gpt2", slots=0, recent=4)
    with pytest.raises(
        ValueError, match='the model carries keys and values of the .*, not vectors. Use pooling="mean"'
    ):
        cf.encode(model, ["a"], object(), pooling="state")


@pytest.mark.parametrize(
    ("documents", "arguments", "message"),
    [
        (["text"], {}, "documents must be a list of token ids for each text"),
        ((n for n in []), {}, "documents must be a list of token ids for each text"),
        ([[99] * 20], {}, "holds the token id 99"),
        ([[5] * 20], {"rows": 0}, "rows=0 must be at least 1"),
    ],
)
def test_documents_that_cannot_be_measured_on_are_refused(documents, arguments, message):
    with pytest.raises(ValueError, match=message):
        cf.measure_position_offsets(untrained("gpt2", recent=4), documents, **arguments)


def test_a_plain_model_has_no_position_offsets():
    with pytest.raises(ValueError, match="model is a GPT2LMHeadModel: add recurrence first"):
        cf.measure_position_offsets(tiny.base("gpt2"), [[5] * 20])
