# SPDX-License-Identifier: Apache-2.0
"""Weights that are cast once a call under autocast: the same numbers as casting them in every window."""

import pytest
import torch
from helpers import fast_path, tiny
from helpers.fast_path import IDS, Tape, answers, asked, both, step
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_under_autocast_weights_are_cast_once_a_call(name, keep, recordings, monkeypatch):
    """And again in the next one, when they have changed; to the numbers that casting them in every window gives."""
    plain, fast = both(name, keep_windows=keep)
    layers = {weight.data_ptr() for layer in fast.config.architecture.layer_list(fast.backbone) for weight in
              (m.weight for m in layer.modules() if isinstance(m, torch.nn.Linear | Conv1D))}  # fmt: skip
    cast = []

    class AutocastWeights(Tape):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in layers:
                cast.append(args[0])
            return super().__torch_dispatch__(function, types, args, kwargs)

    monkeypatch.setattr(fast_path, "Tape", AutocastWeights)
    for seed in range(3):
        for model in (plain, fast):
            with torch.no_grad():
                for weight in model.base.parameters():
                    weight.mul_(1.1)
        with torch.autocast("cpu", torch.bfloat16):
            expected, slow = step(plain, seed=seed)
            out, quick = step(fast, seed=seed)
        assert torch.equal(out.loss, expected.loss)
        assert torch.equal(out.state.carried, expected.state.carried)
        assert out.state.carried.dtype == torch.float32
        tiny.assert_same_gradients(slow, quick)
    assert recordings
    assert not cast
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            assert_close(fast(IDS, labels=IDS).nll_sum, plain(IDS, labels=IDS).nll_sum)
    assert not cast


class Adapter(torch.nn.Module):
    """Reads the weight of the layer it is around, as some adapters do."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x):
        return self.base_layer(x) * torch.linalg.norm(self.base_layer.weight, dim=1)


class Own(torch.nn.Linear):
    """Perhaps a quantised one."""


def adapted(model):
    for layer in model.backbone.layers:
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)


def tied(model):
    model.recurrence.networks[0][0].weight = model.backbone.layers[0].self_attn.q_proj.weight


def foreign(model):
    for module in model.backbone.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = Own


def half(model):
    model.to(torch.bfloat16)


@pytest.mark.parametrize("change", [adapted, tied, foreign, half])
def test_weights_that_others_look_at_are_not_cast(change, recordings):
    """Two calls before the backward pass: renewing what was cast must not touch the weights themselves."""
    results = []
    for model in both("llama", keep_windows=0, hidden_sizes=(16,)):
        change(model)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                first, second = model(IDS, labels=IDS), model(IDS.flip(1), labels=IDS.flip(1))
            (first.loss + second.loss).backward()
            found = tiny.gradients(model)
        results.append(found | {"losses": torch.stack([first.loss, second.loss]).detach()})
    assert torch.equal(results[0].pop("losses"), results[1].pop("losses"))
    # autocast adds the gradients of a weight that is used twice in its own precision, unless it casts it twice
    tiny.assert_same_gradients(*results, tolerance=1e-3 if change is tied else 1e-5)
    assert recordings


@pytest.mark.parametrize("keep", [0, 100])
def test_answering_under_autocast(keep, recordings):
    plain, fast = answers("bert", training=True, keep_windows=keep)
    for seed in range(3):
        for model in (plain, fast):
            with torch.no_grad():
                for weight in model.base.parameters():
                    weight.mul_(1.1)
        found = []
        for model in (plain, fast):
            with torch.autocast("cpu", torch.bfloat16):
                out = asked(model, seed)
            out.loss.backward()  # outside of it, as is usual
            found.append((out, tiny.gradients(model)))
        (expected, slow), (out, quick) = found
        assert torch.equal(out.loss, expected.loss)
        tiny.assert_same_gradients(slow, quick)
    assert fast.graph_cache._replayed
