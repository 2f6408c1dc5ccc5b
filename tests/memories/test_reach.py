# SPDX-License-Identifier: Apache-2.0
"""`reach`: one number for how many positions of its past a window sees, or for the memory that they may take."""

import logging

import pytest
import torch
from helpers import tiny
from transformers import GPT2Config, LlamaConfig

import carryforward as cf
from carryforward import presets
from carryforward.memories.kv import SELECTIONS
from carryforward.memories.reach import bytes_per_position, memory_with_reach
from carryforward.models.add_recurrence import recurrence_of

LLAMA = tiny.CONFIGS["llama"]()  # 3 layers, 1 head of keys and values of size 8: 192 bytes a position in float32
OF_ONE = 192


@pytest.fixture(autouse=True)
def warn_again():
    """A warning that is given once a process is given once a test."""
    logging.Logger.warning_once.cache_clear()


@pytest.mark.parametrize(
    ("reach", "sinks", "recent"),
    [
        (2000, 4, 1996), ("2000", 4, 1996), (8, 4, 4), (7, 3, 4), (3, 1, 2), (1, 0, 1),
        ("64KB", 4, 64_000 // OF_ONE - 4), ("64 KiB", 4, 65_536 // OF_ONE - 4), ("1.5mb", 4, 1_500_000 // OF_ONE - 4),
        ("0.5 MiB", 4, 2**19 // OF_ONE - 4), ("1GB", 4, 10**9 // OF_ONE - 4), (" 192 kb ", 4, 996),
    ],
)  # fmt: skip
def test_a_reach_is_sinks_and_recent_positions(reach, sinks, recent):
    assert memory_with_reach(reach, "kv", LLAMA) == cf.KVMemoryConfig(sinks=sinks, recent=recent)


def test_a_memory_budget_is_that_of_the_state():
    """As many positions as fit, in the precision of the model."""
    for dtype in (torch.float32, torch.bfloat16):
        model = cf.add_recurrence(tiny.base("llama").to(dtype), window=8, reach="8KB")
        state = model.advance_state(tiny.documents(1, 100)).memory["kv"]
        assert state.dtype == dtype
        size = state.numel() * state.element_size()
        assert 8000 - bytes_per_position(model.config.base_config, dtype) < size <= 8000
        assert size == model.memory.state_bytes


def test_the_config_may_give_the_sinks():
    memory = cf.KVMemoryConfig(sinks=2, selection="merged")
    assert memory_with_reach(10, memory, LLAMA) == cf.KVMemoryConfig(sinks=2, recent=8, selection="merged")
    recurrence = cf.add_recurrence(tiny.base("llama"), {"window": 8, "memory": memory}, reach=10).config.recurrence
    assert (recurrence.window, recurrence.find("kv").carried) == (8, 10)


@pytest.mark.parametrize(("reach", "sinks"), [(6, 3), (30, 4)])
def test_a_reach_is_the_same_as_its_config(reach, sinks):
    """Within a window and beyond it; saved with the model as ordinary fields."""
    ids = tiny.documents(2, 60)
    ours = cf.add_recurrence(tiny.base("llama"), window=8, reach=reach)
    memory = cf.KVMemoryConfig(recent=reach - sinks, sinks=sinks)
    theirs = cf.add_recurrence(tiny.base("llama"), window=8, memory=memory)
    assert ours.config.recurrence == theirs.config.recurrence
    assert ours(ids).logits.equal(theirs(ids).logits)
    assert "reach" not in ours.config.to_json_string()


def test_a_window_sees_so_many_positions():
    """The oldest position within reach changes the next window; the one before it does not, with a single layer."""
    base = tiny.base("llama", num_hidden_layers=1)
    base.model.layers = base.model.layers[:1]
    model = cf.add_recurrence(base, window=8, memory=cf.KVMemoryConfig(sinks=0), reach=20)
    ids = tiny.documents(1, 48)
    expected = model(ids).logits[0, 40]  # a window's first position: it sees the 20 positions before it, 20 to 39

    def changed(position):
        other = ids.clone()
        other[0, position] = 5 + (other[0, position] + 1) % 60
        return not model(other).logits[0, 40].allclose(expected, atol=1e-6)

    assert [changed(position) for position in (18, 19, 20, 21, 39)] == [False, False, True, True, True]


# --- what fits a model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "reach", "window"),
    [(1024, 300, 724), (1024, 768, 256), (8192, 300, 1024), (8192, 7500, 1024)],
)
def test_the_default_window_is_what_a_reach_leaves(positions, reach, window):
    """No longer than the default at most, and no shorter than a quarter of the positions."""
    config = LlamaConfig(max_position_embeddings=positions)
    assert recurrence_of(config, reach=reach).window == window


def test_the_largest_reach_of_learned_positions():
    config = GPT2Config()  # 1024 positions
    for window, room in ((300, 724), (None, 768)):
        fits = recurrence_of(config, reach=room, window=window)
        assert fits.window + fits.extra_positions == 1024
        with pytest.raises(
            ValueError, match=rf"leave {room} beside a window .* Use reach={room} or less, or a smaller"
        ):
            recurrence_of(config, reach=room + 1, window=window)
    with pytest.raises(ValueError, match="reach='1GB' takes 13563 positions, and the 1024 learned positions that gpt2"):
        recurrence_of(config, reach="1GB", window=300)
    with pytest.raises(ValueError, match="a window of 1024 tokens takes all of the 1024 .* Use a smaller window"):
        recurrence_of(config, reach=1, window=1024)
    with pytest.raises(ValueError, match="Use reach=32 or less"):
        cf.add_recurrence(tiny.base("gpt2"), cf.RecurrenceConfig(window=8), reach=33)


def test_rotary_models_are_warned_of_positions_they_have_not_seen(caplog):
    base = tiny.base("llama")  # trained on 40 positions
    with caplog.at_level(logging.WARNING):
        cf.add_recurrence(base, window=8, reach=32)
        assert not caplog.records
        for _ in range(3):
            cf.add_recurrence(base, window=8, reach=33)
    (record,) = caplog.records
    message = "window=8 with 33 positions carried in front of it exceeds the 40 positions that llama was trained on"
    assert message in record.getMessage()


# --- what is refused -----------------------------------------------------------------------------------------------

ACCEPTED = r"must be a number of positions, such as 2000, or memory for the state, such as '64MB'"


@pytest.mark.parametrize(
    "reach",
    ["", "64 XB", "MB", "-5", "-5MB", "1e3", "1.5", "1,5GB", "9 tokens", "nan", "٣MB", "9" * 13, 2.0, True, (3,)],
)  # fmt: skip
def test_malformed_reaches_are_refused(reach):
    with pytest.raises(ValueError, match=ACCEPTED):
        memory_with_reach(reach, "kv", LLAMA)


@pytest.mark.parametrize(
    ("reach", "memory", "message"),
    [
        (0, "kv", "reach=0 must be at least 1: one position"),
        (-3, "kv", "reach=-3 must be at least 1"),
        (4, cf.KVMemoryConfig(sinks=4), "reach=4 must be at least 5: 4 sinks and a recent position"),
        ("0.1KB", "kv", r"too little memory: the state of one position takes 0.2 KB \(float32\). Give at least 1KB"),
        ("3KB", cf.KVMemoryConfig(sinks=16), "Give at least 4KB, for 16 sinks and a recent position"),
        (9, cf.KVMemoryConfig(recent=5), r"and so does KVMemoryConfig\(recent=5\). Leave one of them out"),
        (9, cf.KVMemoryConfig(far=5), r"and so does KVMemoryConfig\(far=5\). Leave one of them out"),
        (9, "vector", "for carried keys and values alone, and the memory is 'vector'. Use memory='kv', or leave reach"),
        (9, ["kv", "vector"], "the memory is 'vector' and 'kv'"),
    ],
)
def test_a_reach_that_contradicts_the_memory_is_refused(reach, memory, message):
    with pytest.raises(ValueError, match=message):
        cf.add_recurrence(tiny.base("llama"), window=8, reach=reach, memory=memory)


def test_a_reach_with_the_papers_memory_is_refused():
    with pytest.raises(ValueError, match="the memory is 'vector'"):
        cf.add_recurrence(tiny.base("llama"), window=8, reach=9, preset="paper")
    with pytest.raises(ValueError, match=r"It depends on the model: give it to add_recurrence\(model, reach=...\)"):
        cf.RecurrenceConfig(reach=9)


def test_the_command_line_knows_all_selections():
    """It cannot import them: `--help` would be slow."""
    assert tuple(SELECTIONS) == presets.FAR_SELECTIONS
