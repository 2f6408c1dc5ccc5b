# SPDX-License-Identifier: Apache-2.0
"""The memory that `carryforward train` gives a model: the default, choices, and what is refused."""

import json

import pytest
import transformers
from helpers.commands import fail, succeed
from helpers.training_runs import WINDOW, evaluation

import carryforward as cf

VECTOR, KV = cf.VectorMemoryConfig(), cf.KVMemoryConfig(recent=3, sinks=3)


@pytest.mark.parametrize(
    ("options", "memories"),
    [
        ([], [KV]),
        (["--preset", "paper"], [VECTOR]),
        (["--memory", "kv", "vector"], [VECTOR, KV]),
        (["--preset", "paper", "--memory", "kv"], [KV]),
        (["--memory", "vector", "--slots", 2], [cf.VectorMemoryConfig(slots=2)]),
        (["--memory=vector", "--memory=kv", "--recent", 2, "--sinks", 0, "--pooling", "max"],
         [cf.VectorMemoryConfig(pooling="max"), cf.KVMemoryConfig(recent=2, sinks=0)]),
        (["--reach", 20], [cf.KVMemoryConfig(recent=16, sinks=4)]),
        (["--reach=2KB", "--sinks", 0], [cf.KVMemoryConfig(recent=7, sinks=0)]),
        (["--recent", 4, "--far", 4, "--selection", "dissimilar", "--sinks", 0],
         [cf.KVMemoryConfig(recent=4, sinks=0, far=4, selection="dissimilar")]),
        (["--memory", "tokens", "--memory-tokens", 3], [cf.TokenMemoryConfig(memory_tokens=3)]),
        (["--memory", "associative", "kv", "--memory-tokens", 2, "--key-size", 5, "--sinks", 1, "--recent", 3],
         [cf.KVMemoryConfig(recent=3, sinks=1), cf.AssociativeMemoryConfig(memory_tokens=2, key_size=5)]),
    ],
    ids=["default", "paper", "both", "kv", "vectors", "fields", "reach", "memory", "far", "tokens", "associative"],
)  # fmt: skip
def test_the_memory_is_chosen_and_said(train, home, options, memories):
    result = succeed(*train, *options)
    assert " tokens, validation word perplexity " in result.out
    model = cf.RecurrentForCausalLM.from_pretrained(train[-1])
    assert model.config.recurrence == cf.RecurrenceConfig(window=WINDOW, memory=memories)
    notes = [line for line in result.err.splitlines() if line.startswith(("windows of", "memory: "))]
    expected = [f"memory: {memory.describe()}. {memory.usage_note()}" for memory in memories]
    assert notes == [f"windows of {WINDOW} tokens", *expected]
    if model.memory.get("kv") is not None:
        assert model.memory.kv.position_offsets.abs().mean() > 1e-3, "measured before training"
    (scores,) = json.loads(succeed(*evaluation(train[-1], home, "--json")).out)
    assert [row["use_state"] for row in scores["rows"]] == [True, False]
    assert scores["rows"][0]["word_perplexity"] != scores["rows"][1]["word_perplexity"]


def test_a_search_says_the_memory_once(train):
    result = succeed(*train, "--learning-rate", 1e-3, 2e-3, "--search-tokens", 100)
    assert result.err.count("memory: keys and values of the 3 most recent positions and the first 3. ") == 1


@pytest.mark.parametrize(("positions", "window"), [(512, 341), (9, 6)])
@pytest.mark.parametrize("recurrence", [True, False], ids=["recurrent", "plain"])
def test_the_default_window_leaves_room_for_what_is_carried(home, tmp_path, positions, window, recurrence):
    config = transformers.AutoConfig.from_pretrained(home / "model", n_positions=positions)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(home / "model").save_pretrained(tmp_path / "model")
    run = ["train", "--model", tmp_path / "model", "--data", home / "texts", "--train-tokens", 100, "--out"]
    succeed(*run, tmp_path / "own", *([] if recurrence else ["--no-recurrence"]))
    assert json.loads((tmp_path / "own" / "run.json").read_text())["circumstances"]["window"] == window
    if recurrence:
        config = transformers.AutoConfig.from_pretrained(tmp_path / "own").recurrence
        assert (config.window, config.extra_positions) == (window, window // 2)


def test_a_window_too_long_for_what_is_carried(train):
    message = fail(*train, "--window", 24, "--recent", 12, code=2)
    assert (
        "window=24 with 16 positions carried in front of it exceeds the 32 learned positions that gpt2 has" in message
    )
    assert "Use window=16 or less" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "other"], "--preset other: it must be one of recommended, paper"),
        (["--memory", "other"], "memory='other': the kinds of memory are 'vector', 'kv'"),
        (["--slots", 2], "--slots is an option of the memory vector, and the memory is kv. Use --memory vector, or "
         "--memory kv vector for both, or leave it out."),
        (["--preset", "paper", "--recent", 2], "--recent is an option of the memory kv, and the memory is vector. Use "
         "--memory kv, or --memory vector kv for both, or leave it out."),
        (["--memory", "kv", "--no-residual"], "--residual is an option of the memory vector, and the memory is kv."),
        (["--recent", 0], "--recent 0: it must be at least 1"),
        (["--recent", 19, "--sinks", 4], "23 positions carried in front of it exceeds the 32 learned positions"),
        (["--reach", 21], "leave 20 beside a window of 12 tokens. Use reach=20 or less"),
        (["--reach", 9, "--recent", 2], "so does --recent. Leave one of them out."),
        (["--reach", 9, "--memory", "vector"], "--reach is an option of the memory kv, and the memory is vector."),
        (["--reach", 9, "--memory", "kv", "vector"], "and the memory is 'vector' and 'kv'. Use memory='kv', or leave"),
        (["--selection", "merged"], "none are carried. Give --far as well"),
        (["--memory", "tokens"], "window=12 with 32 memory positions exceeds the 32 learned positions that gpt2 has. "
         "Use fewer memory tokens, which take 32 of them."),
        (["--memory", "tokens", "--recent", 4], "--recent is an option of the memory kv, and the memory is tokens. Use "
         "--memory kv, or leave it out."),
        (["--memory-tokens", 4], "--memory-tokens is an option of the memory tokens or associative, and the memory is "
         "kv. Use --memory tokens, or leave it out."),
        (["--key-size", 4], "--key-size is an option of the memory associative, and the memory is kv. Use --memory "
         "associative, or --memory kv associative for both, or leave it out."),
        (["--memory", "associative", "--memory-tokens", 0], "--memory-tokens 0: it must be at least 1"),
        (["--memory", "tokens", "kv"], "'tokens' cannot stand beside 'kv'. Use 'tokens' alone."),
    ],
)  # fmt: skip
def test_a_memory_that_cannot_be(train, options, message):
    assert message in fail(*train, *options, code=2)
    assert not train[-1].exists()


def test_a_recurrent_model_accepts_its_own_reach(trained, train):
    succeed("train", "--model", trained, *train[3:], "--reach", 6)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--memory", "kv"], "--memory"),
        (["--recent", 2], "--recent"),
        (["--reach", 9], "--reach"),
        (["--slots", 4, "--sinks", 0, "--memory", "vector"], "--memory, --sinks, --slots"),
        (["--bptt-windows", 2, "--no-residual"], "--residual, --bptt-windows"),
    ],
)
def test_what_is_of_no_use_without_a_state_is_refused(train, options, names):
    message = fail(*train, "--no-recurrence", *options, code=2)
    assert f"{names}: no effect with --no-recurrence, which carries nothing. Leave it out." in message
    assert not train[-1].exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "paper"], "is recurrent already. Leave --preset out"),
        (["--memory", "vector"], "is recurrent already, with the memory kv. Leave out --memory"),
        (["--memory", "kv", "vector"], "is recurrent already, with the memory kv. Leave out --memory"),
        (["--memory", "vector", "--slots", 2], "with the memory kv. Leave out --memory and options of other memories."),
        (["--recent", 2], "is recurrent already, with recent=3. Leave these out."),
        (["--reach", 7], "is recurrent already, with recent=3. Leave these out."),
        (["--far", 2], "is recurrent already, with far=0. Leave these out."),
        (["--window", 13, "--sinks", 2], "is recurrent already, with window=12, sinks=3. Leave these out."),
    ],
)
def test_a_recurrent_model_keeps_its_memory(trained, train, options, message):
    assert message in fail("train", "--model", trained, *train[3:], *options, code=2)
    assert not train[-1].exists()
