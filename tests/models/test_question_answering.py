# SPDX-License-Identifier: Apache-2.0
"""The model that finds answers in long documents: its loss, its outputs, and saving it."""

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny
from torch.testing import assert_close
from transformers import AutoModelForQuestionAnswering

import carryforward as cf
from carryforward.engine import bptt

QUESTIONS = tiny.QUESTIONS


def test_the_loss_by_hand():
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


def test_without_a_kind_to_score_the_loss_is_that_of_the_rest():
    model, ids = tiny.answering("bert"), tiny.documents(2, 30)
    asked = {"question_ids": tiny.QUESTIONS[:2], "start_positions": torch.tensor([3, 4])}
    asked["end_positions"] = asked["start_positions"]
    none = torch.full((2,), -100)
    loss = model(ids, **asked, answer_kinds=none).loss
    whole, kinds = model(ids, **asked), torch.zeros(2, dtype=torch.long)
    assert_close(loss, whole.loss - F.cross_entropy(whole.kind_logits, kinds))
    loss.backward()
    assert not any(parameter.grad is None or parameter.grad.isnan().any() for parameter in model.kinds.parameters())


def test_positions_may_stand_in_a_column():
    model, ids, places = tiny.answering("bert"), tiny.documents(2, 30), torch.tensor([3, 4])
    losses = [model(ids, question_ids=tiny.QUESTIONS[:2], start_positions=one, end_positions=one).loss
              for one in (places, places[:, None])]  # fmt: skip
    assert torch.equal(*losses)


def test_a_double_precision_model_stays_one():
    model = tiny.answering("bert").double()
    out = model(tiny.documents(2, 30), question_ids=tiny.QUESTIONS[:2])
    assert {out.start_logits.dtype, out.kind_logits.dtype} == {torch.float64}


@pytest.mark.parametrize("training", [False, True])
def test_windows_leave_nothing_behind_but_what_they_emit(training, monkeypatch):
    """Memory does not grow with the states of windows that were read."""
    held = []
    unroll = bptt.unroll

    def watched(plan, table):
        emissions, table = unroll(plan, table)
        held.extend((tensor.untyped_storage().nbytes(), tensor.nbytes) for emitted in emissions for tensor in emitted)
        return emissions, table

    monkeypatch.setattr(bptt, "unroll", watched)
    with torch.set_grad_enabled(training):
        tiny.answering("bert")(tiny.documents(2, 40), question_ids=QUESTIONS[:2])
        told = {"labels": torch.tensor([0, 1])} if training else {}
        tiny.recurrent("bert", "sequence")(tiny.documents(2, 40), **told)
    assert len(held) > 10
    assert all(storage == own for storage, own in held)


def test_saving_and_the_auto_class(tmp_path):
    model, document = tiny.answering("roberta"), tiny.documents(1, 20)
    expected = model(document, question_ids=QUESTIONS[:1])
    model.save_pretrained(tmp_path)
    again = AutoModelForQuestionAnswering.from_pretrained(tmp_path)
    assert type(again) is cf.RecurrentForQuestionAnswering
    found = again(document, question_ids=QUESTIONS[:1])
    assert_close(found.start_logits, expected.start_logits)
    assert_close(found.end_logits, expected.end_logits)
    assert_close(found.kind_logits, expected.kind_logits)
    assert again.config.recurrence.separator == (3, 3)
