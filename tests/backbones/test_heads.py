# SPDX-License-Identifier: Apache-2.0
"""A base model's head on given hidden states is what its own forward pass computes."""

import pytest
import torch
import transformers as hf
from helpers import tiny

import carryforward as cf
from carryforward.backbones.heads import answer_scores, classify


@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_a_classifiers_head_reads_the_first_token(name):
    model, ids = tiny.base(name, "sequence"), tiny.documents(2, 9)
    with torch.no_grad():
        first = model.base_model(ids).last_hidden_state[:, 0]
        torch.testing.assert_close(classify(model, first), model(ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_a_question_answering_head_scores_every_position(name):
    model = hf.AutoModelForQuestionAnswering.from_config(tiny.base(name).config).eval()
    ids = tiny.documents(2, 9)
    with torch.no_grad():
        starts, ends = answer_scores(model, model.base_model(ids).last_hidden_state)
        expected = model(ids)
    torch.testing.assert_close(starts, expected.start_logits, rtol=0, atol=1e-6)
    torch.testing.assert_close(ends, expected.end_logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("head", ["masked", "token", "none"])
def test_how_a_classifier_pools_does_not_matter_to_other_heads(head):
    fields = {"window": 8, "memory": "vector", "prefix": ()}
    ids = tiny.documents(1, 20)
    mean = cf.add_recurrence(tiny.base("modernbert", head, classifier_pooling="mean"), **fields)
    first = cf.add_recurrence(tiny.base("modernbert", head, classifier_pooling="cls"), **fields)
    mean.load_state_dict(first.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(mean(ids)[0], first(ids)[0], rtol=0, atol=0)
