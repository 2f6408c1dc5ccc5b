# SPDX-License-Identifier: Apache-2.0
"""The configs: how memories are chosen, which defaults they get, and which window suits a base model."""

import copy
import dataclasses
import json
import pickle

import pytest
import transformers as hf
from helpers import tiny

import carryforward as cf
from carryforward.config import default_window
from carryforward.memories.base import Dependency
from carryforward.memories.reach import memory_with_reach
from carryforward.models.add_recurrence import recurrence_of

VECTOR, KV = cf.VectorMemoryConfig, cf.KVMemoryConfig


# --- choosing memories -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ("kv", (KV(146, 4),)),
        ("vector", (VECTOR(),)),
        (KV(recent=9, sinks=0), (KV(9, 0),)),
        ({"kind": "vector", "slots": 3}, (VECTOR(slots=3),)),
        (["vector"], (VECTOR(),)),
        (("kv", "vector"), (VECTOR(), KV(146, 4))),
        (["kv", {"kind": "vector", "insert_at": [1, 2]}], (VECTOR(insert_at=(1, 2)), KV(146, 4))),
        ([VECTOR(slots=2), {"kind": "kv", "recent": 5}], (VECTOR(slots=2), KV(5, 4))),
        ([KV(sinks=0), VECTOR(slots=2)], (VECTOR(slots=2), KV(150, 0))),
    ],
    ids=str,
)
def test_memories_are_named_or_configured(memory, expected):
    assert cf.RecurrenceConfig(memory=memory).memories == expected, "always in the same order"


def test_the_default_memory_is_keys_and_values():
    assert cf.RecurrenceConfig() == cf.RecurrenceConfig(memory="kv")


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("keys", "memory='keys': the kinds of memory are 'vector', 'kv'"),
        ({"slots": 2}, "memory=None: the kinds of memory are 'vector', 'kv'"),
        (["kv", "best"], "memory='best': the kinds of memory are"),
        ([], r"memory=\[\] is empty: give at least one of 'vector', 'kv'"),
        (["kv", "kv"], "names a kind twice: give each kind once"),
        (["vector", VECTOR(slots=2)], "names a kind twice"),
        (None, "memory=None must be one of 'vector', 'kv', 'tokens', 'associative', a memory config, or a list"),
        (3, "memory=3 must be one of"),
        ({"kind": "kv", "recnt": 3}, "KVMemoryConfig has no field 'recnt'. Did you mean 'recent'. Its fields are: rec"),
        ({"kind": "vector", "poolin": "max"}, "VectorMemoryConfig has no field 'poolin'. Did you mean 'pooling'"),
        ({"kind": "kv", "slots": 3}, "KVMemoryConfig has no field 'slots'. It is a field of VectorMemoryConfig"),
    ],
    ids=str,
)
def test_a_memory_that_does_not_exist_is_refused(memory, message):
    with pytest.raises(ValueError, match=message):
        cf.RecurrenceConfig(memory=memory)


def test_a_memory_s_field_is_refused_with_a_hint():
    with pytest.raises(ValueError, match=r"'recent'. It is a field of KVMemoryConfig: give memory=KVMemoryConfig\(rec"):
        cf.RecurrenceConfig(window=64, recent=8)
    with pytest.raises(ValueError, match=r"'pooling'. It is a field of VectorMemoryConfig: give memory=VectorMemory"):
        cf.add_recurrence(tiny.base("gpt2"), window=8, pooling="max")
    with pytest.raises(ValueError, match=r"'windw'. Did you mean 'window'. Its fields are: window, overlap, memory"):
        cf.RecurrenceConfig(windw=64)


def test_memories_are_found_by_kind():
    both = cf.RecurrenceConfig(memory=["vector", "kv"])
    assert both.find("vector") == VECTOR()
    assert both.find("kv") == KV(146, 4)
    assert cf.RecurrenceConfig(memory="kv").find("vector") is None


# --- defaults of keys and values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "recent", "sinks"),
    [
        ({}, 146, 4),  # half of 300
        ({"window": 64}, 28, 4),
        ({"window": 64, "overlap": 48}, 12, 4),  # the next window is only 16 tokens ahead
        ({"window": 300, "overlap": 200, "prefix": (1,), "suffix": (2,)}, 94, 4),
        ({"window": 12}, 3, 3),
        ({"window": 8}, 2, 2),
        ({"window": 4}, 1, 1),
        ({"window": 2}, 1, 0),
        ({"window": 1}, 1, 0),
    ],
)
def test_half_a_window_is_carried_by_default(fields, recent, sinks):
    assert cf.RecurrenceConfig(**fields).find("kv") == KV(recent, sinks)


@pytest.mark.parametrize(
    ("window", "overlap", "given", "resolved"),
    [
        (64, 0, KV(sinks=0), KV(32, 0)),
        (64, 0, KV(sinks=10), KV(22, 10)),
        (64, 0, KV(recent=50), KV(50, 4)),
        (64, 0, KV(recent=61), KV(61, 3)),  # as many sinks as there is room for
        (64, 0, KV(recent=64), KV(64, 0)),
        (64, 48, KV(recent=14), KV(14, 2)),
        (8, 0, KV(recent=3), KV(3, 2)),
        (64, 0, KV(recent=30, sinks=34), KV(30, 34)),
    ],
)
def test_given_numbers_of_positions_are_kept(window, overlap, given, resolved):
    assert cf.RecurrenceConfig(window=window, overlap=overlap, memory=given).find("kv") == resolved
    assert resolved.carried == resolved.recent + resolved.sinks


def test_defaults_follow_another_window():
    config = cf.RecurrenceConfig(window=300)
    smaller = dataclasses.replace(config, window=64, overlap=48)
    assert smaller == cf.RecurrenceConfig(window=64, overlap=48)
    assert smaller.find("kv") == KV(12, 4)
    recurrence = cf.add_recurrence(tiny.base("llama"), config, window=24).config.recurrence
    assert recurrence.find("kv") == KV(8, 4)
    given = dataclasses.replace(cf.RecurrenceConfig(window=64, memory=KV(recent=20)), window=32)
    assert given.find("kv") == KV(20, 4)
    assert dataclasses.replace(given, window=16).find("kv") == KV(20, 4), "more than a window"


def test_equal_configs_are_those_that_resolve_to_the_same():
    config = cf.RecurrenceConfig(memory=KV(146, 4))
    assert config == cf.RecurrenceConfig(memory="kv")
    assert hash(config) == hash(cf.RecurrenceConfig(memory="kv"))
    assert config != cf.RecurrenceConfig(memory=KV(145, 4))
    assert config != cf.RecurrenceConfig(memory="kv", bptt_windows=2)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sinks": "x"}, "KVMemoryConfig: sinks='x' must be an integer from 0"),
        ({"sinks": -1}, "sinks=-1 must be an integer from 0"),
        ({"recent": 0}, "recent=0 must be an integer from 1"),
        ({"recent": True}, "recent=True must be an integer from 1"),
        ({"recent": 2.0}, "recent=2.0 must be an integer from 1"),
        (
            {"sinks": 150},
            r"sinks=150 leaves nothing of half a window \(150\) for recent positions. Give recent as well",
        ),
        ({"sinks": 9, "right": 9}, "sinks=9 leaves nothing of right=9 for recent positions. Give recent as well"),
        ({"right": -1}, "right=-1 must be an integer from 0"),
        ({"right": None}, "right=None must be an integer from 0"),
        ({"right": 9, "group_windows": 1}, "group_windows=1 must be an integer from 2"),
        ({"group_windows": 4}, "group_windows=4 must be left out: it needs right"),
        ({"right": 9, "far": 8}, "far=8 must be 0: it cannot be combined with right"),
        ({"right": 301}, "overlap=0: a window has 300 document tokens and needs 301 to carry keys and values of the 2"),
        ({"right": 9, "recent": 301}, "reach further back than one window. With right=9, carry at most the 300 docume"),
    ],
)
def test_numbers_of_positions_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        cf.RecurrenceConfig(memory=KV(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"overlap": 2}, "overlap=2 must be 0: windows see 9 positions of their right neighbours, and nothing is read"),
        (
            {"memory": [KV(right=9), "vector"]},
            "of their right neighbours run side by side, and with 'vector', 'kv' they",
        ),
    ],
    ids=str,
)
def test_windows_that_see_right_neighbours_are_read_once_and_side_by_side(fields, message):
    with pytest.raises(ValueError, match=message):
        cf.RecurrenceConfig(**{"memory": KV(right=9), **fields})


def test_a_causal_model_has_no_right_neighbours():
    recurrence = cf.RecurrenceConfig(window=100, memory=KV(right=9))
    with pytest.raises(ValueError, match="right=9 lets windows see what comes after them, and gpt2 is causal"):
        cf.RecurrentModelConfig(base_config=hf.GPT2Config(), recurrence=recurrence)


def test_as_much_is_carried_from_the_left_as_is_seen_on_the_right():
    def resolved(**fields):
        return cf.RecurrenceConfig(memory=KV(**fields)).find("kv")

    assert resolved(right=64) == KV(60, 4, right=64, group_windows=16)
    assert resolved(right=64, recent=64, sinks=0, group_windows=3) == KV(64, 0, right=64, group_windows=3)
    assert resolved(right=1) == KV(1, 0, right=1, group_windows=16)
    assert (resolved(right=64).extra_positions, resolved(right=64).carried_positions) == (128, 64)


# --- what follows from a config ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        cf.RecurrenceConfig(),
        cf.RecurrenceConfig(window=64, overlap=3, memory="vector", bptt_windows=2, keep_windows=3),
        cf.RecurrenceConfig(window=64, memory=VECTOR(slots=2, insert_at=(1, 3), hidden_sizes=(), residual=True)),
        cf.RecurrenceConfig(window=64, prefix=(2,), separator=(3, 3), suffix=(3,), memory=["kv", VECTOR(slots=2)]),
        cf.RecurrenceConfig(window=64, prefix=(2,), suffix=(3,), memory=KV(right=20, group_windows=5)),
    ],
    ids=lambda config: config.describe(),
)
def test_a_config_survives_json(config):
    values = json.loads(json.dumps(config.to_dict()))
    assert cf.RecurrenceConfig(**values) == config
    assert [memory["kind"] for memory in values["memory"]] == [memory.kind for memory in config.memories]
    base = tiny.CONFIGS["bert"]() if config.prefix else hf.GPT2Config()
    base.max_position_embeddings = 1024
    whole = cf.RecurrentModelConfig(base_config=base, recurrence=config)
    loaded = cf.RecurrentModelConfig.from_dict(json.loads(whole.to_json_string(use_diff=False)))
    assert loaded.recurrence == config


def test_windows_depend_on_each_other_as_their_memories_need():
    def dependency(*kinds):
        return cf.RecurrenceConfig(memory=kinds).dependency

    assert dependency("kv") is Dependency.SAME_LAYER_KV
    assert dependency("vector") is Dependency.LAST_LAYER
    assert dependency("vector", "kv") is Dependency.LAST_LAYER


def test_only_keys_and_values_take_positions():
    assert cf.RecurrenceConfig(memory="vector").extra_positions == 0
    assert cf.RecurrenceConfig(memory=["vector", "kv"]).extra_positions == 150


def test_what_is_carried_is_described():
    assert cf.RecurrenceConfig().describe() == "keys and values of the 146 most recent positions and the first 4"
    both = cf.RecurrenceConfig(memory=[KV(5, 0), VECTOR(slots=2)]).describe()
    assert both == "2 pooled vectors a window (the paper's memory); keys and values of the 5 most recent positions"
    notes = [cf.RecurrenceConfig(memory=kind).usage_note() for kind in ("vector", "kv")]
    assert cf.RecurrenceConfig(memory=["kv", "vector"]).usage_note() == " ".join(notes)


def test_a_window_must_have_enough_to_carry():
    config = cf.RecurrenceConfig(window=16, overlap=2, memory=[VECTOR(slots=3), KV(recent=5, sinks=1)])
    assert config.min_capacity(2) == 8, "the overlap and the carried positions"
    assert config.min_capacity(9) == 15
    assert cf.RecurrenceConfig(window=16, overlap=2, memory=VECTOR(slots=3)).min_capacity(9) == 10, "3 + 9 - 2"
    assert (config.pooled(16, 2), config.pooled(16, 9), config.pooled(16, 0)) == (16, 9, 16)
    with pytest.raises(ValueError, match=r"overlap=11 \(trained at 2\): a window has 16 document tokens and needs 17"):
        config.check_capacity(16, 11)
    with pytest.raises(ValueError, match="overlap=0: a window has 8 document tokens and needs 9 to carry 9 pooled vec"):
        cf.RecurrenceConfig(window=8, memory=VECTOR(slots=9))


# --- the window that suits a base model --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "memory", "window"),
    [
        (hf.BertConfig(), "kv", 341),  # 512 learned positions: 341 and half of it carried
        (hf.RobertaConfig(), "kv", 340),  # two fewer: ids start after the padding id
        (hf.GPT2Config(), "kv", 683),
        (hf.LlamaConfig(max_position_embeddings=8192), "kv", 1024),
        (hf.MistralConfig(sliding_window=512), "kv", 341),
        (hf.MistralConfig(sliding_window=None), "kv", 1024),
        (hf.ModernBertConfig(), "kv", 1024),  # an encoder's sliding window does not limit the text
        (hf.ModernBertConfig(), "vector", 300),
        (hf.BertConfig(), KV(recent=100), 408),  # 512 less 100 recent positions and 4 sinks
        (hf.BertConfig(), KV(recent=100, sinks=0), 412),
        (hf.BertConfig(), KV(right=64), 384),  # 64 on either side
        (hf.BertConfig(), KV(right=64, recent=100), 344),
        (hf.BertConfig(), memory_with_reach(32, KV(right=64), hf.BertConfig()), 416),
        (hf.ModernBertConfig(), KV(right=64), 1024),
        (hf.BertConfig(), KV(recent=300, sinks=0), 212),
        (hf.BertConfig(), KV(recent=400, sinks=0), 128),  # a quarter of the positions, at least
        (hf.LlamaConfig(max_position_embeddings=1024), KV(recent=3000), 256),
        (hf.BertConfig(), "vector", 300),
        (hf.GPT2Config(), "vector", 300),
        (hf.GPT2Config(n_positions=128), "vector", 128),
        (hf.BertConfig(), ["vector", "kv"], 300),
        (hf.GPT2Config(n_positions=128), ["vector", "kv"], 85),
        (hf.GPT2Config(), "tokens", 992),  # 16 memory tokens in front of it and 16 behind it
        (hf.RobertaConfig(), "associative", 494),
        (hf.GPT2Config(), ["associative", "kv"], 672),  # 16 memory positions; of the others, half a window is carried
        (hf.LlamaConfig(max_position_embeddings=8192), "tokens", 1024),
    ],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_the_default_window_leaves_room_for_what_is_carried(base, memory, window):
    assert default_window(base, memory) == window
    if memory != KV(recent=400, sinks=0):  # too many
        recurrence = recurrence_of(base, memory=memory)
        assert recurrence.window == window
        cf.RecurrentModelConfig(base_config=base, recurrence=recurrence)


def test_the_default_window_is_used_by_add_recurrence():
    assert cf.add_recurrence(tiny.base("gpt2"), documents=tiny.TEXT).config.recurrence.window == 27  # of 40 positions
    assert cf.add_recurrence(tiny.base("gpt2"), preset="paper").config.recurrence.window == 40


# --- presets -----------------------------------------------------------------------------------------------------


def test_the_recommended_preset_is_the_default():
    base = hf.GPT2Config()
    assert recurrence_of(base) == recurrence_of(base, preset="recommended") == cf.RecurrenceConfig(window=683)
    assert recurrence_of(base, window=64, overlap=2) == cf.RecurrenceConfig(window=64, overlap=2, memory="kv")


def test_the_paper_preset_is_the_paper_s_language_model():
    assert recurrence_of(hf.GPT2Config(), preset="paper") == cf.RecurrenceConfig(window=300, memory=VECTOR())
    small = recurrence_of(hf.GPT2Config(), preset="paper", window=64)
    assert small == cf.RecurrenceConfig(window=64, memory="vector")
    memory = recurrence_of(hf.GPT2Config(), preset="paper").find("vector")
    assert (memory.slots, memory.pooling, memory.pooled_layers, memory.insert_at) == (1, "mean", "all", 2)
    assert memory.hidden_sizes == (200, 200, 200)


def test_a_given_memory_replaces_the_preset_s():
    base = hf.GPT2Config()
    assert recurrence_of(base, preset="paper", memory="kv", window=64) == cf.RecurrenceConfig(window=64, memory="kv")
    with pytest.raises(ValueError, match="preset='best': there are 'recommended', 'paper'"):
        recurrence_of(base, preset="best")
    with pytest.raises(ValueError, match="preset='paper': config is given too. Leave one out"):
        cf.add_recurrence(tiny.base("gpt2"), cf.RecurrenceConfig(window=8, memory="vector"), preset="paper")


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (None, VECTOR(pooled_layers="last", hidden_sizes=(768,))),
        ("vector", VECTOR(pooled_layers="last", hidden_sizes=(768,))),
        ({"kind": "vector", "slots": 2}, VECTOR(slots=2, pooled_layers="last", hidden_sizes=(768,))),
        ({"kind": "vector", "pooled_layers": "all"}, VECTOR(pooled_layers="all", hidden_sizes=(768,))),
        (VECTOR(slots=2), VECTOR(slots=2)),  # a config says everything
    ],
    ids=str,
)
def test_question_answering_has_the_vector_memory_of_section_5_4(memory, expected):
    base = hf.BertConfig()
    recurrence = recurrence_of(base, preset="paper", memory=memory, question_answering=True)
    assert recurrence == cf.RecurrenceConfig(window=512, memory=expected)
    small = hf.BertConfig(max_position_embeddings=128)
    assert recurrence_of(small, preset="paper", memory=memory, question_answering=True).window == 128
    assert recurrence_of(base, preset="paper", question_answering=True, window=64).window == 64


def test_question_answering_is_recommended_with_keys_and_values_too():
    assert recurrence_of(hf.BertConfig(), question_answering=True) == cf.RecurrenceConfig(window=341, memory="kv")
    assert recurrence_of(hf.ModernBertConfig(), question_answering=True).window == 512
    both = recurrence_of(hf.BertConfig(), memory=["vector", "kv"], question_answering=True)
    assert both.window == 300
    assert both.find("vector") == VECTOR(pooled_layers="last", hidden_sizes=(768,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: cf.VectorMemoryConfig(poolin="max"),
            "VectorMemoryConfig has no field 'poolin'. Did you mean 'pooling'",
        ),
        (lambda: cf.KVMemoryConfig(kept=3), "KVMemoryConfig has no field 'kept'. Its fields are: recent, sinks"),
        (lambda: cf.RecurrenceConfig(memory=[5]), "memory=5 must be one of 'vector', 'kv'"),
        (lambda: cf.RecurrenceConfig(memory=[["kv"]]), r"memory=\['kv'\] must be one of"),
    ],
)
def test_misspelt_memories_are_refused_in_a_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()
