# SPDX-License-Identifier: Apache-2.0
"""Training encoders: what is scored, validation, exact resuming, and two processes that train like one."""

import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import encoders, ranks, tiny
from helpers.encoders import DROPOUT, HELD_OUT, KV, MASKING, TRAIN, TWO_SIDED, labelled, trainer
from helpers.trainers import SGD, Watch, assert_identical, leave_free, weights
from torch.testing import assert_close

from carryforward.evaluation.classification import classification_score
from carryforward.evaluation.masked import masked_score
from carryforward.training.base_trainer import NonFiniteLoss
from carryforward.training.encoder_trainer import MaskedTrainer, MaskedTrainingArguments
from carryforward.utils import checkpoints

TASKS = {"sequence": "classification", "token": "token-classification"}
TOKENS = sum(map(len, TRAIN))
SLOW = ["roberta", "distilbert"]


def job(out, head=None, **arguments):
    """A trainer of any task, with documents and labels of its own."""
    if head is None:
        return trainer(out, **arguments)
    data = {"train": labelled(TASKS[head]), "held_out": labelled(TASKS[head], HELD_OUT, seed=1)}
    return trainer(out, head=head, **{**data, **arguments})


def spied(run):
    """The batches that a run computes losses of."""
    batches, compute = [], run.compute_loss

    def spying(model, inputs, *args, **kwargs):
        batches.append(inputs)
        return compute(model, inputs, *args, **kwargs)

    run.compute_loss = spying
    return batches


# --- what is trained on ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, TWO_SIDED], ids=["vector", "two-sided"])
def test_every_masked_token_is_trained_on_once_an_epoch(tmp_path, fields):
    run = trainer(tmp_path, num_train_epochs=2, held_out=None, fields=fields)
    batches = spied(run)
    run.train()
    corrupted = [
        [MASKING.corrupt(ids, run.args.seed, i, epoch=epoch) for i, ids in enumerate(TRAIN)] for epoch in (0, 1)
    ]
    expected = [sum(int((labels != -100).sum()) for _, labels in epoch) for epoch in corrupted]
    seen = [int((batch["labels"] != -100).sum()) for batch in batches]
    half = len(batches) // 2
    assert [sum(seen[:half]), sum(seen[half:])] == expected
    assert expected[0] != expected[1], "each epoch has masks of its own"
    assert run.tokens_after(half) == TOKENS
    assert run.tokens_after(len(batches)) == 2 * TOKENS


def test_the_loss_is_that_of_all_targets_of_a_step(tmp_path):
    run = trainer(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=3, train_tokens=1)
    model, nats, targets = encoders.model(), 0.0, 0
    for index in run.order.indices(0)[:3]:
        one = run.samples[0, int(index)]
        out = model(one["input_ids"][None], labels=one["labels"][None])
        nats, targets = nats + out.nll_sum.item(), targets + int(out.n_scored)
    run.train()
    assert run.state.log_history[0]["loss"] == pytest.approx(nats / targets, rel=1e-5)


def test_samples_of_windows_that_see_both_neighbours_are_whole_groups(tmp_path):
    """So a token is predicted from the same neighbours as in the whole document. The first group has no state there
    either: its loss is the same."""
    run = trainer(tmp_path, fields=TWO_SIDED, windows_per_sample=2)
    model, recurrence = run.model.eval(), run.model.config.recurrence
    capacity, group = recurrence.window - 3, recurrence.window_group.size
    for number, start, stop, score_from, score_to in run.samples.spans.tolist():
        assert start % ((group - 1) * capacity) == 0
        assert (start, stop) == (score_from, min(start + group * capacity, len(TRAIN[number])))
        assert score_to == (stop if stop == len(TRAIN[number]) else stop - capacity)
    first = run.samples.spans.tolist().index([4, 0, group * capacity, 0, (group - 1) * capacity])
    sample = run.samples[0, first]
    read, labels = MASKING.corrupt(TRAIN[4], run.args.seed, 4, epoch=0)
    labels[(group - 1) * capacity :] = -100
    with torch.no_grad():
        alone = model(sample["input_ids"][None], labels=sample["labels"][None]).nll_sum
        whole = model(torch.from_numpy(read)[None], labels=torch.from_numpy(labels)[None]).nll_sum
    assert_close(alone, whole)


@pytest.mark.parametrize("head", ["sequence", "token"])
def test_the_loss_of_a_classifier(tmp_path, head):
    """The mean over all labels of a step, not a mean of means."""
    run = job(tmp_path, head, per_device_train_batch_size=1, gradient_accumulation_steps=3, train_tokens=1)
    model, nats, targets = encoders.model("bert", head), 0.0, 0
    for index in run.order.indices(0)[:3]:
        one = run.samples[int(index)]
        logits = model(one["input_ids"][None]).logits
        nats += F.cross_entropy(logits.flatten(0, -2), one["labels"].flatten(), reduction="sum").item()
        targets += int((one["labels"] != -100).sum())
    run.train()
    assert run.state.log_history[0]["loss"] == pytest.approx(nats / targets, rel=1e-5)


def test_a_step_without_a_target_changes_nothing(tmp_path):
    """As with the shortest documents, of which no token may be chosen."""
    run = trainer(tmp_path, train=[[5], [6]], held_out=None, mask_probability=1e-6, num_train_epochs=1)
    before = weights(run.model)
    run.train()
    assert_identical(weights(run.model), before)
    assert [entry["loss"] for entry in run.state.log_history if "loss" in entry] == [0.0]


@pytest.mark.parametrize("arguments", [{"freeze_base": True}, {"use_state": False}], ids=["module alone", "plain"])
def test_only_one_part_is_trained(tmp_path, arguments):
    run = trainer(tmp_path, held_out=None, train_tokens=200, **arguments)
    before = weights(run.model)
    run.train()
    changed = {name.split(".")[0] for name, value in weights(run.model).items() if not torch.equal(value, before[name])}
    assert changed == ({"memory"} if "freeze_base" in arguments else {"base"})


def test_learning_rates_are_separate(tmp_path):
    run = trainer(tmp_path, learning_rate=1e-4, recurrence_learning_rate=1e-2)
    rates = {id(p): group["lr"] for group in run.create_optimizer().param_groups for p in group["params"]}
    assert {rates[id(p)] for p in run.model.base.parameters()} == {1e-4}
    assert {rates[id(p)] for p in run.model.memory.parameters()} == {1e-2}


@pytest.mark.parametrize("name", ["modernbert", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_families_learn(tmp_path, name):
    """One document by heart: its masks are new in every epoch, its words are not."""
    run = trainer(tmp_path, name=name, train=[np.full(60, 9)], held_out=[np.full(50, 9)], fields=KV,
                  num_train_epochs=25, learning_rate=1e-2, recurrence_learning_rate=1e-2)  # fmt: skip
    before = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] < 0.5 * before


# --- validation ------------------------------------------------------------------------------------------------------


def test_validation_is_always_the_same(tmp_path):
    """Whatever the seed of training is; and the best checkpoint is kept."""
    run = trainer(tmp_path, seed=3, learning_rate=0.05, num_train_epochs=3)
    score = masked_score(run.model, encoders.masked(HELD_OUT, seed=0))
    metrics = run.evaluate()
    assert metrics["eval_loss"] == pytest.approx(score.loss)
    assert (metrics["eval_accuracy"], metrics["eval_targets"]) == (score.accuracy, score.total.targets)
    assert run.evaluate() == metrics
    run.train()
    steps, history = zip(*((entry["step"], entry["eval_loss"]) for entry in run.validations), strict=True)
    assert min(history) == run.state.best_metric == pytest.approx(run.evaluate()["eval_loss"])
    assert run.best_validation() == min(history)
    crossed = [step for step in range(1, run.state.global_step + 1) if run.reaches(step, 150)]
    assert [*steps] == sorted({*crossed, run.state.global_step})


@pytest.mark.parametrize("head", ["sequence", "token"])
def test_classifiers_validate_after_each_epoch_and_keep_the_best(tmp_path, head):
    run = job(tmp_path, head, num_train_epochs=3, eval_tokens=10**6, learning_rate=1e-2)
    run.train()
    assert [entry["step"] for entry in run.validations] == [run.epoch_steps * epoch for epoch in (1, 2, 3)]
    assert run.state.best_metric == max(entry["eval_macro_f1"] for entry in run.validations)
    score = classification_score(run.model, labelled(TASKS[head], HELD_OUT, seed=1))
    metrics = run.evaluate()
    assert metrics["eval_macro_f1"] == pytest.approx(run.state.best_metric) == pytest.approx(score.macro_f1)
    assert metrics["eval_accuracy"] == pytest.approx(score.accuracy)
    assert run.describe_metrics(metrics).startswith("validation accuracy ")


def test_a_validation_that_is_not_a_number_is_not_saved(tmp_path):
    run = trainer(tmp_path)
    with torch.no_grad():
        run.model.base.get_input_embeddings().weight.fill_(math.nan)
    with pytest.raises(NonFiniteLoss, match="The validation loss became nan"):
        run.evaluate()


# --- resuming --------------------------------------------------------------------------------------------------------


def stop_at(step):
    def stop(state, control):
        if state.global_step == step:
            control.should_save = control.should_training_stop = True

    return Watch(stop)


@pytest.mark.parametrize(
    ("head", "fields"),
    [(None, {}), (None, KV), ("sequence", KV), pytest.param("token", {}, marks=pytest.mark.slow)],
    ids=["masked, vector", "masked, kv", "sequence", "token"],
)
def test_resumed_equals_never_stopped(tmp_path, head, fields):
    """With dropout; stopped in the first epoch and in the second."""
    settings = {"settings": DROPOUT, "fields": fields, "num_train_epochs": 2, "per_device_train_batch_size": 4}
    whole = job(tmp_path / "whole", head, **settings)
    whole.train()
    for step in (2, whole.epoch_steps + 1):
        job(tmp_path / "stopped", head, callbacks=[stop_at(step)], **settings).train(resume_from_checkpoint=True)
        assert checkpoints.latest_checkpoint(tmp_path / "stopped").name == f"checkpoint-{step}"
    again = job(tmp_path / "stopped", head, **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == whole.state.global_step
    assert_identical(weights(again.model), weights(whole.model))
    assert [entry["eval_loss"] for entry in again.validations] == [entry["eval_loss"] for entry in whole.validations]


@pytest.mark.parametrize("head", [None, pytest.param("sequence", marks=pytest.mark.slow)])
def test_a_run_that_is_continued_equals_one_planned_longer(tmp_path, head):
    whole = job(tmp_path / "whole", head, settings=DROPOUT, train_tokens=500)
    whole.train()
    job(tmp_path / "continued", head, settings=DROPOUT, train_tokens=200).train()
    again = job(tmp_path / "continued", head, settings=DROPOUT, train_tokens=500)
    again.train(resume_from_checkpoint=True)
    assert_identical(weights(again.model), weights(whole.model))
    assert again.validations == whole.validations
    assert again.state.best_global_step == whole.state.best_global_step


# --- several processes -----------------------------------------------------------------------------------------------


def on_two_ranks(rank, folder, head, fields):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    run = job(folder, head, train_tokens=500, eval_tokens=200, fields=fields, **SGD)
    leave_free(run, fitting=(3, 2)[rank])
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    validation = [entry["eval_loss"] for entry in run.validations]
    return {"losses": losses, "validation": validation, "weights": weights(run.model)}


@pytest.mark.parametrize(
    ("head", "fields"),
    [
        (None, KV),
        ("sequence", KV),
        pytest.param(None, {}, marks=pytest.mark.slow),
        pytest.param("token", KV, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_processes_train_as_one(tmp_path, head, fields):
    """The last batches are filled up with samples that score nothing."""
    first, second = ranks.run(on_two_ranks, tmp_path, str(tmp_path / "run"), head, fields)
    assert_identical(first["weights"], second["weights"])
    assert first["validation"] == second["validation"]
    arguments = {"per_device_train_batch_size": 4, "train_tokens": 500, "eval_tokens": 200, "fields": fields}
    alone = job(tmp_path / "alone", head, **arguments, **SGD)
    alone.train()
    losses = [entry["loss"] for entry in alone.state.log_history if "loss" in entry]
    assert_close(first["losses"], losses, rtol=1e-5, atol=1e-5)
    assert_close(first["validation"], [entry["eval_loss"] for entry in alone.validations], rtol=1e-5, atol=1e-5)
    for name, value in weights(alone.model).items():
        assert_close(first["weights"][name], value, rtol=1e-4, atol=1e-5)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_trained_is_refused(tmp_path):
    args = MaskedTrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match="MaskedTrainer trains a RecurrentForMaskedLM, not RecurrentForCausalLM"):
        MaskedTrainer(tiny.recurrent("gpt2"), args, TRAIN, tokenizer=encoders.tokenizer())
    with pytest.raises(ValueError, match=r"args is a TrainingArguments|args is a DocumentTrainingArguments"):
        MaskedTrainer(encoders.model(), args.__class__.__mro__[1](str(tmp_path), use_cpu=True), TRAIN,
                      tokenizer=encoders.tokenizer())  # fmt: skip
    with pytest.raises(ValueError, match="none of the 1 documents has a token to predict"):
        trainer(tmp_path, train=[[]])
    with pytest.raises(ValueError, match="eval_dataset: no token was chosen to be predicted. Validate on more text"):
        trainer(tmp_path, held_out=[[2, 4, 3]])
    with pytest.raises(ValueError, match="mask_probability=0 must be a number above 0"):
        trainer(tmp_path, mask_probability=0)
    with pytest.raises(ValueError, match="eval_dataset are labelled for token-classification"):
        job(tmp_path, "sequence", held_out=labelled("token-classification"))
    with pytest.raises(ValueError, match="evaluate needs documents: give eval_dataset, here or to MaskedTrainer"):
        trainer(tmp_path, held_out=None).evaluate()
