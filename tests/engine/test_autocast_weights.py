# SPDX-License-Identifier: Apache-2.0
"""Weights cast once per call under autocast give the same numbers as weights cast in every window."""

import pytest
import torch
from helpers import fast_path, tiny
from helpers.fast_path import IDS, OperationLog, model_pair, qa_forward, qa_pair, step
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_weights_are_cast_once_per_call(name, keep, captures, monkeypatch):
    """And again in the next call, when they have changed."""
    plain, fast = model_pair(name, keep_windows=keep)
    modules = [m for layer in fast.config.architecture.layer_list(fast.backbone) for m in layer.modules()]
    weights = {m.weight.data_ptr() for m in modules if isinstance(m, torch.nn.Linear | Conv1D)}
    casts = []

    class CastLog(OperationLog):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in weights:
                casts.append(args[0])
            return super().__torch_dispatch__(function, types, args, kwargs)

    monkeypatch.setattr(fast_path, "OperationLog", CastLog)
    for seed in range(3):
        for model in (plain, fast):
            with torch.no_grad():
                for weight in model.base.parameters():
                    weight.mul_(1.1)
        with torch.autocast("cpu", torch.bfloat16):
            expected, eager = step(plain, seed=seed)
            out, captured = step(fast, seed=seed)
        assert torch.equal(out.loss, expected.loss)
        assert torch.equal(out.state.memory["vector"], expected.state.memory["vector"])
        assert out.state.memory["vector"].dtype == torch.float32
        tiny.assert_same_gradients(eager, captured)
    assert captures
    assert not casts, "a captured window casts no weight"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            assert_close(fast(IDS, labels=IDS).nll_sum, plain(IDS, labels=IDS).nll_sum)
    assert not casts, "a captured window casts no weight"


class Adapter(torch.nn.Module):
    """Reads the weight of the layer that it wraps, as some adapters do."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x):
        return self.base_layer(x) * torch.linalg.norm(self.base_layer.weight, dim=1)


class CustomLinear(torch.nn.Linear):
    """As a quantised layer might be."""


def adapt(model):
    for layer in model.backbone.layers:
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)


def tie(model):
    model.memory.vector.networks[0][0].weight = model.backbone.layers[0].self_attn.q_proj.weight


def customise(model):
    for module in model.backbone.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = CustomLinear


def halve(model):
    model.to(torch.bfloat16)


@pytest.mark.parametrize("change", [adapt, tie, customise, halve])
def test_weights_that_are_read_elsewhere_are_not_cast(change, captures):
    """Two calls before the backward pass: casting again must not change the weights themselves."""
    results = []
    for model in model_pair("llama", keep_windows=0, hidden_sizes=(16,)):
        change(model)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                first, second = model(IDS, labels=IDS), model(IDS.flip(1), labels=IDS.flip(1))
            (first.loss + second.loss).backward()
            gradients = tiny.gradients(model)
        results.append(gradients | {"losses": torch.stack([first.loss, second.loss]).detach()})
    assert torch.equal(results[0].pop("losses"), results[1].pop("losses"))
    # Autocast sums the gradients of a weight that is used twice in low precision, unless it casts it twice.
    tiny.assert_same_gradients(*results, tolerance=1e-3 if change is tie else 1e-5)
    assert captures


@pytest.mark.parametrize("keep", [0, 100])
def test_question_answering_under_autocast(keep, captures):
    plain, fast = qa_pair("bert", training=True, keep_windows=keep)
    for seed in range(3):
        for model in (plain, fast):
            with torch.no_grad():
                for weight in model.base.parameters():
                    weight.mul_(1.1)
        results = []
        for model in (plain, fast):
            with torch.autocast("cpu", torch.bfloat16):
                out = qa_forward(model, seed)
            out.loss.backward()  # outside of it, as is usual
            results.append((out, tiny.gradients(model)))
        (expected, eager), (out, captured) = results
        assert torch.equal(out.loss, expected.loss)
        tiny.assert_same_gradients(eager, captured)
    assert fast.graph_cache._replays
