# SPDX-License-Identifier: Apache-2.0
"""Encoders that are not in the table, with every head: windows without a state are the base model's, and train."""

import pytest
import torch
from helpers import families, tiny
from helpers.family_checks import assert_close

import carryforward as cf

TYPES = ["esm", "eurobert", "nomic_bert", "gte", "roberta-prelayernorm", "ultrabert", "xmod", "albert"]
CASES = [
    (name, head)
    for name in TYPES
    for head in ("token", "sequence", "none")
    if (name, head) != ("eurobert", "sequence")  # pools by averaging, which is refused below
]
MEMORIES = [cf.KVMemoryConfig(recent=3, sinks=1), cf.VectorMemoryConfig(hidden_sizes=(12,))]


@pytest.mark.parametrize(("name", "head"), CASES)
def test_a_window_without_a_state_is_the_base_models(name, head):
    model = families.recurrent(name, head, memory=MEMORIES, overlap=0)
    ids = tiny.documents(2, 24)
    window = torch.cat([torch.full((2, 1), 2), ids[:, :8], torch.full((2, 2), 3)], dim=1)
    field = "last_hidden_state" if head == "none" else "logits"
    with torch.no_grad():
        expected = model.base(input_ids=window)[field]
        one, whole = model(ids[:, :8], use_state=False)[field], model(ids)[field]
        without_state = model(ids, use_state=False)[field]
    assert_close(one, expected if head == "sequence" else expected[:, 1:-2])
    assert (whole - without_state).abs().max() > 1e-3, "the state has an effect"
    if head != "none":
        model(ids, labels=ids % 2 if head == "token" else ids[:, 0] % 2).loss.backward()
        assert all(p.grad.abs().max() > 0 for key, p in model.memory.named_parameters() if "networks" in key)


def test_a_classifier_that_pools_by_averaging_is_refused():
    with pytest.raises(ValueError, match="a sequence classifier with classifier_pooling='mean': windows are joined by"):
        families.recurrent("eurobert", "sequence", memory=MEMORIES)


def test_a_new_question_answering_head_needs_a_class_of_transformers():
    with pytest.raises(ValueError, match="^head='question-answering': transformers has none for models of type 'esm'"):
        cf.add_recurrence(families.base("esm", "none"), head="question-answering", memory="vector", window=20)
