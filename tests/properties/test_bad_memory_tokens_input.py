# SPDX-License-Identifier: Apache-2.0
"""Settings and states that memory tokens and associative memory cannot use are refused with a message."""

import pytest
from helpers import tiny

import carryforward as cf

TOKENS, ASSOCIATIVE, KV = cf.TokenMemoryConfig, cf.AssociativeMemoryConfig, cf.KVMemoryConfig
MEMORIES = {
    "tokens": TOKENS(memory_tokens=3),
    "more tokens": TOKENS(memory_tokens=4),
    "associative": ASSOCIATIVE(memory_tokens=3, key_size=5),
    "larger keys": ASSOCIATIVE(memory_tokens=3, key_size=6),
    "associative and kv": [ASSOCIATIVE(memory_tokens=3, key_size=5), KV(recent=3, sinks=0)],
    "vector": cf.VectorMemoryConfig(hidden_sizes=(12,)),
}


@pytest.mark.parametrize("value", [0, -1, True, "4", 3.5, None, float("nan")], ids=repr)
@pytest.mark.parametrize(("config", "field"), [(TOKENS, "memory_tokens"), (ASSOCIATIVE, "memory_tokens"),
                                               (ASSOCIATIVE, "key_size")])  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(config, field, value):
    with pytest.raises(ValueError, match=f"{config.__name__}: {field}={value!r} must be an integer from 1"):
        config(**{field: value})


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (["tokens", "kv"], "'tokens' cannot stand beside 'kv'. Use 'tokens' alone"),
        (["vector", "tokens"], "'tokens' cannot stand beside 'vector'. Use 'tokens' alone"),
        (["tokens", "associative"], "'tokens' cannot stand beside 'associative'. Use 'tokens' alone"),
        (["kv", "vector", "associative"], "'associative' cannot stand beside 'vector'. .* alone or beside 'kv'"),
        (["associative", KV(recent=3, far=4)], "and 4 far ones .* cannot stand beside another kind of memory"),
        (["associative", KV(recent=30)], "reach further back than one window, which cannot stand beside another kind"),
        ({"kind": "tokens", "key_size": 3}, "'key_size'. It is a field of AssociativeMemoryConfig"),
        ({"kind": "kv", "memory_tokens": 3}, "'memory_tokens'. It is a field of TokenMemoryConfig"),
    ],
    ids=str,
)
def test_memories_that_cannot_be_are_refused(memory, message):
    with pytest.raises(ValueError, match=message):
        cf.RecurrenceConfig(window=16, memory=memory)


@pytest.mark.parametrize(
    ("window", "memory", "message"),
    [
        (33, TOKENS(memory_tokens=4), "window=33 with 8 memory positions exceeds the 40 learned positions that gpt2 "
         "has. Use window=32 or less, or fewer memory tokens; the state carries what lies further back"),
        (38, ASSOCIATIVE(memory_tokens=3), "window=38 with 3 memory positions exceeds .* Use window=37 or less"),
        (1, TOKENS(memory_tokens=20), "Use fewer memory tokens, which take 40 of them"),
        (30, [ASSOCIATIVE(memory_tokens=8), KV(recent=8, sinks=4)], "window=30 with 12 positions carried in front of "
         "it and 8 memory positions exceeds .* Use window=20 or less, or fewer memory tokens"),
        (30, [ASSOCIATIVE(memory_tokens=8), KV(recent=25, sinks=0)], "Carry at most 2 positions"),
    ],
    ids=str,
)  # fmt: skip
def test_window_and_memory_positions_must_fit_the_learned_positions(window, memory, message):
    with pytest.raises(ValueError, match=message):
        cf.RecurrentModelConfig(
            base_config=tiny.CONFIGS["gpt2"](), recurrence=cf.RecurrenceConfig(window=window, memory=memory)
        )


@pytest.mark.parametrize("other", MEMORIES)
@pytest.mark.parametrize("kind", ["tokens", "associative"])
def test_states_of_other_memories_are_refused(kind, other):
    ids = tiny.documents(1, 20)
    model, state = (tiny.recurrent("llama", memory=MEMORIES[name]) for name in (kind, other))
    state = state.advance_state(ids)
    if kind == other:
        assert model(ids, state=state).state.read.tolist() == [40]
        return
    shape = {"tokens": "tokens 3x16", "associative": "associative 3x30x17"}[kind]
    with pytest.raises(ValueError, match=f"state comes from another model or overlap: .* This call reads .*{shape}"):
        model(ids, state=state)


@pytest.mark.parametrize("kind", ["tokens", "associative"])
def test_a_reach_is_for_keys_and_values_alone(kind):
    with pytest.raises(ValueError, match=f"reach=5 is for carried keys and values alone, and the memory is '{kind}'"):
        cf.add_recurrence(tiny.base("gpt2"), window=8, memory=kind, reach=5)


def test_a_matrix_is_no_vector_of_a_document():
    with pytest.raises(ValueError, match="the model carries a matrix in every layer, with 30 features, not vectors"):
        cf.encode(tiny.recurrent("gpt2", memory=MEMORIES["associative"]), ["a"], object(), pooling="state")
