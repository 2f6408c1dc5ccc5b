# SPDX-License-Identifier: Apache-2.0
"""The chunked loss equals the loss of whole logits, whatever the chunk size."""

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny
from torch.testing import assert_close

from carryforward.engine import loss as loss_module
from carryforward.windows import IGNORE


def loss_of_logits(hidden, layer, targets):
    logits = layer(hidden).flatten(0, 1)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(exact, targets.flatten(), ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", ["all", "hidden", "weight", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [8, 24])  # fewer and more than there are positions
def test_loss_and_gradients_equal_those_of_whole_logits(rows, bias, trained, dtype, width, monkeypatch):
    monkeypatch.setitem(loss_module.CHUNK_BYTES, "cpu", rows * 4 * 37)
    torch.manual_seed(0)
    layer = torch.nn.Linear(width, 37, bias=bias, dtype=dtype)
    hidden = torch.randn(3, 5, width, dtype=dtype, requires_grad=trained in ("all", "hidden"))
    layer.requires_grad_(trained in ("all", "weight"))
    targets = torch.randint(37, (3, 5))
    targets[0, 2:] = targets[2, 4] = IGNORE
    results = []
    for loss in (loss_module.projected_nll_sum, loss_of_logits):
        value = loss(hidden, layer, targets)
        inputs = [x for x in (hidden, *layer.parameters()) if x.requires_grad]
        results.append([value, *(torch.autograd.grad(value * 3, inputs) if inputs else [])])
    assert len(results[0]) == len(results[1])
    for ours, expected in zip(*results, strict=True):
        assert_close(ours, expected)


@pytest.mark.parametrize("width", [8, 24])
def test_autocast_around_the_backward_pass_changes_nothing(width):
    torch.manual_seed(0)
    layer, hidden, targets = torch.nn.Linear(width, 37), torch.randn(3, 5, width), torch.randint(37, (3, 5))
    gradients = []
    for enabled in (False, True):
        loss = loss_module.projected_nll_sum(hidden, layer, targets)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            gradients.append(torch.autograd.grad(loss, [*layer.parameters()]))
    for inside, outside in zip(*gradients, strict=True):
        assert torch.equal(inside, outside)


@pytest.mark.parametrize(("positions", "width"), [(12, 64), (64, 12), (48, 50)])
def test_the_smaller_of_two_gradients_is_stored(positions, width):
    vocabulary, sizes = 1000, []
    layer, hidden = torch.nn.Linear(width, vocabulary), torch.randn(1, positions, width, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        loss_module.projected_nll_sum(hidden, layer, torch.zeros(1, positions, dtype=torch.long))
    assert max(sizes) == vocabulary * min(positions, width)


def test_the_loss_without_targets_is_zero():
    layer, hidden = torch.nn.Linear(4, 9), torch.randn(1, 3, 4, requires_grad=True)
    value = loss_module.projected_nll_sum(hidden, layer, torch.full((1, 3), IGNORE))
    value.backward()
    assert value == 0
    assert not hidden.grad.any()
    assert not layer.weight.grad.any()


@pytest.mark.parametrize("function", [loss_module.loss_and_gradient, loss_module.fusable_loss])
def test_padding_columns_of_the_vocabulary_do_not_count(function):
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 10), torch.tensor([3, 6, IGNORE, 0, 1, 2])
    real = logits[:, :7].clone().requires_grad_()
    expected = F.cross_entropy(real, targets, ignore_index=IGNORE, reduction="sum")
    expected.backward()
    assert function(logits.clone(), targets, 7, False)[1] is None
    nll, gradient = function(logits, targets, 7, True)
    assert_close(nll, expected.detach())
    assert_close(gradient[:, :7], real.grad)
    assert not gradient[:, 7:].any()


def test_a_token_of_probability_zero_does_not_affect_unscored_positions():
    layer, targets = torch.nn.Linear(4, 9), torch.tensor([[3, IGNORE, 4]])
    with torch.no_grad():
        layer.bias[0] = -torch.inf
    hidden = torch.randn(1, 3, 4)
    assert_close(loss_module.projected_nll_sum(hidden, layer, targets), loss_of_logits(hidden, layer, targets))


def test_under_autocast_logits_are_rounded_like_a_layer_s_output():
    torch.manual_seed(0)
    layer, hidden, targets = torch.nn.Linear(8, 37), torch.randn(3, 5, 8), torch.randint(37, (3, 5))
    results = []
    for loss in (loss_module.projected_nll_sum, loss_of_logits):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(hidden, layer, targets)
        value.backward()
        results.append((value, layer.weight.grad.clone()))
    assert results[0][0].dtype == torch.float32
    assert_close(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_the_loss_of_every_model_is_that_of_its_logits(name, monkeypatch):
    monkeypatch.setitem(loss_module.CHUNK_BYTES, "cpu", 4 * tiny.VOCABULARY)  # a row at a time
    model, ids = tiny.recurrent(name), tiny.documents(2, 30)
    with_logits = model(ids, labels=ids, return_logits=True)
    assert_close(model(ids, labels=ids).loss, with_logits.loss)
    if name == "gemma3_text":  # capped logits are more than a projection: they are computed whole
        plain = model(ids, labels=ids).loss
        model.base.config.final_logit_softcapping = 0.5
        capped = model(ids, labels=ids)
        assert_close(capped.loss, model(ids, labels=ids, return_logits=True).loss)
        assert (capped.loss - plain).abs() > 1e-3
