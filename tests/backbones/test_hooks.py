# SPDX-License-Identifier: Apache-2.0
"""Hooks on a base model's layers: masks while a window is captured, and what they hold on to."""

import pytest
from helpers import tiny

from carryforward.backbones import hooks


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_while_a_window_is_recorded_it_needs_no_mask(name, monkeypatch):
    """Or what was compiled before is compiled again during the recording, which fails; and fast kernels want none."""
    from transformers import masking_utils

    model, masks = tiny.recurrent(name), []
    for layer in model.config.architecture.layer_list(model.backbone):
        attention = layer.get_submodule(model.config.architecture.attention)
        attention.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append([*args, kwargs.get("attention_mask")][-1]), with_kwargs=True
        )
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)  # as while a stream is captured
    with hooks.plain_masks():
        model.backbone(input_ids=tiny.documents(3, 45)[:, :3], use_cache=False)  # shorter than any sliding window
    assert len(masks) == model.config.base_config.num_hidden_layers
    assert all(mask is None for mask in masks)


def test_what_was_noted_is_let_go(monkeypatch):
    carries, make = [], hooks.HookContext
    monkeypatch.setattr(hooks, "HookContext", lambda: carries.append(make()) or carries[-1])
    model = tiny.recurrent("gpt2", keep_graph=True, slots=0, kept=3, sinks=1).train()
    model.gradient_checkpointing_enable()  # whose graph holds on to all that a layer was called with
    loss = model(tiny.documents(1, 30), labels=tiny.documents(1, 30)).loss
    assert carries
    assert all(carry.outputs is None and not carry.noted for carry in carries)
    loss.backward()
