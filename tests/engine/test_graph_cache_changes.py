# SPDX-License-Identifier: Apache-2.0
"""A model, or a setting of it, that changes after its windows were captured: the graphs follow."""

import copy
import pickle

import pytest
import torch
from helpers import tiny
from helpers.fast_path import IDS, answers, asked, both, learn, step
from torch.testing import assert_close


def test_weights_that_change_place_are_noticed(recordings):
    plain, fast = both("gpt2")
    step(fast), step(fast)
    for model in (plain, fast):
        model.double()
    (expected, slow), (out, quick) = step(plain), step(fast)
    assert out.loss.dtype == torch.float64
    assert_close(out.loss, expected.loss)
    tiny.assert_same_gradients(slow, quick)
    for model in (plain, fast):
        model.base.requires_grad_(False)
    for _ in range(3):
        (_, slow), (_, quick) = step(plain), step(fast)
        tiny.assert_same_gradients(slow, quick)


def freeze_dropout(model):
    model.base.eval()


def cap_logits(model):
    model.base.config.final_logit_softcapping = 0.5


def no_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


@pytest.mark.parametrize(
    ("name", "change"), [("gpt2", freeze_dropout), ("gpt2", no_dropout), ("gemma3_text", cap_logits)]
)
def test_settings_that_change_are_noticed(name, change, recordings):
    plain, fast = both(name, training=True)
    for _ in range(3):
        before, _ = step(plain)
        step(fast)
    for model in (plain, fast):
        change(model)
    for _ in range(3):
        (expected, slow), (out, quick) = step(plain), step(fast)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(slow, quick)
    assert (before.loss - expected.loss).abs() > 1e-3
    assert recordings


def test_autocast_that_changes_between_calls(recordings):
    results = []
    for model in both("gpt2"):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                first = model(IDS[:, :21], labels=IDS[:, :21])
            second = model(IDS[:, 21:], labels=IDS[:, 21:], state=first.state)
            second.nll_sum.backward()  # through windows that were run under autocast
            found = tiny.gradients(model)
        results.append(found)
    tiny.assert_same_gradients(*results)
    assert recordings


def test_a_model_that_changes_before_its_backward(recordings):
    results = []
    for model in both("gpt2"):
        step(model), step(model)
        out = model(IDS, labels=IDS)
        model.base.requires_grad_(False)
        model(IDS, labels=IDS)
        model.base.requires_grad_(True)
        out.state.carried.sum().backward()
        results.append(tiny.gradients(model))
    tiny.assert_same_gradients(*results)


@pytest.mark.parametrize("keep", [0, 100])
def test_an_answering_model_that_changes_before_its_backward(keep, recordings):
    results = []
    for model in answers("bert", keep_windows=keep):
        learn(model), learn(model)
        out = asked(model)
        model.base.requires_grad_(False)
        learn(model)
        model.base.requires_grad_(True)
        out.loss.backward()
        results.append(tiny.gradients(model))
    tiny.assert_same_gradients(*results)


def test_weights_that_change_in_place_are_used(recordings):
    plain, fast = both("gpt2")
    for model in (plain, fast):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(fast(IDS, labels=IDS).loss, plain(IDS, labels=IDS).loss)
    assert recordings


def test_copies_and_pickles_have_recordings_of_their_own(recordings):
    model = tiny.recurrent("gpt2")
    step(model), step(model)
    _, expected = step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not other.graph_cache._recordings
        for _ in range(3):
            _, found = step(other)
            tiny.assert_same_gradients(found, expected)
