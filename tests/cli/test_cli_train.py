# SPDX-License-Identifier: Apache-2.0
"""`carryforward train` as people use it: runs, resuming them, and what is refused."""

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from helpers.commands import fail, succeed
from helpers.training_runs import TRAIN, WINDOW, evaluation, write_texts
from safetensors import SafetensorError

from carryforward.models import causal_lm
from carryforward.training import base_trainer
from carryforward.training.base_trainer import BaseTrainer
from carryforward.training.callbacks import GracefulStopCallback


def test_a_run_that_only_warms_up_is_told_so(train):
    assert "steps in all, and 100 of warm-up: the learning rate stays small" in succeed(*train, "--no-validation").err
    again = [*train[:-1], f"{train[-1]}-2", "--warmup-steps", 2]
    assert "of warm-up" not in succeed(*again, "--no-validation").err


def test_validation_data_without_splits_is_read_whole(train, home, tmp_path):
    text = b"a few words that are held out, and some more of them"
    texts = write_texts(tmp_path / "held", **{f"t{i}": text for i in range(30)})
    result = succeed(*train, "--validation-data", texts)
    assert "validation: held, 30 documents" in result.err
    (tmp_path / "one.txt").write_bytes(text)
    again = [*train[:-1], f"{train[-1]}-2"]
    assert "validation: one, 1 document," in succeed(*again, "--validation-data", tmp_path / "one.txt").err


def test_what_is_of_training_may_change(trained, train):
    again = ["train", "--model", trained, *train[3:]]
    succeed(*again, "--keep-windows", 0, "--bptt-windows", 2, "--block-windows", 3)
    recurrence = json.loads((Path(train[-1]) / "config.json").read_text())["recurrence"]
    assert (recurrence["keep_windows"], recurrence["bptt_windows"], recurrence["block_windows"]) == (0, 2, 3)
    same = ["--memory", "kv", "--window", WINDOW, "--recent", 3, "--sinks", 3, "--overlap", 0]
    succeed(*again[:-1], f"{train[-1]}-2", *same)


def test_a_plain_model_is_trained_in_the_same_loop(train, home, tmp_path):
    record = json.loads(succeed(*train, "--no-recurrence", "--json").out)
    own = train[-1]
    assert record["status"] == "finished"
    model = transformers.AutoModelForCausalLM.from_pretrained(own)
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert not torch.equal(
        model.lm_head.weight, transformers.AutoModelForCausalLM.from_pretrained(home / "model").lm_head.weight
    )
    (result,) = json.loads(succeed(*evaluation(own, home, "--json")).out)
    assert result["model"]["window"] == WINDOW, "as it was trained"
    assert [row["use_state"] for row in result["rows"]] == [False]


def test_a_checkpoint_of_a_plain_run_is_a_plain_model(train, home):
    succeed(*train, "--no-recurrence", "--save-tokens", 100)
    checkpoint = sorted(train[-1].glob("checkpoint-*"))[0]
    (result,) = json.loads(succeed(*evaluation(checkpoint, home, "--json")).out)
    assert not result["model"]["recurrent"]


def test_a_learning_rate_that_diverges_is_passed_over(train, measured_once, monkeypatch):
    used, resolve = [], BaseTrainer._resolve_block_windows
    monkeypatch.setattr(BaseTrainer, "_resolve_block_windows", lambda *args: used.append(resolve(*args)) or used[-1])
    arguments = ["--learning-rate", 1e-3, 1e30, "--warmup-steps", 0, "--search-tokens", 100, "--json"]
    record = json.loads(succeed(*train, *arguments).out)
    assert [trial["rates"][0] for trial in record["search"]] == [1e-3, 1e30]
    assert record["search"][1]["word_perplexity"] is None
    assert record["chosen"]["learning_rate"] == 1e-3
    assert used == [record["block_windows"]] * 3, "all trials run like the training itself"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], 7),
        (["--block-windows", 3, "--no-recurrence"], 3),
        (["--block-windows", 3, "--preset", "paper"], 1),
    ],
)
def test_the_number_of_windows_side_by_side_is_recorded(train, measured_once, arguments, expected):
    succeed(*train, *arguments, "--train-tokens", 100, "--no-validation")
    assert json.loads((train[-1] / "run.json").read_text())["block_windows"] == expected


@pytest.fixture
def measured_once(monkeypatch):
    """ "auto" is measured to 7, at most once."""
    numbers = iter([7])
    monkeypatch.setattr(base_trainer, "measure_block_windows", lambda *args: next(numbers))


# --- resuming --------------------------------------------------------------------------------------------------------


def test_the_same_command_again_is_finished(trained, home):
    before = (trained / "model.safetensors").read_bytes()
    again = succeed("train", "--model", home / "model", "--data", home / "texts", *TRAIN, "--out", trained)
    assert f"{trained} is finished already" in again.err
    assert (trained / "model.safetensors").read_bytes() == before


def test_other_settings_in_the_same_folder_are_refused(trained, home):
    other = ["--model", home / "model", "--data", home / "texts", *TRAIN, "--out", trained, "--seed", 7, "--recent", 2]
    message = fail("train", *other, code=2)
    assert "seed: 0 there, 7 here" in message
    assert "recent: None there, 2 here" in message
    assert "Use another --out" in message


def test_ctrl_c_saves_and_the_same_command_goes_on(train, interrupted, monkeypatch):
    own = train[-1]
    assert f"saved in {own}. To resume, run the same command again" in interrupted(*train)
    (checkpoint,) = own.glob("checkpoint-*")
    assert f"newest checkpoint is {checkpoint}" in fail("evaluate", own, "--data", "x", code=2)
    before = json.loads((checkpoint / "block_windows.json").read_text())
    monkeypatch.setattr(base_trainer, "measure_block_windows", None)
    record = json.loads(succeed(*train, "--json").out)
    assert record["status"] == "finished"
    assert record["block_windows"] == before["block_windows"]


def test_a_stop_is_no_epochs_end():
    stop = GracefulStopCallback()
    for stopped, epoch, goes_on in ((False, 0.2, True), (True, 0.2, False), (True, 1.0, True)):
        stop.stopped = stopped
        control = transformers.TrainerControl(should_evaluate=True, should_save=True)
        stop.on_epoch_end(None, transformers.TrainerState(epoch=epoch), control)
        assert (control.should_evaluate, control.should_save) == (goes_on, goes_on)


def test_a_checkpoint_cut_short_is_passed_over(train, interrupted, caplog):
    interrupted(*train, "--save-tokens", 50)
    *_, newest = sorted(train[-1].glob("checkpoint-*"))
    os.truncate(newest / "optimizer.pt", 100)
    assert json.loads(succeed(*train, "--save-tokens", 50, "--json").out)["status"] == "finished"
    assert f"{newest} is incomplete and is made again" in caplog.text


def test_a_run_does_not_go_on_with_other_data(train, home, tmp_path, monkeypatch):
    texts = shutil.copytree(home / "texts", tmp_path / "texts")
    command = [texts if argument == home / "texts" else argument for argument in train]
    monkeypatch.setattr("carryforward.training.train.train_until_done", _interrupt)
    fail(*command, code=130)
    monkeypatch.undo()
    (texts / "more.txt").write_text("More of it. " * 50)
    assert "belongs to a run with other data or processes" in fail(*command, code=2)


def _interrupt(*args):
    raise KeyboardInterrupt


def test_a_corrected_command_may_use_the_folder(train, home):
    assert "choose one" in fail(*train, "--carry-state", "--no-recurrence", code=2)
    assert "frobnicate is not supported" in fail(*train, "--report-to", "frobnicate", code=2)
    succeed(*train)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", 0], "--batch-size 0: it must be at least 1"),
        (["--learning-rate", 1e-4, 0], "--learning-rate 0.0001 0.0: learning rates must be above 0"),
        (["--epochs", 0], "--epochs 0.0: it must be above 0"),
        (["--warmup-steps", -1], "--warmup-steps -1: it must be at least 0"),
        (["--preset", "paper", "--insert-at", "last"], "--insert-at last: give layer numbers from 1, or all"),
        (["--no-recurrence", "--freeze-base"], "choose one"),
        (["--block-windows", 0], "--block-windows 0: give a number from 1, or auto"),
        (["--keep-windows", "-1"], "--keep-windows -1: give a number from 0, or auto"),
        (["--device", "tpu"], "--device tpu: training uses the GPU if there is one, or cpu"),
    ],
)
def test_settings_that_make_no_sense_leave_no_run_behind(train, arguments, message):
    assert message in fail(*train, *arguments, code=2)
    assert not train[-1].exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "there is no text in this folder. Accepted: "),
        ({"a": b" ", "b": b"\n", "c": b""}, "every document is empty or only white space"),
        ({"a": b"caf\xe9", "b": b"caf\xe9", "c": b"caf\xe9"}, "is not UTF-8 (byte 0xe9 at offset 3). Convert it"),
        ({"a": b"x", "b": b"x", "c": b"x"}, "no document has a second token to predict. Use longer documents."),
        ({"a": b"only one"}, "has no validation split (it has: train). Give --validation-data, or --no-validation"),
    ],
)
def test_texts_that_cannot_be_used(home, tmp_path, files, message):
    texts = write_texts(tmp_path / "texts", **files)
    error = fail("train", "--model", home / "model", "--data", texts, *TRAIN, "--out", tmp_path / "own", code=2)
    assert message in error
    assert "texts" in error or "documents" in error


def test_a_folder_that_is_not_a_run(train):
    own = write_texts(train[-1], notes=b"precious")
    assert f"--out {own} exists and is not a run of carryforward. Use another folder." in fail(*train, code=2)
    assert [path.name for path in own.iterdir()] == ["notes.txt"]


def test_no_room_for_tokens(train, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("CARRYFORWARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(np, "savez", full)
    message = fail(*train, code=1)
    assert f"The disk is full: the tokens of texts (train) need about 1 MB in {tmp_path / 'cache'}" in message
    assert not list((tmp_path / "cache").iterdir())


def test_no_room_for_a_checkpoint_and_then_some(train, monkeypatch):
    """The second save fails as safetensors does; the first stays, and the same command goes on from it."""
    save, saved = causal_lm.RecurrentForCausalLM.save_pretrained, []

    def full(self, directory, **kwargs):
        saved.append(directory)
        if len(saved) > 1:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save(self, directory, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(causal_lm.RecurrentForCausalLM, "save_pretrained", full)
        message = fail(*train, "--save-tokens", 100, code=1)
    assert "The disk is full" in message
    assert "run the same command again: what was saved is complete" in message
    (checkpoint,) = train[-1].glob("checkpoint-*")
    evaluate = ["evaluate", checkpoint, "--data", train[4], "--no-control", "--json"]
    (result,) = json.loads(succeed(*evaluate).out)
    assert result["model"]["base"] == str(train[2]), "a checkpoint knows its run"
    assert json.loads(succeed(*train, "--save-tokens", 100, "--json").out)["status"] == "finished"


def test_weights_that_are_not_numbers(home, tmp_path):
    bad = shutil.copytree(home / "model", tmp_path / "bad")
    model = transformers.AutoModelForCausalLM.from_pretrained(bad)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] = torch.nan
    model.save_pretrained(bad)
    train = ["train", "--model", bad, "--data", home / "texts", *TRAIN, "--out", tmp_path / "own"]
    assert "norm became nan at step 1" in fail(*train, code=1)
    message = fail(*evaluation(bad, home, "--window", WINDOW, "--json"), code=1)
    assert f"{bad} gives no finite likelihoods at overlap 0: its weights hold NaN" in message


def test_a_loss_that_explodes_leaves_what_was_saved(train):
    arguments = ["--learning-rate", 1e30, "--warmup-steps", 0, "--max-grad-norm", 0, "--save-tokens", 20]
    message = fail(*train, *arguments, code=1)
    assert "became" in message
    assert "Use a smaller learning rate" in message
    assert list(train[-1].glob("checkpoint-*"))
