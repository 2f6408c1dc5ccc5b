# SPDX-License-Identifier: Apache-2.0
"""Graphs follow when a model or its settings change after its windows were captured."""

import copy
import pickle

import pytest
import torch
from helpers import tiny
from helpers.fast_path import IDS, model_pair, qa_forward, qa_pair, qa_step, step
from torch.testing import assert_close


def test_weights_stored_elsewhere_are_captured_again(captures):
    plain, fast = model_pair("gpt2")
    step(fast), step(fast)
    for model in (plain, fast):
        model.double()
    (expected, eager), (out, captured) = step(plain), step(fast)
    assert out.loss.dtype == torch.float64
    assert_close(out.loss, expected.loss)
    tiny.assert_same_gradients(eager, captured)
    for model in (plain, fast):
        model.base.requires_grad_(False)
    for _ in range(3):
        (_, eager), (_, captured) = step(plain), step(fast)
        tiny.assert_same_gradients(eager, captured)


def freeze_dropout(model):
    model.base.eval()


def cap_logits(model):
    model.base.config.final_logit_softcapping = 0.5


def remove_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


@pytest.mark.parametrize(
    ("name", "change"), [("gpt2", freeze_dropout), ("gpt2", remove_dropout), ("gemma3_text", cap_logits)]
)
def test_changed_settings_are_captured_again(name, change, captures):
    plain, fast = model_pair(name, training=True)
    for _ in range(3):
        before, _ = step(plain)
        step(fast)
    for model in (plain, fast):
        change(model)
    for _ in range(3):
        (expected, eager), (out, captured) = step(plain), step(fast)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(eager, captured)
    assert (before.loss - expected.loss).abs() > 1e-3
    assert captures


def test_autocast_may_change_between_calls(captures):
    results = []
    for model in model_pair("gpt2"):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                first = model(IDS[:, :21], labels=IDS[:, :21])
            second = model(IDS[:, 21:], labels=IDS[:, 21:], state=first.state)
            second.nll_sum.backward()  # through windows that ran under autocast
            gradients = tiny.gradients(model)
        results.append(gradients)
    tiny.assert_same_gradients(*results)
    assert captures


def test_a_model_may_change_before_its_backward_pass(captures):
    results = []
    for model in model_pair("gpt2"):
        step(model), step(model)
        out = model(IDS, labels=IDS)
        model.base.requires_grad_(False)
        model(IDS, labels=IDS)
        model.base.requires_grad_(True)
        out.state.memory["vector"].sum().backward()
        results.append(tiny.gradients(model))
    tiny.assert_same_gradients(*results)


@pytest.mark.parametrize("keep", [0, 100])
def test_a_question_answering_model_may_change_before_its_backward_pass(keep, captures):
    results = []
    for model in qa_pair("bert", keep_windows=keep):
        qa_step(model), qa_step(model)
        out = qa_forward(model)
        model.base.requires_grad_(False)
        qa_step(model)
        model.base.requires_grad_(True)
        out.loss.backward()
        results.append(tiny.gradients(model))
    tiny.assert_same_gradients(*results)


def test_weights_updated_in_place_are_used(captures):
    plain, fast = model_pair("gpt2")
    for model in (plain, fast):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(fast(IDS, labels=IDS).loss, plain(IDS, labels=IDS).loss)
    assert captures


def test_copies_and_pickles_have_graphs_of_their_own(captures):
    model = tiny.recurrent("gpt2")
    step(model), step(model)
    _, expected = step(model)
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not duplicate.graph_cache._graphs
        for _ in range(3):
            _, gradients = step(duplicate)
            tiny.assert_same_gradients(gradients, expected)
