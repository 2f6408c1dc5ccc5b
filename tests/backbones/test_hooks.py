# SPDX-License-Identifier: Apache-2.0
"""Hooks on a base model's layers: no masks while a window is captured, and no references to a window's tensors."""

import pytest
from helpers import tiny

from carryforward.backbones import hooks
from carryforward.models import window_runner


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_no_mask_is_made_while_a_window_is_captured(name, monkeypatch):
    """A mask would rule out the fast kernels, and what was compiled without one would be compiled again."""
    from transformers import masking_utils

    model, masks = tiny.recurrent(name), []
    for layer in model.config.architecture.layer_list(model.backbone):
        attention = layer.get_submodule(model.config.architecture.attention)
        attention.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append([*args, kwargs.get("attention_mask")][-1]), with_kwargs=True
        )
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)  # as while a stream is captured
    with hooks.maskless_attention():
        model.backbone(input_ids=tiny.documents(3, 45)[:, :3], use_cache=False)  # shorter than any sliding window
    assert len(masks) == model.config.base_config.num_hidden_layers
    assert all(mask is None for mask in masks)


def test_a_context_releases_what_it_recorded(monkeypatch):
    contexts, make = [], hooks.HookContext
    monkeypatch.setattr(window_runner, "HookContext", lambda: contexts.append(make()) or contexts[-1])
    model = tiny.recurrent("gpt2", keep_graph=True, slots=0, recent=3, sinks=1).train()
    model.gradient_checkpointing_enable()  # its graph holds the arguments of every layer
    loss = model(tiny.documents(1, 30), labels=tiny.documents(1, 30)).loss
    assert contexts
    assert all(context.layer_outputs is None and not context.window_kv for context in contexts)
    loss.backward()
