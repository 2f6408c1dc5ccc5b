# SPDX-License-Identifier: Apache-2.0
"""`carryforward add` as people use it."""

import json

import pytest
import transformers
from helpers.commands import fail, succeed

import carryforward as cf
from carryforward.models.position_offsets import needs_position_offsets


def test_a_model_that_reads_on(home, tmp_path):
    add = ["add", home / "model", "--out"]
    result = succeed(*add, tmp_path / "on", "--window", 16, "--sinks", 2)
    memory = "keys and values of the 6 most recent positions and the first 2"
    assert result.out == f"{tmp_path / 'on'}: windows of 16 tokens; memory: {memory}\n"
    assert "Carried keys and values help without training, and more with it." in result.err
    model = cf.RecurrentForCausalLM.from_pretrained(tmp_path / "on")
    recurrence = model.config.recurrence
    assert (recurrence.window, recurrence.memories) == (16, (cf.KVMemoryConfig(recent=6, sinks=2),))
    assert not needs_position_offsets(model)
    result = succeed(*add, tmp_path / "much", "--recent", 12)
    assert "windows of 16 tokens; memory: keys and values of the 12 most recent positions and the first 4" in result.out
    assert f"--out {tmp_path / 'on'} exists already" in fail(*add, tmp_path / "on", code=2)
    assert "is recurrent already" in fail("add", tmp_path / "on", "--out", tmp_path / "other", code=2)
    assert not (tmp_path / "other").exists()


def test_the_result_as_json(home, tmp_path):
    result = succeed("add", home / "model", "--out", tmp_path / "own", "--json")
    memory = "keys and values of the 6 most recent positions and the first 4"  # half a window
    assert json.loads(result.out) == {"out": str(tmp_path / "own"), "window": 21, "memory": memory}


def test_the_paper_preset(home, tmp_path):
    add = ["add", home / "model", "--preset", "paper", "--out"]
    result = succeed(*add, tmp_path / "own", "--data", "none")
    assert "windows of 32 tokens; memory: 1 pooled vector a window (the paper's memory)" in result.out
    assert "A pooled vector must be trained" in result.err
    recurrence = cf.RecurrentForCausalLM.from_pretrained(tmp_path / "own").config.recurrence
    assert recurrence == cf.RecurrenceConfig(window=32, memory="vector")
    for option in ("--recent", "--sinks"):
        message = fail(*add, tmp_path / "other", option, 2, code=2)
        assert "--recent and --sinks are options of --preset recommended. Leave them out." in message
    message = fail("add", home / "model", "--preset", "none", "--out", tmp_path / "other", code=2)
    assert "--preset none: it must be one of recommended, paper" in message
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("positions", "window"), [(512, 341), (1024, 683), (9, 6), (10, 7), (11, 7)])
def test_the_default_window_leaves_room_for_what_is_carried(positions, window, home, tmp_path):
    config = transformers.AutoConfig.from_pretrained(home / "model", n_positions=positions)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(home / "model").save_pretrained(tmp_path / "model")
    result = succeed("add", tmp_path / "model", "--data", home / "texts", "--out", tmp_path / "own")
    recurrence = transformers.AutoConfig.from_pretrained(tmp_path / "own").recurrence
    assert (recurrence.window, recurrence.extra_positions) == (window, window // 2), result
