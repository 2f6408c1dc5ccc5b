# SPDX-License-Identifier: Apache-2.0
"""A training run has one number of windows side by side, from its first step to its last."""

import json
import shutil

import pytest
import torch
from helpers.trainers import DROPOUT, Watch, assert_identical, leave_free, trainer, weights

from carryforward.engine import activation_budget
from carryforward.training import base_trainer
from carryforward.utils import checkpoints

KV = {"slots": 0, "recent": 4, "sinks": 1}
RUN = {"fields": KV, "settings": DROPOUT, "train_tokens": 300, "eval_tokens": 10**6, "load_best_model_at_end": False}


@pytest.fixture
def measured(monkeypatch):
    """Set what "auto" is measured to; returns how often it was."""
    calls = []

    def set_to(number):
        monkeypatch.setattr(base_trainer, "measure_block_windows", lambda model, rows: calls.append(rows) or number)
        return calls

    return set_to


@pytest.fixture
def restored_memory(monkeypatch):
    monkeypatch.setattr(activation_budget, "available_memory", activation_budget.available_memory)


def stop(state, control):
    control.should_save = control.should_training_stop = state.global_step == 3


def stored(checkpoint):
    return json.loads((checkpoint / "block_windows.json").read_text())["block_windows"]


@pytest.mark.usefixtures("restored_memory")
def test_resumed_with_other_memory_equals_never_stopped(tmp_path):
    """With dropout, whose random numbers are drawn block by block."""
    jobs = {}
    for name, callbacks, fitting in (("whole", [], 2), ("stopped", [Watch(stop)], 2), ("other", [], 1)):
        jobs[name] = trainer(tmp_path / name, callbacks=callbacks, **RUN)
        leave_free(jobs[name], fitting)
        jobs[name].train()
        assert jobs[name].block_windows == fitting
    again = trainer(tmp_path / "stopped", **RUN)
    leave_free(again, 1)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == jobs["whole"].state.global_step > 4
    assert again.block_windows == again.inner.block_size.resolved == 2
    assert_identical(weights(again.model), weights(jobs["whole"].model))
    assert not torch.equal(jobs["other"].inner.base.lm_head.weight, again.inner.base.lm_head.weight)
    for checkpoint in checkpoints.list_checkpoints(tmp_path / "stopped"):
        assert stored(checkpoint) == 2
        assert "block_windows.json" in json.loads((checkpoint / "complete.json").read_text())["digests"]


def test_it_is_measured_once_a_run(tmp_path, measured):
    calls = measured(3)
    job = trainer(tmp_path, callbacks=[Watch(stop)], **RUN)
    job.train()
    assert calls == [2]
    calls = measured(5)
    trainer(tmp_path, **RUN).train(resume_from_checkpoint=True)
    assert calls == [2]
    assert {stored(path) for path in checkpoints.list_checkpoints(tmp_path)} == {3}


def test_a_resumed_run_may_not_change_it(tmp_path, measured):
    measured(3)
    trainer(tmp_path / "run", callbacks=[Watch(stop)], **RUN).train()
    own = tmp_path / "run" / "checkpoint-3"
    for given in (1, 4):
        job = trainer(tmp_path / "run", **RUN | {"fields": KV | {"block_windows": given}})
        before = weights(job.model)
        with pytest.raises(ValueError, match=rf"block_windows: .*checkpoint-3 was trained with 3 .* has {given}\. .*"
                           r'Set block_windows to 3 or "auto", or use another output_dir\.'):  # fmt: skip
            job.train(resume_from_checkpoint=True)
        assert job.state.global_step == 3
        assert before.keys() == weights(job.model).keys()
    ends = []
    for given in ("auto", 3):
        folder = shutil.copytree(tmp_path / "run", tmp_path / str(given))
        job = trainer(folder, **RUN | {"fields": KV | {"block_windows": given}})
        job.train(resume_from_checkpoint=True)
        ends.append(weights(job.model))
    assert_identical(*ends)
    assert own.exists()


@pytest.mark.parametrize(
    ("fields", "arguments", "expected"),
    [
        ({}, {}, 1),
        ({"block_windows": 4}, {}, 1),
        ({"block_windows": 4}, {"use_state": False}, 4),
        ({}, {"use_state": False}, 7),
        (KV, {}, 7),
        (KV | {"block_windows": 2}, {}, 2),
        (KV, {"use_state": False}, 7),
    ],
)
def test_what_a_run_records(tmp_path, measured, fields, arguments, expected):
    measured(7)
    short = {"train_tokens": 30, "eval_tokens": 10**6, "load_best_model_at_end": False}
    job = trainer(tmp_path, fields=fields, **short, **arguments)
    job.train()
    assert job.block_windows == stored(checkpoints.latest_checkpoint(tmp_path)) == expected
    assert job.inner.config.recurrence.block_windows == fields.get("block_windows", "auto")
    given = expected != 7
    assert job.inner.block_size.resolved == (None if given else 7)
    used = job.inner.block_size.windows(job.inner, 2, use_state=job.args.use_state, logits=False)
    assert used == expected
