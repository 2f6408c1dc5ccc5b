# SPDX-License-Identifier: Apache-2.0
"""The paper's protocol on `Trainer`: what is scored, what is kept, and several processes."""

import math
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import ranks, tiny
from helpers.trainers import (
    HELD_OUT,
    NO_DROPOUT,
    SGD,
    TARGETS,
    TRAIN,
    Watch,
    assert_identical,
    leave_free,
    trainer,
    weights,
)
from torch.testing import assert_close
from transformers import BatchEncoding, TrainerCallback

from carryforward.data.samples import Samples, StatefulBatchSampler
from carryforward.evaluation.perplexity import perplexity
from carryforward.training import callbacks
from carryforward.training.base_trainer import NonFiniteLoss
from carryforward.training.trainer import RecurrentTrainer, RecurrentTrainingArguments
from carryforward.utils import checkpoints, progress

# --- the protocol --------------------------------------------------------------------------------------------------


def test_every_target_is_trained_on_once_an_epoch(tmp_path):
    job = trainer(tmp_path, num_train_epochs=2)
    seen = []
    compute = job.compute_loss

    def spying(model, inputs, *args, **kwargs):
        seen.append(inputs["labels"][:, 1:].ne(-100).sum().item())
        return compute(model, inputs, *args, **kwargs)

    job.compute_loss = spying
    job.train()
    assert sum(seen) == 2 * TARGETS
    assert [job.tokens_after(step) for step in range(len(seen) + 1)] == np.cumsum([0, *seen]).tolist()
    assert job.order.indices(0).tolist() != job.order.indices(1).tolist()


def test_tokens_set_the_length_and_the_intervals(tmp_path):
    evaluated = []
    job = trainer(tmp_path, train_tokens=400, eval_tokens=100)
    evaluate = job.evaluate
    job.evaluate = lambda *args, **kwargs: evaluated.append(job.state.global_step) or evaluate(*args, **kwargs)
    job.train()
    last = job.state.global_step
    assert job.tokens_after(last - 1) < 400 <= job.tokens_after(last)
    crossed = [s for s in range(1, last + 1) if job.tokens_after(s) // 100 > job.tokens_after(s - 1) // 100]
    assert evaluated == sorted({*crossed, last})


def test_the_loss_is_that_of_all_targets_in_the_batch(tmp_path):
    """Not a mean of means: samples and accumulated batches of different lengths weigh by their targets."""
    job = trainer(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=3, train_tokens=1)
    model = tiny.recurrent("gpt2", settings=NO_DROPOUT)
    samples = Samples(TRAIN, 8, 2, 3)
    nats = targets = 0
    for index in job.order.indices(0)[:3]:
        one = samples[int(index)]
        out = model(one["input_ids"][None], labels=one["labels"][None])
        nats, targets = nats + out.nll_sum.item(), targets + int(out.n_scored)
    job.train()
    assert job.state.log_history[0]["loss"] == pytest.approx(nats / targets, rel=1e-5)


def test_accumulated_batches_equal_one_large_batch(tmp_path):
    runs = [
        trainer(tmp_path / str(size), per_device_train_batch_size=size, gradient_accumulation_steps=4 // size,
                held_out=None, max_grad_norm=0.5, **SGD)
        for size in (1, 4)
    ]  # fmt: skip
    for job in runs:
        job.train()
    for name, value in weights(runs[0].model).items():
        assert_close(value, weights(runs[1].model)[name], rtol=1e-4, atol=1e-5)


def test_validation_is_the_perplexity_of_whole_documents(tmp_path):
    job = trainer(tmp_path)
    score = perplexity(job.model, HELD_OUT)
    metrics = job.evaluate()
    assert metrics["eval_word_perplexity"] == pytest.approx(math.exp(score.nats / 51))
    assert metrics["eval_bits_per_byte"] == pytest.approx(score.nats / math.log(2) / 242)
    assert metrics["eval_loss"] == pytest.approx(score.nats / 78)


def test_token_lists_have_no_word_perplexity(tmp_path):
    """What cannot be had is not reported, and checkpoints are compared by the perplexity of tokens."""
    job = trainer(tmp_path, held_out=[document.tolist() for document in HELD_OUT])
    job.train()
    metrics = job.evaluate()
    assert not {"eval_word_perplexity", "eval_bits_per_byte"} & metrics.keys()
    assert metrics["eval_token_perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))
    assert job.state.best_metric == pytest.approx(metrics["eval_token_perplexity"])
    assert job.describe_metrics(metrics).startswith("validation token perplexity ")


def test_validation_shows_how_far_it_is(tmp_path, monkeypatch):
    shown, show = [], progress.ProgressBar.update

    def watched(bar, done, total=None, remark=None):
        shown.append(remark)
        show(bar, done, total, remark)

    monkeypatch.setattr(progress.ProgressBar, "update", watched)
    run = trainer(tmp_path, num_train_epochs=1, eval_tokens=10**6, per_device_eval_batch_size=1)
    callbacks.use_progress_bar(run)
    run.train()
    parts = [int(remark[12:-1]) for remark in shown if remark and remark.startswith("validating")]
    assert parts == sorted(parts)
    assert 0 < parts[0] < 100
    assert parts[-1] == 100
    assert "perplexity" in shown[-1]
    shown.clear()
    run.evaluate()
    assert not shown, "the bar is gone"


def test_what_a_bar_does_beside_its_work_is_not_in_its_rate(monkeypatch):
    now = iter(range(0, 1000, 10))  # ten seconds from each look at the clock to the next
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(now)))
    bar = progress.ProgressBar("training", 100, "tokens")  # looks at 0
    monkeypatch.setattr(progress.ProgressBar, "update", lambda bar, done, remark=None: setattr(bar, "done", done))
    bar.update(50)
    with bar.subtask("validating", 10) as advance:  # looks at 10
        advance(5)  # 20
    assert (bar.started, bar.done) == (20.0, 50)  # 30: twenty seconds later than it was
    assert bar.rate == pytest.approx(50 / 20)  # 40


def test_the_best_is_kept(tmp_path):
    job = trainer(tmp_path, learning_rate=0.3, num_train_epochs=3)  # so high that it gets worse after a while
    job.train()
    history = {e["step"]: e["eval_word_perplexity"] for e in job.state.log_history if "eval_loss" in e}
    assert min(history.values()) == job.state.best_metric == pytest.approx(job.evaluate()["eval_word_perplexity"])
    assert job.state.best_global_step < job.state.global_step, "or this test shows nothing"
    assert (tmp_path / f"checkpoint-{job.state.best_global_step}").exists()
    assert len(checkpoints.list_checkpoints(tmp_path)) == 2


def test_learning_rates_are_separate(tmp_path):
    job = trainer(tmp_path, learning_rate=1e-4, recurrence_learning_rate=1e-2, weight_decay=0.1)
    job.create_optimizer()
    rates = {id(p): group["lr"] for group in job.optimizer.param_groups for p in group["params"]}
    decays = {id(p): group["weight_decay"] for group in job.optimizer.param_groups for p in group["params"]}
    assert {rates[id(p)] for p in job.model.base.parameters()} == {1e-4}
    assert {rates[id(p)] for p in job.model.memory.parameters()} == {1e-2}
    assert decays[id(job.model.memory.vector.networks[0][-1].weight)] == 0.1
    assert len(rates) == len(list(job.model.parameters()))
    same = trainer(tmp_path, learning_rate=1e-4, recurrence_learning_rate=None)
    assert {group["lr"] for group in same.create_optimizer().param_groups} == {1e-4}


@pytest.mark.parametrize("arguments", [{"freeze_base": True}, {"use_state": False}], ids=["module alone", "plain"])
def test_only_one_part_is_trained(tmp_path, arguments):
    job = trainer(tmp_path, held_out=None, train_tokens=200, **arguments)
    before = weights(job.model)
    job.train()
    changed = {name.split(".")[0] for name, value in weights(job.model).items() if not torch.equal(value, before[name])}
    assert changed == ({"memory"} if "freeze_base" in arguments else {"base"})


def test_without_recurrence_the_base_model_is_trained_on_windows_that_stand_alone(tmp_path):
    job = trainer(tmp_path, held_out=None, train_tokens=1, use_state=False, per_device_train_batch_size=8)
    model = tiny.recurrent("gpt2", settings=NO_DROPOUT)
    batch = [Samples(TRAIN, 8, 2, 3)[int(i)] for i in job.order.indices(0)[:8]]
    outs = [model(s["input_ids"][None], labels=s["labels"][None], use_state=False) for s in batch]
    job.train()
    expected = sum(out.nll_sum.item() for out in outs) / sum(int(out.n_scored) for out in outs)
    assert job.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_is_not_a_number_stops_before_the_weights_are_touched(tmp_path):
    job = trainer(tmp_path, save_tokens=100)
    before = {}

    def poison(state, control):
        if state.global_step == 4:
            with torch.no_grad():
                job.model.base.transformer.ln_f.bias[0] = math.nan
            before.update(weights(job.model))

    job.add_callback(Watch(poison))
    with pytest.raises(NonFiniteLoss, match="norm became nan at step 5 .* smaller learning rate"):
        job.train()
    after = weights(job.model)
    assert all(torch.equal(value.nan_to_num(7), after[name].nan_to_num(7)) for name, value in before.items())
    assert checkpoints.latest_checkpoint(tmp_path) is not None, "what was saved is still there"


def test_a_gradient_that_is_not_a_number_is_never_saved(tmp_path):
    """Though the loss is one: the state is cut off from it, so only the gradient shows."""
    job = trainer(tmp_path, save_tokens=1)

    def poison(state, control):
        if state.global_step == 3:
            weight = job.model.memory.vector.networks[0][-1].weight
            weight.register_hook(lambda gradient: gradient * math.nan)

    job.add_callback(Watch(poison))
    with pytest.raises(NonFiniteLoss, match="at step 4"):
        job.train()
    assert checkpoints.latest_checkpoint(tmp_path).name == "checkpoint-3"
    assert all(value.isfinite().all() for value in weights(job.model).values())


def test_strategies_of_trainer_are_honoured(tmp_path):
    job = trainer(tmp_path, save_strategy="no", eval_strategy="no", load_best_model_at_end=False, train_tokens=300)
    job.train()
    assert not checkpoints.list_checkpoints(tmp_path)
    assert not any("eval_loss" in entry for entry in job.state.log_history)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eval_tokens": 0}, "eval_tokens=0 must be at least 1"),
        ({"freeze_base": True, "use_state": False}, "choose one"),
        ({"carry_state": True, "use_state": False}, "choose one"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **arguments)


def test_what_is_frozen_stays_so(tmp_path):
    made = trainer(tmp_path / "a")
    weight = made.model.base.get_input_embeddings().weight
    weight.requires_grad_(False)
    again = RecurrentTrainer(made.model, made.args, HELD_OUT)
    before = weight.clone()
    again.train()
    assert not weight.requires_grad
    assert torch.equal(weight, before)


def test_what_cannot_be_validated_on_is_refused(tmp_path):
    for held_out, message in (
        ({"a": HELD_OUT}, "is a dictionary"),
        ([np.array([3])], "no document has a second token"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, held_out=held_out)
    for rows in ([{"input_ids": [5, 6, 7]}], [BatchEncoding({"input_ids": [5, 6, 7]})]):
        with pytest.raises(ValueError, match=r'dataset\["input_ids"\]'):
            Samples(rows, 8, 0, 2)
        with pytest.raises(ValueError, match=r'dataset\["input_ids"\]'):
            trainer(tmp_path, held_out=rows)
    with pytest.raises(ValueError, match="label_smoothing_factor is not for recurrent models"):
        RecurrentTrainingArguments(str(tmp_path), label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="compute_loss_func"):
        RecurrentTrainer(tiny.recurrent("gpt2"), RecurrentTrainingArguments(str(tmp_path), use_cpu=True), HELD_OUT,
                         compute_loss_func=lambda *args, **kwargs: 0)  # fmt: skip


def test_nothing_to_train_is_refused(tmp_path):
    model = tiny.recurrent("llama", slots=0, recent=4)
    with pytest.raises(ValueError, match="has no parameters to train"):
        RecurrentTrainer(model, RecurrentTrainingArguments(str(tmp_path), use_cpu=True, freeze_base=True), TRAIN)


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # with nothing new to train, and with position offsets
def test_carried_keys_and_values_are_trained(tmp_path, name):
    model = tiny.recurrent(name, slots=0, recent=4, sinks=1)
    args = RecurrentTrainingArguments(
        str(tmp_path), use_cpu=True, disable_tqdm=True, per_device_train_batch_size=2, train_tokens=600,
        learning_rate=1e-3, windows_per_sample=3, save_strategy="no", eval_strategy="no", load_best_model_at_end=False,
    )  # fmt: skip
    before = weights(model)
    RecurrentTrainer(model, args, TRAIN).train()
    changed = {key.split(".")[0] for key, value in weights(model).items() if not value.equal(before[key])}
    assert changed == ({"base", "memory"} if name == "gpt2" else {"base"})


def test_other_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match="trains causal recurrent models, not GPT2LMHeadModel"):
        RecurrentTrainer(tiny.base("gpt2"), RecurrentTrainingArguments(str(tmp_path), use_cpu=True), TRAIN)


# --- carrying the state from sample to sample ----------------------------------------------------------------------


def test_rows_of_batches_read_documents_in_order_and_score_every_target_once():
    samples = Samples(TRAIN, 8, 2, 3, carry_state=True)
    sampler = StatefulBatchSampler(samples, rows=3, seed=0)
    for epoch in (0, 1):
        table = sampler.indices(epoch).reshape(-1, 3)
        used = table[table < len(samples)]
        assert sorted(used) == list(range(len(samples)))
        for row in table.T:
            spans = [samples.spans[i] for i in row if i < len(samples)]
            for (document, _, stop, *_), (following, start, *_) in pairwise(spans):
                assert (following == document and start == stop) or start == 0
    assert sampler.indices(0).tolist() != sampler.indices(1).tolist()
    assert len(sampler) == table.size


def test_with_the_state_carried_an_epoch_scores_what_whole_documents_score(tmp_path):
    """At a learning rate of zero: the losses of all steps, weighed by their targets, are those of whole documents."""
    job = trainer(tmp_path, carry_state=True, num_train_epochs=1, held_out=None, learning_rate=0.0,
                  recurrence_learning_rate=0.0)  # fmt: skip
    job.train()
    steps = [entry for entry in job.state.log_history if "loss" in entry]
    tokens = np.diff([job.tokens_after(step) for step in range(len(steps) + 1)])
    nats = sum(entry["loss"] * count for entry, count in zip(steps, tokens, strict=True))
    assert sum(tokens) == TARGETS
    assert nats == pytest.approx(perplexity(job.model, TRAIN).nats, rel=1e-5)


# --- several processes ---------------------------------------------------------------------------------------------


KV = {"slots": 0, "recent": 4, "sinks": 1}


def _on_two_ranks(rank, folder, fields):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    job = trainer(
        folder,
        per_device_train_batch_size=2,
        train_tokens=500,
        eval_tokens=200,
        fields=fields,
        **SGD,
    )
    leave_free(job, fitting=(3, 2)[rank])
    gradients = {}
    job.add_callback(_KeepGradients(job, gradients))
    job.train()
    losses = [entry["loss"] for entry in job.state.log_history if "loss" in entry]
    validation = [entry["eval_word_perplexity"] for entry in job.state.log_history if "eval_loss" in entry]
    again = trainer(folder, per_device_train_batch_size=2, train_tokens=500, eval_tokens=200, fields=fields, **SGD)
    leave_free(again, fitting=1)
    again.train(resume_from_checkpoint=True)
    return {
        "losses": losses, "validation": validation, "gradients": gradients, "weights": weights(job.model),
        "block_windows": (job.block_windows, again.block_windows),
    }  # fmt: skip


class _KeepGradients(TrainerCallback):
    def __init__(self, job, gradients):
        self.job, self.gradients = job, gradients

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        for name, parameter in self.job.model.named_parameters():
            self.gradients[f"{state.global_step} {name}"] = parameter.grad.clone()


@pytest.mark.parametrize("fields", [{}, {"keep_graph": True}, KV], ids=["recomputed", "kept", "kv"])
def test_two_processes_train_as_one(tmp_path, fields):
    """The last batches have samples of a single window, and empty ones that fill up. One process has less memory."""
    first, second = ranks.run(_on_two_ranks, tmp_path, str(tmp_path / "run"), fields)
    assert first["block_windows"] == second["block_windows"] == ((2, 2) if fields == KV else (1, 1))
    assert_identical(first["gradients"], second["gradients"])
    assert_identical(first["weights"], second["weights"])
    assert first["validation"] == second["validation"]
    fields = {key: value for key, value in fields.items() if key != "keep_graph"}
    alone = trainer(
        tmp_path / "alone", per_device_train_batch_size=4, train_tokens=500, eval_tokens=200, fields=fields, **SGD
    )
    alone.train()
    history = alone.state.log_history
    assert_close(first["losses"], [e["loss"] for e in history if "loss" in e], rtol=1e-5, atol=1e-5)
    assert_close(first["validation"], [e["eval_word_perplexity"] for e in history if "eval_loss" in e],
                 rtol=1e-5, atol=1e-5)  # fmt: skip
    for name, value in weights(alone.model).items():
        assert_close(first["weights"][name], value, rtol=1e-4, atol=1e-5)
