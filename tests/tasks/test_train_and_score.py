# SPDX-License-Identifier: Apache-2.0
"""Training on a task, and scoring: against a model that knows the answers, and by equivalences."""

import dataclasses
import itertools
import re

import pytest
import torch

import carryforward as cf
from carryforward.backbones.modes import eval_mode
from carryforward.tasks import score
from carryforward.tasks.base import TEST, sample_seed
from carryforward.tasks.copying import Copy
from carryforward.tasks.models import make_model
from carryforward.tasks.retrieval import Retrieval
from carryforward.tasks.score import Accuracy, binomial_interval, score_task
from carryforward.tasks.train import TaskTraining, train_task
from carryforward.windows import IGNORE, schedule

KINDS = ["vector", "kv", {"kind": "tokens", "memory_tokens": 2}, {"kind": "associative", "memory_tokens": 2}]


def tiny(task, memory="kv", **fields):
    return make_model(task, memory, layers=2, width=16, heads=2, **fields)


def kind_of(memory):
    return memory if isinstance(memory, str) else memory["kind"]


each_kind = pytest.mark.parametrize("memory", KINDS, ids=kind_of)


class Oracle(cf.RecurrentForCausalLM):
    """Knows a document by the tokens before an answer. It answers only where it has read the whole document."""

    def teach(self, samples, wrong_rows=(), wrong_column=None):
        """Learn the documents of samples, but an answer's token of some rows wrongly."""
        self.known = {}
        for row, ids in enumerate(samples.input_ids.tolist()):
            for column in range(1, len(ids)):
                wrong = row in wrong_rows and column == wrong_column % len(ids)
                self.known[tuple(ids[:column])] = (ids[column] + wrong) % self.config.vocab_size
        self.history = None

    def advance_state(self, input_ids, state=None, **kwargs):
        new = input_ids if state is None else torch.cat([self.history, input_ids], dim=1)
        self.history = new
        return super().advance_state(input_ids, state=state, **kwargs)

    def forward(self, input_ids, state=None, logits_to_keep=None, **kwargs):
        before = input_ids[:, :0] if state is None else self.history
        text = torch.cat([before, input_ids], dim=1).tolist()
        logits = torch.zeros(len(text), len(logits_to_keep), self.config.vocab_size)
        for row, ids in enumerate(text):
            for i, column in enumerate(logits_to_keep.tolist()):
                answer = self.known.get(tuple(ids[: before.shape[1] + column + 1]), 0)
                logits[row, i, answer] = 1.0
        return cf.models.outputs.RecurrentOutput(logits=logits)


@pytest.mark.parametrize("batch_size", [3, 50])
@pytest.mark.parametrize("task", [Retrieval("remember"), Copy(6, 3)], ids=lambda task: task.name)
def test_scores_are_those_of_an_oracle(monkeypatch, task, batch_size):
    monkeypatch.setattr(score, "_WINDOWS_PER_CALL", 2)  # several calls a document
    size, count = (9, 50) if task.name == "retrieval" else (6, 50)
    model = tiny(task)
    model.__class__ = Oracle
    together = task.samples(size, count, sample_seed(TEST, 0, size))
    model.teach(together, wrong_rows=range(10), wrong_column=-1)
    (result,) = score_task(model, task, [size], samples=count, batch_size=batch_size, controls=[])
    tokens = 1 if task.name == "retrieval" else 6
    assert result.accuracy == Accuracy(count, count - 10, count * tokens, count * tokens - 10)
    assert result.length == together.input_ids.shape[1]
    assert result.windows == len([*schedule(result.length, task.window)])
    if task.name == "retrieval":
        assert sum(result.by_depth, Accuracy()) == result.accuracy
        assert [one.samples for one in result.by_depth] == torch.histc(together.depths.float(), 5, 0, 1).tolist()


@each_kind
@pytest.mark.parametrize("task", [Retrieval("rewrite", window=5), Copy(7, 3)], ids=lambda task: task.name)
def test_answers_are_those_of_one_call_and_of_greedy_decoding(monkeypatch, memory, task):
    """Documents are read in pieces; logits of whole documents give the same answers, and so does `generate`."""
    monkeypatch.setattr(score, "_WINDOWS_PER_CALL", 1)
    size = 7
    model, samples = tiny(task, memory).eval(), task.samples(size, 6, sample_seed(TEST, 0, size))
    with eval_mode(model), torch.inference_mode():
        best = model(samples.input_ids).logits.argmax(dim=-1)[:, :-1]
    hits = (best == samples.labels[:, 1:]) & (samples.labels[:, 1:] != IGNORE)
    (result,) = score_task(model, task, [size], samples=6, batch_size=6)
    assert (result.accuracy.tokens_right, result.accuracy.samples) == (int(hits.sum()), 6)
    answers = int((samples.labels[0] != IGNORE).sum())
    prompt = samples.input_ids[:, :-answers]
    written = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=answers, pad_token_id=0
    )
    right = (written[:, -answers:] == samples.input_ids[:, -answers:]).all(dim=1)
    assert int(right.sum()) == result.accuracy.right


@each_kind
def test_the_control_without_memory_is_the_model_without_its_state(memory):
    task = Copy(7, 3)
    model, samples = tiny(task, memory), task.samples(7, 8, sample_seed(TEST, 0, 7))
    with eval_mode(model), torch.inference_mode():
        best = model(samples.input_ids, use_state=False).logits.argmax(dim=-1)[:, :-1]
        (result,) = score_task(model, task, [7], samples=8, batch_size=8)
    assert result.controls["no memory"].tokens_right == int((best == samples.labels[:, 1:]).sum())


def test_a_reset_memory_is_the_first_one():
    """Each window is read as the first of a document: with the learned first memory, not with none."""
    task = Copy(7, 3)
    model, samples = tiny(task, KINDS[2]), task.samples(7, 40, sample_seed(TEST, 0, 7))
    model.memory.tokens.first.data.normal_(std=3.0)
    expected = 0
    with eval_mode(model), torch.inference_mode():
        for start in range(0, samples.input_ids.shape[1] - 1, task.window):
            stop = start + task.window
            best = model(samples.input_ids[:, start : min(stop, samples.input_ids.shape[1] - 1)]).logits.argmax(-1)
            labels = samples.labels[:, start + 1 : stop + 1]
            expected += int((best == labels).sum())
    (result,) = score_task(model, task, [7], samples=40, batch_size=40)
    assert result.controls["memory reset"].tokens_right == expected
    assert result.controls["memory reset"] != result.controls["no memory"]


LEARN = TaskTraining(
    steps=80, sizes=(1,), batch_size=16, learning_rate=5e-3, warmup_steps=5, validate_every=20, stop_accuracy=0.9
)


def test_training_learns():
    """One pair and its question, two windows: without memory it is a guess."""
    task = Retrieval("rewrite")
    curve = train_task(model := tiny(task), task, LEARN)
    assert curve.stopped == "learnt"
    assert curve.tokens == curve.steps * 16 * task.length(1)
    (result,) = score_task(model, task, [1], samples=64)
    assert result.accuracy.whole > 0.8
    assert all(control.whole < 0.3 for control in result.controls.values())


def test_training_is_reproducible():
    task, training = Retrieval("rewrite"), dataclasses.replace(LEARN, steps=4, validate_every=2)
    first, second = (train_task(tiny(task), task, training).validations for _ in range(2))
    assert first == second
    other = train_task(tiny(task), task, dataclasses.replace(training, seed=1)).validations
    assert [one["loss"] for one in other] != [one["loss"] for one in first], "other documents"


def test_a_curriculum_goes_on_after_its_share_of_the_steps():
    task = Retrieval("rewrite")
    training = TaskTraining(steps=7, sizes=(1, 2, 3), batch_size=2, validation_samples=4, validate_every=3)
    curve = train_task(tiny(task), task, training)
    assert [(stage["size"], stage["step"]) for stage in curve.stages] == [(1, 2), (2, 4), (3, 7)]
    assert (curve.steps, curve.stopped) == (7, "steps")
    assert [(one["step"], one["size"]) for one in curve.validations] == [(2, 1), (3, 2), (4, 2), (6, 3), (7, 3)]


@pytest.mark.parametrize("stops", [(3,), (4, 6), (12, 14), (15,)], ids=str)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_been_interrupted(tmp_path, stops):
    task = Retrieval("rewrite")
    training = TaskTraining(steps=12, stage_steps=4, sizes=(1, 2, 3), batch_size=4, validate_every=3, warmup_steps=5,
                            decay_steps=3)  # fmt: skip
    expected = tiny(task)
    curve = train_task(expected, task, training)
    done = 0
    for stop in (*stops, 1000):
        model = tiny(task, seed=done)  # later its weights come from the checkpoint
        interrupted = map(stop.__le__, itertools.count(done + 1)).__next__
        again = train_task(model, task, training, interrupted=interrupted, checkpoint=tmp_path / "checkpoint.pt")
        done = again.steps
    assert all(torch.equal(one, other) for one, other in zip(expected.parameters(), model.parameters(), strict=True))
    assert {**again.as_json(), "seconds": 0} == {**curve.as_json(), "seconds": 0}


def test_the_rate_rises_and_falls(monkeypatch):
    rates = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: (rates.append(self.param_groups[0]["lr"]), step(self)))
    training = TaskTraining(steps=6, stage_steps=3, sizes=(1, 2), batch_size=2, warmup_steps=3, decay_steps=4,
                            learning_rate=0.1)  # fmt: skip
    curve = train_task(tiny(Retrieval()), Retrieval(), training)
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.1, 0.075, 0.05, 0.025])
    assert (curve.steps, curve.decay_from, curve.stopped, len(curve.stages)) == (10, 6, "steps", 2)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    task, file = Copy(4, 2), tmp_path / "checkpoint.pt"
    train_task(tiny(task), task, TaskTraining(steps=1, batch_size=2), checkpoint=file)
    with pytest.raises(ValueError, match="other settings"):
        train_task(tiny(task), task, TaskTraining(steps=2, batch_size=2), checkpoint=file)


def test_training_stops_when_interrupted():
    calls = iter([False, False, True])
    curve = train_task(tiny(Copy(4, 2)), Copy(4, 2), TaskTraining(batch_size=2), interrupted=lambda: next(calls))
    assert (curve.steps, curve.stopped) == (3, "interrupted")


def test_the_memory_has_its_own_learning_rate():
    task = Retrieval("rewrite")
    model = tiny(task, KINDS[2])
    before = [one.detach().clone() for one in model.base.parameters()]
    first = model.memory.tokens.first.detach().clone()
    training = TaskTraining(steps=1, sizes=(1,), batch_size=2, learning_rate=1e-30, recurrence_learning_rate=1e-2,
                            warmup_steps=0, weight_decay=0.0)  # fmt: skip
    train_task(model, task, training)
    assert all(torch.allclose(a, b) for a, b in zip(before, model.base.parameters(), strict=True))
    assert (model.memory.tokens.first - first).abs().max() > 5e-3


def test_intervals_are_those_of_tables():
    low, high = binomial_interval(95, 100)  # Wilson 1927: 0.888 to 0.978
    assert (round(low, 3), round(high, 3)) == (0.888, 0.978)
    assert binomial_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda task, model: score_task(model, Copy(9, 3)), "model reads windows of 3 tokens"),
        (lambda task, model: score_task(model.base, task), "model is a LlamaForCausalLM: give a recurrent causal"),
        (lambda task, model: score_task(model, task, controls=["none"]), "controls: 'none' must be one of"),
        (lambda task, model: score_task(model, task, samples=0), "samples=0 must be at least 1"),
        (lambda task, model: TaskTraining(steps=0), "steps=0 must be at least 1"),
        (lambda task, model: TaskTraining(sizes=()), "sizes=(): give at least one size"),
        (lambda task, model: TaskTraining(stop_accuracy=1.5), "stop_accuracy=1.5: it must be above 0 and at most 1"),
        (lambda task, model: TaskTraining(learning_rate=0.0), "learning_rate=0.0: it must be above 0"),
        (lambda task, model: make_model(task, "kv", backbone="bert"), "backbone='bert' must be one of llama, gpt2"),
        (lambda task, model: make_model(task, "kv", width=30), "width=30 must be a multiple of twice the 4 heads"),
    ],
)
def test_bad_input_is_refused(call, message):
    task = Retrieval("rewrite")
    with pytest.raises(ValueError, match=re.escape(message)):
        call(task, tiny(task))
