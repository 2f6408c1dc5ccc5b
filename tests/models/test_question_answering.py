# SPDX-License-Identifier: Apache-2.0
"""The question-answering model: its loss, its outputs, and saving it."""

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny
from torch.testing import assert_close
from transformers import AutoModelForQuestionAnswering

import carryforward as cf
from carryforward.engine import bptt

QUESTIONS = tiny.QUESTIONS


def test_the_loss_is_that_of_kinds_starts_and_ends():
    model, documents = tiny.answering("bert"), tiny.documents(2, 20)
    starts, ends, kinds = torch.tensor([4, -100]), torch.tensor([6, -100]), torch.tensor([0, 1])
    out = model(documents, question_ids=QUESTIONS[:2], start_positions=starts, end_positions=ends, answer_kinds=kinds)
    logp = [logits.log_softmax(-1) for logits in (out.start_logits, out.end_logits, out.kind_logits)]
    expected = -(logp[0][0, 4] + logp[1][0, 6]) / 2 - (logp[2][0, 0] + logp[2][1, 1]) / 2
    assert_close(out.loss, expected)
    nothing = torch.tensor([-100, -100])
    out = model(
        documents, question_ids=QUESTIONS[:2], start_positions=nothing, end_positions=nothing, answer_kinds=kinds
    )
    out.loss.backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


def test_without_kinds_to_score_the_loss_is_that_of_starts_and_ends():
    model, ids = tiny.answering("bert"), tiny.documents(2, 30)
    inputs = {"question_ids": QUESTIONS[:2], "start_positions": torch.tensor([3, 4])}
    inputs["end_positions"] = inputs["start_positions"]
    unscored = torch.full((2,), -100)
    loss = model(ids, **inputs, answer_kinds=unscored).loss
    whole, kinds = model(ids, **inputs), torch.zeros(2, dtype=torch.long)
    assert_close(loss, whole.loss - F.cross_entropy(whole.kind_logits, kinds))
    loss.backward()
    assert not any(parameter.grad is None or parameter.grad.isnan().any() for parameter in model.kinds.parameters())


def test_positions_may_be_given_as_a_column():
    model, ids, row = tiny.answering("bert"), tiny.documents(2, 30), torch.tensor([3, 4])
    losses = [
        model(ids, question_ids=QUESTIONS[:2], start_positions=positions, end_positions=positions).loss
        for positions in (row, row[:, None])
    ]
    assert torch.equal(*losses)


def test_double_precision_is_kept():
    model = tiny.answering("bert").double()
    out = model(tiny.documents(2, 30), question_ids=QUESTIONS[:2])
    assert {out.start_logits.dtype, out.kind_logits.dtype} == {torch.float64}


@pytest.mark.parametrize("training", [False, True])
def test_outputs_of_a_window_do_not_hold_the_whole_window(training, monkeypatch):
    """A view of a window's hidden states would keep all of them in memory."""
    sizes = []
    unroll = bptt.unroll

    def watched(settings, state):
        results, state = unroll(settings, state)
        sizes.extend((tensor.untyped_storage().nbytes(), tensor.nbytes) for outputs in results for tensor in outputs)
        return results, state

    monkeypatch.setattr(bptt, "unroll", watched)
    with torch.set_grad_enabled(training):
        tiny.answering("bert")(tiny.documents(2, 40), question_ids=QUESTIONS[:2])
        labels = {"labels": torch.tensor([0, 1])} if training else {}
        tiny.recurrent("bert", "sequence")(tiny.documents(2, 40), **labels)
    assert len(sizes) > 10
    assert all(storage == own for storage, own in sizes)


def test_a_saved_model_is_loaded_by_its_auto_class(tmp_path):
    model, document = tiny.answering("roberta"), tiny.documents(1, 20)
    expected = model(document, question_ids=QUESTIONS[:1])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForQuestionAnswering.from_pretrained(tmp_path)
    assert type(loaded) is cf.RecurrentForQuestionAnswering
    out = loaded(document, question_ids=QUESTIONS[:1])
    assert_close(out.start_logits, expected.start_logits)
    assert_close(out.end_logits, expected.end_logits)
    assert_close(out.kind_logits, expected.kind_logits)
    assert loaded.config.recurrence.separator == (3, 3)
