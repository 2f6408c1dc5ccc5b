# SPDX-License-Identifier: Apache-2.0
"""`carryforward memory-tasks` as people use it, with tiny models."""

import json
import signal

import pytest
from helpers.commands import fail, run, succeed

from carryforward.models.causal_lm import RecurrentForCausalLM
from carryforward.tasks import memory_tasks, train

TINY = ["--layers", 1, "--width", 16, "--heads", 2, "--batch-size", 4, "--samples", 10, "--validation-samples", 4,
        "--device", "cpu"]  # fmt: skip
TOKENS = ["--memory", "tokens", "--memory-tokens", 2]


def retrieval(out, *more):
    return ["memory-tasks", "retrieval", *TINY, "--train-sizes", 1, 2, "--test-sizes", 1, 3, "--out", out, *more]


def copy(out, *more):
    return ["memory-tasks", "copy", *TINY, "--symbols", 4, "--windows", 3, "--out", out, *more]


def test_a_folder_with_result_figure_and_model(tmp_path):
    out = tmp_path / "a"
    printed = succeed(*retrieval(out, *TOKENS, "--mode", "remember", "--steps", 4, "--validate-every", 2)).out
    result = json.loads((out / "result.json").read_text())
    assert {"commit", "seed", "settings", "hardware", "versions", "command"} <= result.keys()
    assert [score["size"] for score in result["scores"]] == [1, 3]
    assert [score["windows"] for score in result["scores"]] == [2, 4]
    for score in result["scores"]:
        assert score["samples"] == sum(depth["samples"] for depth in score["by_depth"]) == 10
        assert [*score["controls"]] == ["memory reset", "no memory"]
        assert score["interval"][0] <= score["whole"] <= score["interval"][1]
    assert result["about"] == {"mode": "remember", "key_symbols": 3, "window": 5}
    assert result["model"]["recurrence"]["memory"] == [{"kind": "tokens", "memory_tokens": 2}]
    assert [one["step"] for one in result["training"]["validations"]] == [2, 4]
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 2
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert RecurrentForCausalLM.from_pretrained(out / "model").config.recurrence.window == 5


def test_a_saved_model_is_tested_again_with_the_same_result(tmp_path):
    succeed(*copy(tmp_path / "a", *TOKENS, "--steps", 3))
    again = copy(tmp_path / "b", "--model", tmp_path / "a" / "model", "--steps", 0, "--json")
    result, first = json.loads(succeed(*again).out), json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["scores"] == first["scores"]
    assert result["training"] is None
    assert not (tmp_path / "b" / "model").exists()


def test_the_same_command_again_returns_the_result_and_another_is_refused(tmp_path):
    command = copy(tmp_path / "a", *TOKENS, "--steps", 2)
    before = succeed(*command).out
    again = succeed(*command)
    assert again.out == before
    assert "finished already" in again.err
    assert "steps: 2 there, 3 here" in fail(*copy(tmp_path / "a", *TOKENS, "--steps", 3), code=2)
    reverse = ["memory-tasks", "reverse", *command[2:]]
    assert "task: copy there, reverse here" in fail(*reverse, code=2)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "exists and is not of `carryforward memory-tasks`" in fail(*copy(tmp_path, "--steps", 1), code=2)


def test_the_same_command_goes_on_after_an_interruption(tmp_path, monkeypatch):
    """While training, then while testing; the result is that of a run without interruptions."""
    whole = json.loads(succeed(*copy(tmp_path / "whole", *TOKENS, "--steps", 5, "--json")).out)
    out, command = tmp_path / "a", copy(tmp_path / "a", *TOKENS, "--steps", 5, "--json")
    step = train._Run._step

    def interrupt(self, size):
        step(self, size)
        if self.curve.steps == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train._Run, "_step", interrupt)
    result = run(*command)
    assert (result.code, result.out) == (130, "")
    assert f"interrupted: the training is saved in {out}. To go on, run the same command" in " ".join(
        result.err.split()
    )
    monkeypatch.undo()
    monkeypatch.setattr(memory_tasks, "score_task", lambda *args, **kwargs: signal.raise_signal(signal.SIGINT))
    assert run(*command).code == 130
    assert not (out / "result.json").exists()
    monkeypatch.undo()
    result = json.loads(succeed(*command).out)
    assert result["scores"] == whole["scores"]
    assert result["training"]["validations"] == whole["training"]["validations"]
    assert sorted(path.name for path in out.iterdir()) == ["accuracy.png", "model", "result.json", "settings.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "forget"], "--mode forget: it must be rewrite or remember"),
        (["--mode", "rewrite", "--key-symbols", 2], "the 16 keys of rewrite have one symbol"),
        (["--steps", -1], "--steps -1: it must be at least 0"),
        (["--backbone", "bert"], "--backbone bert: it must be one of llama, gpt2"),
        (["--memory-tokens", 2], "--memory-tokens is an option of the memory tokens or associative"),
        (["--stop-accuracy", 1.1], "--stop-accuracy 1.1: it must be above 0 and at most 1"),
        (["--overlap", 1], "No such option"),
    ],
)
def test_wrong_options_are_refused(tmp_path, arguments, message):
    assert message in fail(*retrieval(tmp_path / "a", *arguments), code=2)
    assert not (tmp_path / "a").exists()


def test_a_model_of_another_task_is_refused(tmp_path):
    succeed(*copy(tmp_path / "a", *TOKENS, "--steps", 1))
    message = fail(*retrieval(tmp_path / "b", "--model", tmp_path / "a" / "model"), code=2)
    assert "model has 18 tokens and retrieval has 19" in message
