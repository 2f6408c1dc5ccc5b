# SPDX-License-Identifier: Apache-2.0
"""A run that was killed or stopped anywhere resumes exactly."""

import json
import multiprocessing
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers.trainers import DROPOUT, Watch, assert_identical, trainer, weights

from carryforward.utils import checkpoints, files

LONG = {"settings": DROPOUT, "num_train_epochs": 2, "save_tokens": 70}


def _die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def _doomed(out, moment):
    """Train, and be killed at a moment."""
    job = trainer(out, **LONG)
    if moment.startswith("step"):
        number = int(moment.split()[1])
        job.add_callback(Watch(lambda state, control: state.global_step == number and _die()))
    elif moment == "weights written":  # of the second checkpoint
        save = job._save_optimizer_and_scheduler
        job._save_optimizer_and_scheduler = lambda folder: _die() if checkpoints.list_checkpoints(out) else save(folder)
    elif moment == "before the rename":
        seal = checkpoints.seal
        checkpoints.seal = lambda folder: (seal(folder), len(checkpoints.list_checkpoints(out)) > 1 and _die())
    elif moment == "deleting an old one":
        rmtree = shutil.rmtree
        files.shutil.rmtree = lambda path, **kwargs: (
            _die() if str(path).endswith(".deleted") else rmtree(path, **kwargs)
        )
    elif moment == "validating":
        job._perplexity = _die
    job.train(resume_from_checkpoint=True)


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    job = trainer(tmp_path_factory.mktemp("whole"), **LONG)
    job.train()
    return job


@pytest.mark.parametrize("fields", [{}, {"slots": 0, "recent": 4, "sinks": 1}], ids=["vector", "kv"])
def test_resumed_with_a_carried_state_equals_never_stopped(tmp_path, fields):
    carrying = LONG | {"carry_state": True, "fields": fields}
    whole = trainer(tmp_path / "whole", **carrying)
    whole.train()
    trainer(tmp_path / "stopped", callbacks=[Watch(_stop_at(4))], **carrying).train()
    again = trainer(tmp_path / "stopped", **carrying)
    again.train(resume_from_checkpoint=True)
    assert_identical(weights(again.model), weights(whole.model))


@pytest.mark.parametrize(
    "moments",
    [["step 1"], ["step 7", "step 13"], ["weights written"], ["before the rename"], ["deleting an old one"],
     ["validating"]],
    ids=", ".join,
)  # fmt: skip
def test_killed_and_resumed_equals_never_stopped(never_stopped, tmp_path, moments):
    for moment in moments:
        child = multiprocessing.get_context("fork").Process(target=_doomed, args=(tmp_path, moment))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    job = trainer(tmp_path, **LONG)
    job.train(resume_from_checkpoint=True)
    assert job.state.global_step == never_stopped.state.global_step
    assert_identical(weights(job.model), weights(never_stopped.model))
    states = [run.optimizer.state_dict()["state"] for run in (job, never_stopped)]
    assert all(torch.equal(states[0][i]["exp_avg_sq"], state["exp_avg_sq"]) for i, state in states[1].items())
    assert job.state.best_metric == never_stopped.state.best_metric


@pytest.mark.parametrize(
    ("harm", "verdict"),
    [
        (lambda raw: raw[:-10], "incomplete"),
        (lambda raw: bytes(len(raw)), "damaged (optimizer.pt)"),
        (lambda raw: raw[:99] + bytes([raw[99] ^ 4]) + raw[100:], "damaged (optimizer.pt)"),
    ],
    ids=["cut short", "zeroed", "one bit"],
)
def test_a_damaged_checkpoint_is_passed_over(never_stopped, tmp_path, caplog, harm, verdict):
    job = trainer(tmp_path, callbacks=[Watch(_stop_at(8))], **LONG)
    job.train()
    newest, older = reversed(checkpoints.list_checkpoints(tmp_path)[-2:])
    file = newest / "optimizer.pt"
    file.write_bytes(harm(file.read_bytes()))
    assert checkpoints.latest_checkpoint(tmp_path) == older
    assert f"{newest} is {verdict}" in caplog.text
    with pytest.raises(ValueError, match=f"does not exist or is {re.escape(verdict)}"):
        trainer(tmp_path, **LONG).train(resume_from_checkpoint=str(newest))
    again = trainer(tmp_path, **LONG)
    again.train(resume_from_checkpoint=True)
    assert_identical(weights(again.model), weights(never_stopped.model))
    with pytest.raises(ValueError, match="does not exist or is incomplete"):
        trainer(tmp_path, **LONG).train(resume_from_checkpoint=str(tmp_path / "checkpoint-99"))


def test_resumed_from_its_last_checkpoint_a_run_trains_no_further(tmp_path):
    """In the middle of an epoch, `Trainer` by itself would train one more step."""
    whole = trainer(tmp_path, settings=DROPOUT, train_tokens=300, load_best_model_at_end=False)
    whole.train()
    again = trainer(tmp_path, settings=DROPOUT, train_tokens=300, load_best_model_at_end=False)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == whole.state.global_step
    assert_identical(weights(again.model), weights(whole.model))


def test_a_damaged_checkpoint_does_not_cost_the_good_ones(tmp_path):
    trainer(tmp_path, callbacks=[Watch(_stop_at(9))], **LONG).train()
    newest = checkpoints.list_checkpoints(tmp_path)[-1]
    damaged = newest.with_name("checkpoint-99")
    newest.rename(damaged)
    (damaged / "optimizer.pt").write_bytes(b"")
    job = trainer(tmp_path, callbacks=[Watch(_stop_at(11))], **LONG)
    job.train(resume_from_checkpoint=True)
    assert checkpoints.latest_checkpoint(tmp_path).name == "checkpoint-11"
    assert not damaged.exists()


@pytest.mark.parametrize("harm", [shutil.rmtree, lambda folder: (folder / "model.safetensors").write_bytes(b"")])
def test_a_best_checkpoint_that_is_lost_is_not_claimed(tmp_path, harm, caplog):
    trainer(tmp_path, callbacks=[Watch(_stop_at(9))], **LONG).train()
    job = trainer(tmp_path, **LONG)
    state = json.loads((checkpoints.latest_checkpoint(tmp_path) / "trainer_state.json").read_text())
    harm(Path(state["best_model_checkpoint"]))
    job.train(resume_from_checkpoint=True)
    assert job.state.best_metric == pytest.approx(job.evaluate()["eval_word_perplexity"])


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("best_at_end", [True, False])
@pytest.mark.parametrize(
    ("short", "long"),
    [({"num_train_epochs": 1}, {"num_train_epochs": 3}), ({"train_tokens": 200}, {"train_tokens": 700})],
    ids=["epochs", "tokens"],
)
def test_a_run_that_is_continued_equals_one_planned_longer(tmp_path, short, long, best_at_end, killed):
    """The validation of the last step, which no interval asks for, is forgotten, whether it was the best or not."""
    settings = {"settings": DROPOUT, "learning_rate": 1e-3 if best_at_end else 0.3}
    whole = trainer(tmp_path / "whole", **settings, **long)
    whole.train()
    first = trainer(tmp_path / "continued", **settings, **short)
    first.train()
    end = first.state.global_step
    assert (first.state.best_global_step == end) == best_at_end
    assert not any(entry["step"] == end for entry in _validations(whole)), "the test needs a last step of its own"
    if killed:
        stopped = trainer(tmp_path / "continued", callbacks=[Watch(_stop_at(end + 1))], **settings, **long)
        stopped.train(resume_from_checkpoint=True)
    again = trainer(tmp_path / "continued", **settings, **long)
    again.train(resume_from_checkpoint=True)
    assert_identical(weights(again.model), weights(whole.model))
    assert _validations(again) == _validations(whole)
    assert again.state.best_metric == whole.state.best_metric
    assert again.state.best_global_step == whole.state.best_global_step
    folders = [{path.name for path in checkpoints.list_checkpoints(tmp_path / run)} for run in ("continued", "whole")]
    assert folders[0] == folders[1]


def _validations(job):
    return [{**entry} for entry in job.state.log_history if "eval_loss" in entry]


def test_a_run_that_was_moved_keeps_its_best_checkpoint(tmp_path):
    settings = {"settings": DROPOUT, "learning_rate": 0.3}
    whole = trainer(tmp_path / "whole", **settings, num_train_epochs=2)
    whole.train()
    trainer(tmp_path / "here", callbacks=[Watch(_stop_at(6))], **settings, num_train_epochs=2).train()
    (tmp_path / "here").rename(tmp_path / "there")
    again = trainer(tmp_path / "there", **settings, num_train_epochs=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.best_metric == whole.state.best_metric
    assert_identical(weights(again.model), weights(whole.model))


def test_folders_of_others_are_no_checkpoints(tmp_path):
    for name in ("checkpoint-copy-5", "checkpoint-before-2026", "checkpoint-7"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-8").write_text("a file")
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == ["checkpoint-7"]


def _stop_at(step):
    def stop(state, control):
        if state.global_step == step:
            control.should_save = control.should_training_stop = True

    return stop
