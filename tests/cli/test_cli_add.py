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
    for option in ("--recent", "--sinks", "--far", "--reach"):
        message = fail(*add, tmp_path / "other", option, 2, code=2)
        assert f"{option}: --preset paper says what is carried, too. Leave one of the two out." in message
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


def test_how_far_back_a_window_sees(home, tmp_path):
    add = ["add", home / "model", "--window", 8, "--out"]  # of 32 learned positions, 2 layers of width 16
    result = succeed(*add, tmp_path / "positions", "--reach", 20)
    assert "keys and values of the 16 most recent positions and the first 4" in result.out
    result = succeed(*add, tmp_path / "memory", "--reach", "5KB")  # 256 bytes a position
    assert "keys and values of the 15 most recent positions and the first 4" in result.out
    result = succeed(*add, tmp_path / "far", "--recent", 9, "--sinks", 1, "--far", 6, "--selection", "merged")
    assert "the 9 most recent positions and the first 1 and 6 far ones (merged)" in result.out
    memory = cf.KVMemoryConfig(recent=9, sinks=1, far=6, selection="merged")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "far").recurrence.memories == (memory,)
    lookup = ["--recent", 8, "--sinks", 1, "--far", 4, "--selection", "lookup", "--group", 2, "--archive", 40]
    succeed(*add, tmp_path / "lookup", *lookup)
    memory = cf.KVMemoryConfig(recent=8, sinks=1, far=4, selection="lookup", group=2, archive=40)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "lookup").recurrence.memories == (memory,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reach", 25], "leave 24 beside a window of 8 tokens. Use reach=24 or less, or a smaller window"),
        (["--reach", "7KB"], "reach='7KB' takes 27 positions, and the 32 learned positions that gpt2 has leave 24"),
        (["--reach", "100 B"], "must be a number of positions, such as 2000, or memory for the state"),
        (["--reach", "0.2KB"], "the state of one position takes 0.3 KB (float32). Give at least 1KB"),
        (["--reach", 0], "reach='0' must be at least 1"),
        (
            ["--reach", 9, "--recent", 4],
            "--reach 9: it sets how many positions are carried in all, and so does --recent",
        ),
        (["--reach", 9, "--far", 4], "--reach 9: it sets how many positions are carried in all, and so does --far"),
        (["--selection", "merged"], "--selection merged: it chooses far positions, and none are carried. Give --far"),
        (
            ["--far", 2, "--selection", "best"],
            "--selection best: it must be one of attention, dissimilar, merged, lookup",
        ),
        (["--recent", 25], "exceeds the 32 learned positions that gpt2 has. Carry at most 24 positions"),
        (["--far", 4, "--group", 2], "group=2 must be left out: it needs far, and selection='merged' or 'lookup'"),
        (["--far", -1], "--far -1: it must be at least 0"),
    ],
)
def test_reaches_that_do_not_fit_are_refused_before_the_model_is_loaded(
    arguments, message, home, tmp_path, monkeypatch
):
    monkeypatch.setattr("carryforward.models.loading.load_causal", None)
    assert message in fail("add", home / "model", "--window", 8, *arguments, "--out", tmp_path / "on", code=2)
    assert not (tmp_path / "on").exists()
