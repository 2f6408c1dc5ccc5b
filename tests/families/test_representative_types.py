# SPDX-License-Identifier: Apache-2.0
"""The equivalences of a dozen model types that are not in the table of known ones, each with one memory in turn.

`make test-families` asks them of all types and all memories (`all_types.py`).
"""

import dataclasses

import pytest
import torch
from helpers import families, family_checks
from helpers.family_checks import AROUND, CHECKS, MEMORIES, build

import carryforward as cf
from carryforward.backbones.architectures import store_architecture
from carryforward.backbones.discovery import discover

CASES = []
for number, name in enumerate(families.REPRESENTATIVE):
    for place, (title, check) in enumerate(CHECKS.items()):
        memories = check.cases(name)
        if memories:
            CASES.append((name, title, memories[(number + place) % len(memories)]))


@pytest.mark.parametrize(("name", "title", "memory"), CASES, ids=lambda part: part or "any")
def test_what_makes_no_difference(name, title, memory):
    if name in families.NOT_INSTALLED:
        pytest.skip(f"{name} is not in this version of transformers")
    CHECKS[title].holds(name, memory)


@pytest.mark.parametrize("name", families.NO_MEMORY_POSITIONS)
@pytest.mark.parametrize("memory", AROUND)
def test_memory_positions_are_refused_where_embeddings_are_not_read_as_tokens(name, memory):
    with pytest.raises(ValueError, match=f'which {name} does not read as it reads token ids. Use memory="kv"'):
        build(name, memory)


# --- the checks can fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong", "title", "memory"),
    [
        ("granite", {"rotation_layout": "halves backwards"}, "two windows", "kv"),
        ("glm4", {"rotation_layout": "halves"}, "two windows", "kv"),
        ("smollm3", {"unrotated": ()}, "two windows", "kv"),
        ("granite", {"plain_head": True}, "state removed", "vector"),
    ],
)
def test_a_wrong_architecture_is_noticed(name, wrong, title, memory, monkeypatch):
    right = families.precise_base

    def described_wrongly(*args, **settings):
        model = right(*args, **settings)
        store_architecture(model.config, dataclasses.replace(discover(model), **wrong))
        return model

    monkeypatch.setattr(families, "precise_base", described_wrongly)
    with pytest.raises(AssertionError, match="differ by"):
        CHECKS[title].holds(name, memory)


@pytest.mark.parametrize(
    ("argument", "title"), [("state", "streamed"), ("attention_mask", "batched"), ("use_state", "state removed")]
)
@pytest.mark.parametrize("memory", MEMORIES)
def test_an_argument_that_is_ignored_is_noticed(argument, title, memory, monkeypatch):
    forward = cf.RecurrentForCausalLM.forward

    def without(self, *args, **kwargs):
        return forward(self, *args, **{key: value for key, value in kwargs.items() if key != argument})

    monkeypatch.setattr(cf.RecurrentForCausalLM, "forward", without)
    with pytest.raises(AssertionError, match="differ by|has no effect"):
        CHECKS[title].holds("granite", memory)


@pytest.mark.parametrize("title", ["recomputed", "blocks", "saved"])
def test_another_gradient_is_noticed(title, monkeypatch):
    """The second training step is of a model with a slightly larger weight."""
    steps, trained = [], family_checks.trained

    def changed(model, ids, **arguments):
        steps.append(model)
        if len(steps) == 2:
            with torch.no_grad():
                next(layer for layer in model.base.modules() if hasattr(layer, "q_proj")).q_proj.weight.mul_(1.01)
        return trained(model, ids, **arguments)

    monkeypatch.setattr(family_checks, "trained", changed)
    with pytest.raises(AssertionError, match="differ by"):
        CHECKS[title].holds("granite", "kv")


def test_other_logits_of_generation_are_noticed(monkeypatch):
    decode = family_checks.decode
    monkeypatch.setattr(family_checks, "decode", lambda model, ids, lengths: decode(model, ids.roll(1), lengths))
    with pytest.raises(AssertionError, match="logits differ by"):
        CHECKS["generated"].holds("granite", "kv")
